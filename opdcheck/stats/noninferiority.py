# ruff: noqa: F722  (jaxtyping's shape strings)
"""Is training at a mismatch level no worse than without, by more than a margin? Paired by seed; NumPy and SciPy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from scipy import stats

Array = np.ndarray


@dataclass(frozen=True)
class NonInferiorityTest:
    """One level's test: `upper` is the one-sided bound of the mean loss of quality."""

    mean: float
    upper: float
    passed: bool


def upper_bound(values: Float[Array, " seeds"], alpha: float) -> float:
    """One-sided (1 - alpha) upper confidence bound of the mean, by Student's t.

    Raises:
        ValueError: fewer than two values: there is no bound.
    """
    count = len(values)
    if count < 2:
        raise ValueError(f"a confidence bound needs at least two seeds, not {count}")
    error = float(np.std(values, ddof=1)) / count**0.5
    return float(np.mean(values)) + float(stats.t.ppf(1 - alpha, count - 1)) * error


def lower_bound(values: Float[Array, " seeds"], alpha: float) -> float:
    """One-sided (1 - alpha) lower confidence bound of the mean, by Student's t.

    Raises:
        ValueError: fewer than two values.
    """
    return -upper_bound(-np.asarray(values, np.float64), alpha)


def fixed_sequence(losses: Sequence[Float[Array, " seeds"]], margin: float, alpha: float) -> list[NonInferiorityTest]:
    """Tests the levels upward, from the smallest mismatch, and stops at the first that fails.

    Testing in an order fixed beforehand and stopping at the first failure keeps the chance of any wrong pass at alpha,
    whatever the number of levels (Maurer, Hothorn & Lehmacher 1995; Wiens 2003).

    Args:
        losses: per level, in ascending order of mismatch: quality lost against the unperturbed run of the same seed.
        margin: the largest mean loss that counts as none.
        alpha: error level of each test.

    Returns:
        The tests that were made: all passed, except possibly the last.
    """
    tests = []
    for loss in losses:
        upper = upper_bound(np.asarray(loss, np.float64), alpha)
        tests.append(NonInferiorityTest(mean=float(np.mean(loss)), upper=upper, passed=upper <= margin))
        if not tests[-1].passed:
            break
    return tests


__all__ = ["NonInferiorityTest", "fixed_sequence", "lower_bound", "upper_bound"]
