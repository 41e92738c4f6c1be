"""From trainings to limits: margin, non-inferiority tests, hinge, agreement of the sources. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from opdcheck.calibration.file import QualityName
from opdcheck.calibration.records import CalibrationFit, Fit, LevelTest
from opdcheck.config import Model, Source
from opdcheck.errors import OpdcheckError
from opdcheck.stats.hinge import benchmark_doses, fit_hinge, resample_seeds, source_agreement
from opdcheck.stats.noninferiority import fixed_sequence, lower_bound
from opdcheck.units import lost, number

BOOTSTRAPS = 4000
RANDOM_SEED = 0
"""Of the bootstrap: the same trainings give the same limit."""


class CannotCalibrateError(OpdcheckError):
    """The trainings say nothing about a limit. Exit code 4; finished runs are kept."""


class LevelLosses(Model):
    """One level of mismatch and what training under it cost."""

    name: str
    source: Source
    mismatch: float
    """Mean of the calibration's metric, as `admit` measures it."""
    losses: list[float]
    """Quality lost against the unperturbed run of the same seed, per seed: positive is worse."""

    @property
    def mean(self) -> float:
        return math.fsum(self.losses) / len(self.losses)


def calibrate_limits(
    levels: Sequence[LevelLosses], gains: Sequence[float], *, margin_share: float, alpha: float, quality: QualityName
) -> CalibrationFit:
    """Fits all levels together, and each source apart where they disagree.

    Args:
        levels: all but the unperturbed one, in any order.
        gains: per seed, what the unperturbed training gained.
        margin_share: margin / lower bound of the gain.
        alpha: error level of each test and bound.
        quality: whose gains and losses these are, for messages.

    Raises:
        CannotCalibrateError: the unperturbed student gains nothing, or no level can be certified.
    """
    gain_lower = lower_bound(np.asarray(gains), alpha)
    if not gain_lower > 0:
        raise _no_gain(gains, gain_lower, quality)
    margin = margin_share * gain_lower
    ordered = sorted(levels, key=lambda level: level.mismatch)
    total = fit_levels(ordered, margin, alpha)
    sources = list(dict.fromkeys(level.source for level in levels))
    p_value = None
    by_source: dict[Source, Fit] = {}
    if len(sources) > 1:
        mismatch, losses = _arrays(ordered)
        p_value = source_agreement(
            mismatch, losses, [level.source for level in ordered], random_seed=RANDOM_SEED
        ).p_value
        if p_value < alpha:
            grouped = {source: [level for level in ordered if level.source == source] for source in sources}
            by_source = {source: fit_levels(group, margin, alpha) for source, group in grouped.items()}
    if total.limit is None and all(fit.limit is None for fit in by_source.values()):
        raise _cannot_certify(total, len(gains), quality)
    return CalibrationFit(
        gain=math.fsum(gains) / len(gains),
        gain_lower=gain_lower,
        total=total,
        by_source=by_source,
        agreement_p=p_value,
    )


def fit_levels(ordered: Sequence[LevelLosses], margin: float, alpha: float) -> Fit:
    """Tests and hinge of some levels, in ascending order of mismatch."""
    mismatch, losses = _arrays(ordered)
    tests = fixed_sequence(list(losses), margin, alpha)
    passed = sum(test.passed for test in tests)
    censored = passed == len(ordered)
    certified = float(mismatch[passed - 1]) if passed else None
    highest = float(mismatch[-1])
    hinge = fit_hinge(mismatch, losses)
    dose = hinge.benchmark_dose(margin)
    resampled = resample_seeds(losses.shape[1], BOOTSTRAPS, RANDOM_SEED)
    doses = np.minimum(benchmark_doses(mismatch, losses, margin, resampled), highest)
    bmdl = float(np.quantile(doses, alpha))
    limit = None if certified is None else highest if censored else min(certified, bmdl)
    return Fit(
        margin=margin,
        tests=[
            LevelTest(name=level.name, mismatch=level.mismatch, mean=test.mean, upper=test.upper, passed=test.passed)
            for level, test in zip(ordered, tests, strict=False)
        ],
        certified=certified,
        threshold=hinge.threshold,
        slope=hinge.slope,
        benchmark_dose=dose if dose <= highest else None,
        bmdl=bmdl,
        censored=censored,
        limit=limit,
    )


def _arrays(levels: Sequence[LevelLosses]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([level.mismatch for level in levels]), np.array([level.losses for level in levels])


def _no_gain(gains: Sequence[float], lower: float, quality: QualityName) -> CannotCalibrateError:
    listed = ", ".join(number(gain) for gain in gains)
    return CannotCalibrateError(
        f"the unperturbed trainings gain nothing that could be lost: gains {listed}, lower bound "
        f"{lost(quality, lower)}",
        hint="Raise method.steps or method.learning_rate until the unperturbed student clearly gains; if its quality "
        "falls, lower method.learning_rate. Finished runs are kept.",
    )


def _cannot_certify(fit: Fit, seeds: int, quality: QualityName) -> CannotCalibrateError:
    first = fit.tests[0]
    within = "though its mean is within" if first.mean <= fit.margin else "and its mean is outside"
    return CannotCalibrateError(
        f"cannot certify: the lowest level ({first.name}, mismatch {number(first.mismatch)}) loses up to "
        f"{lost(quality, first.upper)} at {seeds} seeds, {within} the margin {number(fit.margin)}",
        hint="Add seeds (the bound narrows), or a lower level to the ladder. Finished runs are kept.",
    )


__all__ = ["CannotCalibrateError", "LevelLosses", "calibrate_limits", "fit_levels"]
