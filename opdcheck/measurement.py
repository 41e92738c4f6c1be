"""The record of one measurement: everything a verdict and a report need, as plain numbers. No torch, no arrays."""

from __future__ import annotations

import math
from typing import Literal

from opdcheck.config import Model

Estimator = Literal["exact", "topk", "sampled"]
SourceName = Literal["kernel", "dtype", "weights", "activations", "kv_cache", "noise", "staleness"]


class MetricSummary(Model):
    """One metric over all tokens. Mean: token mean within a prompt, then mean over prompts."""

    mean: float
    standard_error: float | None
    """Over prompts; None with fewer than two."""
    lower: float | None = None
    """Bounds of the mean that hold whatever lies outside the top-k; equal to `mean` for estimator `exact`."""
    upper: float | None = None
    p99: float
    p99_9: float
    max: float
    estimator: Estimator
    """What `mean` rests on."""


class PositionBin(Model):
    """Mean mismatch of the tokens at completion positions `start <= position < stop`."""

    start: int
    stop: int
    tokens: int
    tv: float
    kl: float


class SourceShare(Model):
    """One source of mismatch alone, on the same tokens: in tv and kl, and per prompt on the decision's scale."""

    source: SourceName
    how: Literal["real", "simulated"]
    """`simulated`: the student with only this perturbation, on the same tokens; the split gives no other. `real`:
    measured on the engine."""
    tv: float
    kl: float
    prompt_values: list[float]
    """Of the decision metric (kl for k3, none for abs_dlogp), per prompt, for the per-source limit."""
    detail: str


class Part(Model):
    """Provenance of one part of the candidate: see `opdcheck.engines.base.Provenance`."""

    part: str
    how: Literal["real", "simulated", "not applied"]
    detail: str


class Measurement(Model):
    """All that was measured for one candidate."""

    engine: str
    estimator: Estimator
    prompts: int
    completions: int
    tokens: int
    truncated: int
    """Completions cut by max_completion_length."""
    metrics: dict[str, MetricSummary]
    """Keys: tv, kl, k1, k3, abs_dlogp, token_mult_prob_error, probs_diff; argmax_flip where the engine tells its argmax
    at every token."""
    chi2_token: float
    ess: float
    """Effective sample size as a share of the tokens, ratios not truncated."""
    prompt_values: dict[str, list[float]]
    """Per-prompt means, in the order they were measured, for every metric that can decide."""
    prompt_rows: list[int] = []
    """Which row of the prompt file, from 0, each of these prompts is: they are measured in a random order."""
    by_position: list[PositionBin]
    position_change: float | None = None
    """Mean over prompts of: mean tv of the second halves of a prompt's completions minus that of their first halves."""
    position_p: float | None = None
    """Two-sided p-value of a t-test over prompts that this change is 0; None where it cannot be tested."""
    provenance: list[Part]
    sources: list[SourceShare] = []
    sources_prompts: int | None = None
    """The sources were split on so many of the prompts, the first ones: as many as memory allows."""
    sources_notes: list[str] = []
    """What the split leaves out, as sentences."""
    left_over: float | None = None
    """Total tv on the split's prompts minus the kernel floor's and the sum of the sources' (interaction, and what the
    simulation does not reproduce)."""
    non_finite_tokens: int = 0
    """Tokens with NaN or infinite values on either side; any such token forbids admission."""
    from_cache: bool = False

    @property
    def sources_total(self) -> float:
        """Mean tv over the prompts that the sources were split on, which is what they are shares of."""
        if self.sources_prompts is None or self.sources_prompts >= self.prompts:
            return self.metrics["tv"].mean
        values = self.prompt_values["tv"][: self.sources_prompts]
        return math.fsum(values) / len(values)
