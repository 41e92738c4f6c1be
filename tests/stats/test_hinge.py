"""The hinge against data made from one, its bootstrap, and the test whether sources agree."""

from __future__ import annotations

import numpy as np
import pytest

from opdcheck.stats.hinge import Hinge, benchmark_doses, fit_hinge, resample_seeds, source_agreement

LEVELS = np.array([0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2])


def made(threshold: float, slope: float, noise: float, seed: int = 0, seeds: int = 5) -> np.ndarray:
    expected = slope * np.maximum(0, LEVELS - threshold)
    return expected[:, None] + np.random.default_rng(seed).normal(scale=noise, size=(len(LEVELS), seeds))


def test_recovers_a_hinge_without_noise() -> None:
    fitted = fit_hinge(LEVELS, made(0.05, 2.0, 0.0))
    assert fitted.threshold == pytest.approx(0.05, abs=0.2 / 1000)
    assert fitted.slope == pytest.approx(2.0, rel=0.01)
    assert fitted.benchmark_dose(0.1) == pytest.approx(0.1, rel=0.01)
    assert fitted(0.03) == 0


def test_no_rise_has_no_dose() -> None:
    fitted = fit_hinge(LEVELS, -np.abs(made(0.05, 0.0, 0.01)))
    assert fitted.slope == 0
    assert fitted.benchmark_dose(0.1) == float("inf")


def test_least_squares_against_a_plain_search() -> None:
    losses = made(0.07, 1.5, 0.02, seed=3)
    fitted = fit_hinge(LEVELS, losses)
    ours = sum(((losses[i] - fitted(x)) ** 2).sum() for i, x in enumerate(LEVELS))
    for threshold in np.linspace(0, 0.199, 200):
        for slope in np.linspace(0, 5, 101):
            other = Hinge(float(threshold), float(slope))
            theirs = sum(((losses[i] - other(x)) ** 2).sum() for i, x in enumerate(LEVELS))
            assert ours <= theirs + 1e-4


def test_the_dose_is_rarely_below_its_lower_bound() -> None:
    """Coverage of the 5 % quantile over repeated experiments; with 5 seeds a percentile bootstrap is a bit narrow."""
    truth = Hinge(0.05, 2.0).benchmark_dose(0.1)
    above = 0
    for experiment in range(200):
        losses = made(0.05, 2.0, 0.03, seed=experiment)
        doses = benchmark_doses(LEVELS, losses, 0.1, resample_seeds(5, 400, 0))
        above += np.quantile(doses, 0.05) > truth
    assert above / 200 < 0.15


def test_resampling_is_reproducible() -> None:
    assert (resample_seeds(5, 10, 0) == resample_seeds(5, 10, 0)).all()
    assert resample_seeds(3, 1000, 1).max() == 2


def test_levels_without_mismatch() -> None:
    with pytest.raises(ValueError, match="above 0"):
        fit_hinge(np.array([0.0]), np.zeros((1, 3)))


def both(second: np.ndarray) -> tuple[np.ndarray, np.ndarray, list[str]]:
    first = made(0.05, 2.0, 0.02, seed=1)
    return np.concatenate([LEVELS, LEVELS]), np.concatenate([first, second]), ["a"] * 7 + ["b"] * 7


def test_sources_that_agree_and_sources_that_do_not() -> None:
    assert source_agreement(*both(made(0.05, 2.0, 0.02, seed=2))).p_value > 0.05
    assert source_agreement(*both(made(0.12, 2.0, 0.02, seed=2))).p_value < 0.01


def test_agreement_is_hardly_ever_denied_wrongly() -> None:
    denied = 0
    for experiment in range(100):
        first, second = (made(0.05, 2.0, 0.03, seed=1000 + 2 * experiment + i) for i in (0, 1))
        mismatch, sources = np.concatenate([LEVELS, LEVELS]), ["a"] * 7 + ["b"] * 7
        agreement = source_agreement(mismatch, np.concatenate([first, second]), sources, bootstraps=200)
        denied += agreement.p_value < 0.05
    assert denied <= 15  # 5 expected; a bootstrap over 5 blocks is a little too ready


def test_one_source_has_nothing_to_agree_with() -> None:
    with pytest.raises(ValueError, match="two sources"):
        source_agreement(LEVELS, made(0.05, 2.0, 0.02), ["a"] * 7)
