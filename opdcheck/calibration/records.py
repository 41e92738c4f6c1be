"""What a calibrated budget keeps of its calibration: the fit and the evidence. Plain records; nothing is computed."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from opdcheck.calibration.file import Method, QualityName
from opdcheck.config import Metric, Model, Source


class BudgetMethod(Method):
    """The training method whose tolerance the limits describe, with what the candidate decides besides."""

    temperature: float = Field(gt=0)
    """Of the rollouts."""
    max_completion_length: int = Field(ge=1)
    """In tokens."""


class LevelTest(Model):
    """The non-inferiority test of one level."""

    name: str
    mismatch: float
    mean: float
    """Quality lost, over seeds."""
    upper: float
    """Its one-sided upper confidence bound."""
    passed: bool


class Fit(Model):
    """What the trainings of some levels say about their limit."""

    margin: float
    """Largest loss that counts as none, in the unit of the quality."""
    tests: list[LevelTest]
    """Upward from the smallest mismatch; the last is the first that failed, if one did."""
    certified: float | None
    """Mismatch of the last level that passed."""
    threshold: float
    slope: float
    """Of the hinge loss(x) = slope max(0, x - threshold)."""
    benchmark_dose: float | None
    """Where the hinge reaches the margin; None if that is beyond the highest level."""
    bmdl: float
    """Its lower limit at level 1 - alpha, at most the highest level."""
    censored: bool
    """No level failed: the true limit lies at or above the highest one."""
    limit: float | None
    """min(certified, bmdl); the highest level where censored; None where nothing could be certified."""


class CalibrationFit(Model):
    """The limits of a calibration and how they came about."""

    gain: float
    """Mean quality gained by the unperturbed trainings, in the unit of the quality."""
    gain_lower: float
    """Its lower confidence bound, of which the margin is a share."""
    total: Fit
    by_source: dict[Source, Fit] = {}
    """One fit for each source with at least two levels, where the sources disagree."""
    agreement_p: float | None = None
    """Chance of sources as different as these if one hinge served all; None with a single source."""


class Fitted(CalibrationFit):
    """The fit as the budget file keeps it, with the settings it was made with."""

    metric: Metric
    quality: QualityName
    margin_share: float
    alpha: float


class Evidence(Model):
    """One level of mismatch and its trainings. Lists have one entry per seed."""

    level: str
    source: str
    rollout: dict[str, Any]
    """The configuration, as the candidate file writes it; defaults left out."""
    mismatch: dict[str, float]
    """Mean of every metric, as `admit` measures it."""
    seeds: list[int]
    final_kl: list[float]
    """Held-out KL(student || teacher) after the last step, nats/token."""
    auc_kl: list[float]
    """The same, averaged over the training."""
    accuracy: list[float] | None
    """The verifier's, after the last step."""
    k3_in_training: list[float]
    """Mean k3 of the student's own rollouts that were trained on, nats/token."""

    def reached(self, quality: QualityName) -> list[float]:
        """What was compared, per seed; lower is better: held-out KL, or the share of wrong answers.

        Raises:
            ValueError: accuracy was not measured.
        """
        if quality != "accuracy":
            return self.final_kl if quality == "final" else self.auc_kl
        if self.accuracy is None:
            raise ValueError(f"level {self.level} has no accuracy")
        return [1 - value for value in self.accuracy]


class BacktestRow(Model):
    """One held-out configuration: what the gate said, and what full trainings showed."""

    name: str
    rollout: dict[str, Any]
    limit: float | None
    """That the gate held it to; None where the budget has none for one of its sources: then nothing was measured."""
    mismatch: float | None
    """Mean of the decision metric that the gate measured."""
    verdict: Literal["admit", "reject", "inconclusive"]
    prompts: int
    """How many the gate measured; 0 where there is no limit."""
    losses: list[float]
    """Quality lost against the unperturbed run of the same seed, per seed."""
    mean: float
    """Of the losses."""
    upper: float
    """Its one-sided upper confidence bound."""
    passed: bool
    """The test that certifies a calibration's levels: the bound is within the margin."""

    @property
    def agrees(self) -> bool:
        return (self.verdict == "admit") == self.passed

    @property
    def distance(self) -> float:
        """Mismatch over limit, less 1; 0 where there is no limit."""
        return 0.0 if self.limit is None or self.mismatch is None else self.mismatch / self.limit - 1


class Backtest(Model):
    """The gate against full trainings on held-out configurations."""

    margin: float
    alpha: float
    """Error level of the trainings' tests."""
    quality: QualityName
    """What was lost, and the unit of margin and losses."""
    seeds: list[int]
    gate_share: float
    """Rollouts of the gate as a share of the rollouts of the trainings it replaces."""
    rows: list[BacktestRow]


__all__ = ["Backtest", "BacktestRow", "BudgetMethod", "CalibrationFit", "Evidence", "Fit", "Fitted", "LevelTest"]
