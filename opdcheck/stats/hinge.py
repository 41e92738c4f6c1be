# ruff: noqa: F722  (jaxtyping's shape strings)
"""Loss of quality against mismatch as a hinge: none up to a threshold, then a straight rise. Pure NumPy.

Benchmark dose: the mismatch at which the fitted loss reaches the margin. Its lower limit `bmdl` is a bootstrap over
seeds, which are the blocks: all levels of a resampled seed go together, since they share their data order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

Array = np.ndarray

THRESHOLDS = 1000
"""Grid of thresholds, evenly spaced from 0 to the highest level: the fit's resolution."""


@dataclass(frozen=True)
class Hinge:
    """loss(x) = slope * max(0, x - threshold). `slope` is 0 where the levels show no rise."""

    threshold: float
    slope: float

    def __call__(self, mismatch: float) -> float:
        return self.slope * max(0.0, mismatch - self.threshold)

    def benchmark_dose(self, margin: float) -> float:
        """The mismatch at which the loss reaches the margin; infinite without a rise."""
        return self.threshold + margin / self.slope if self.slope > 0 else float("inf")


def fit_hinge(mismatch: Float[Array, " levels"], losses: Float[Array, "levels seeds"]) -> Hinge:
    """Least squares over all seeds of all levels, slope at least 0.

    Raises:
        ValueError: no levels, or none above 0.
    """
    thresholds, slopes = _fit_many(mismatch, losses.mean(axis=1)[None])
    return Hinge(float(thresholds[0]), float(slopes[0]))


def benchmark_doses(
    mismatch: Float[Array, " levels"],
    losses: Float[Array, "levels seeds"],
    margin: float,
    seed_indices: Float[Array, "bootstraps seeds"],
) -> Float[Array, " bootstraps"]:
    """The benchmark dose of each resampled set of seeds; infinite where it shows no rise.

    Args:
        margin: the loss whose dose is asked for. The same in every resample, although a calibration takes it as a
            share of a gain that it measured too.
        seed_indices: which seeds make up each resample: see `resample_seeds`.
    """
    # The spread of a resampled mean of n is a share sqrt((n - 1)/n) too small.
    seeds = losses.shape[1]
    inflation = (seeds / (seeds - 1)) ** 0.5 if seeds > 1 else 1.0
    centre = losses.mean(axis=1, keepdims=True)
    means = (centre + inflation * (losses[:, seed_indices].mean(axis=2) - centre)).T  # [bootstraps, levels]
    thresholds, slopes = _fit_many(mismatch, means)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(slopes > 0, thresholds + margin / slopes, np.inf)


def resample_seeds(seeds: int, bootstraps: int, random_seed: int) -> np.ndarray:
    """Seeds drawn with replacement, int64 [bootstraps, seeds]; the same for the same arguments."""
    return np.random.default_rng(random_seed).integers(0, seeds, size=(bootstraps, seeds))


def _fit_many(mismatch: Array, means: Array) -> tuple[Array, Array]:
    """Fits each row of `means` [fits, levels]. The same number of seeds at each level makes means sufficient."""
    x = np.asarray(mismatch, np.float64)
    if x.size == 0 or x.max() <= 0:
        raise ValueError("a hinge needs at least one level with mismatch above 0")
    thresholds = np.linspace(0, x.max(), THRESHOLDS, endpoint=False)
    above = np.maximum(0, x[None] - thresholds[:, None])  # [thresholds, levels]
    squares = (above**2).sum(axis=1)
    slopes = np.maximum(0, means @ above.T / squares)  # [fits, thresholds]
    # Residual sum of squares is sum(means^2) less this:
    best = (slopes**2 * squares).argmax(axis=1)
    rows = np.arange(len(means))
    return thresholds[best], slopes[rows, best]


# --- do sources agree? ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SourceAgreement:
    """Whether one hinge serves all sources. `p_value`: how often a ratio as large comes up when it does."""

    f_ratio: float
    p_value: float


def source_agreement(
    mismatch: Float[Array, " levels"],
    losses: Float[Array, "levels seeds"],
    sources: Sequence[str],
    *,
    bootstraps: int = 2000,
    random_seed: int = 0,
) -> SourceAgreement:
    """Tests one hinge for all sources against a hinge for each.

    The statistic is the residual sum of squares that separate hinges save, as a share of what they leave, both over the
    level means plus the spread within levels. Its distribution under one common hinge comes from a bootstrap: the
    fitted common hinge plus each level's own deviations from its mean, seeds resampled as blocks.

    Args:
        sources: of each level.

    Raises:
        ValueError: fewer than two sources, or fewer than two seeds.
    """
    names = np.asarray(sources)
    seeds = losses.shape[1]
    if len(set(sources)) < 2:
        raise ValueError("agreement is a question between at least two sources")
    if seeds < 2:
        raise ValueError("agreement needs at least two seeds")
    groups = [np.flatnonzero(names == name) for name in dict.fromkeys(sources)]
    common = fit_hinge(mismatch, losses)
    expected = np.array([common(float(x)) for x in mismatch])
    # The deviations of a mean of n are a share (n - 1)/n too small.
    deviations = (losses - losses.mean(axis=1, keepdims=True)) * (seeds / (seeds - 1)) ** 0.5
    indices = resample_seeds(seeds, bootstraps, random_seed)
    resampled = expected[:, None, None] + deviations[:, indices]  # [levels, bootstraps, seeds]
    observed = _f_ratio(mismatch, losses.mean(axis=1)[None], losses.var(axis=1)[None], groups)[0]
    simulated = _f_ratio(mismatch, resampled.mean(axis=2).T, resampled.var(axis=2).T, groups)
    p_value = (1 + int((simulated >= observed).sum())) / (1 + bootstraps)
    return SourceAgreement(f_ratio=float(observed), p_value=p_value)


def _f_ratio(mismatch: Array, means: Array, variances: Array, groups: Sequence[Array]) -> Array:
    """(RSS of one hinge - RSS of one each) / (RSS of one each), per row of `means` [fits, levels]."""
    separate = sum(_residual_squares(mismatch[group], means[:, group]) for group in groups)
    within = variances.sum(axis=1)
    return np.asarray((_residual_squares(mismatch, means) - separate) / np.maximum(separate + within, 1e-300))


def _residual_squares(mismatch: Array, means: Array) -> Array:
    thresholds, slopes = _fit_many(mismatch, means)
    fitted = slopes[:, None] * np.maximum(0, mismatch[None] - thresholds[:, None])
    return np.asarray(((means - fitted) ** 2).sum(axis=1))


__all__ = ["Hinge", "SourceAgreement", "benchmark_doses", "fit_hinge", "resample_seeds", "source_agreement"]
