"""Fixed-sequence non-inferiority: its bounds against scipy, and its error level by simulation."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from opdcheck.stats.noninferiority import fixed_sequence, lower_bound, upper_bound


def test_bounds_are_students() -> None:
    values = np.random.default_rng(0).normal(size=5)
    confidence = stats.ttest_1samp(values, 0.0).confidence_interval(0.9)  # two-sided 90 %: one-sided 95 % each
    assert upper_bound(values, 0.05) == pytest.approx(confidence.high)
    assert lower_bound(values, 0.05) == pytest.approx(confidence.low)


def test_one_seed_has_no_bound() -> None:
    with pytest.raises(ValueError, match="at least two seeds"):
        upper_bound(np.array([0.1]), 0.05)


def test_stops_at_the_first_failure() -> None:
    good, bad = [0.0, 0.001, -0.001], [0.5, 0.6, 0.4]
    tests = fixed_sequence([np.array(row) for row in (good, good, bad, good)], margin=0.1, alpha=0.05)
    assert [test.passed for test in tests] == [True, True, False]


def test_hardly_ever_passes_a_level_at_the_margin() -> None:
    """The chance that any level whose true loss is the margin passes stays at alpha, however many levels there are."""
    rng = np.random.default_rng(1)
    margin, alpha, experiments = 0.1, 0.05, 4000
    wrong = 0
    for _ in range(experiments):
        losses = rng.normal(margin, 0.05, size=(6, 5))  # six levels, all exactly at the margin
        wrong += any(test.passed for test in fixed_sequence(list(losses), margin, alpha))
    assert wrong / experiments < alpha + 3 * (alpha * (1 - alpha) / experiments) ** 0.5
