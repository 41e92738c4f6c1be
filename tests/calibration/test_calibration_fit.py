"""From losses to limits, on made-up trainings whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest

from opdcheck.calibration.calibrator import limits_of
from opdcheck.calibration.fit import CannotCalibrateError, LevelLosses, calibrate_limits

LEVELS = [0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15]
GAINS = [0.98, 1.0, 1.02, 1.0, 1.0]


def made(threshold: float, slope: float, *, noise: float = 0.005, source: str = "noise", seed: int = 0) -> list:
    rng = np.random.default_rng(seed)
    return [
        LevelLosses(
            name=f"{source} {x:g}",
            source=source,
            mismatch=x,
            losses=(slope * max(0.0, x - threshold) + rng.normal(scale=noise, size=5)).tolist(),
        )
        for x in LEVELS
    ]


def limits(levels: list, gains: list[float] = GAINS, quality: str = "final"):
    return calibrate_limits(levels, gains, margin_share=0.1, alpha=0.05, quality=quality)


def test_limit_is_the_smaller_of_certified_and_bmdl() -> None:
    """Loss 2 (x - 0.05): the margin, about 0.097, is reached at 0.0985; 0.08 is the last level clearly within."""
    fit = limits(made(0.05, 2.0))
    assert fit.total.certified == 0.08
    assert fit.total.benchmark_dose == pytest.approx(0.0985, abs=0.005)
    assert fit.total.bmdl < fit.total.benchmark_dose
    assert fit.total.limit == min(0.08, fit.total.bmdl)
    assert not fit.total.censored
    assert [test.passed for test in fit.total.tests] == [True] * 5 + [False]


def test_no_failure_is_censored_at_the_highest_level() -> None:
    fit = limits(made(0.05, 0.0))
    assert fit.total.censored
    assert fit.total.limit == 0.15


def test_the_order_given_does_not_matter() -> None:
    levels = made(0.05, 2.0)
    assert limits(levels[::-1]) == limits(levels)


def test_no_gain() -> None:
    with pytest.raises(CannotCalibrateError, match="gain nothing that could be lost"):
        limits(made(0.05, 2.0), [0.1, -0.1, 0.0, 0.05, -0.02])
    with pytest.raises(CannotCalibrateError, match="gain nothing"):
        limits(made(0.05, 2.0), [-0.5, -0.4, -0.6, -0.5, -0.5])
    with pytest.raises(CannotCalibrateError, match="of accuracy"):
        limits(made(0.05, 2.0), [-0.5, -0.4, -0.6, -0.5, -0.5], "accuracy")


def test_too_much_noise_cannot_be_certified() -> None:
    with pytest.raises(CannotCalibrateError, match="cannot certify") as caught:
        limits(made(0.05, 2.0, noise=0.5, seed=3))
    assert "Add seeds" in str(caught.value)


def test_sources_that_disagree_get_fits_of_their_own() -> None:
    fit = limits([*made(0.05, 2.0), *made(0.1, 2.0, source="staleness", seed=1)])
    assert fit.agreement_p is not None
    assert fit.agreement_p < 0.05
    assert fit.by_source["noise"].limit < fit.by_source["staleness"].limit


def test_limits_by_source() -> None:
    """The strictest of all is the total, which holds for whatever has no limit of its own."""
    fit = limits([*made(0.05, 2.0), *made(0.1, 2.0, source="staleness", seed=1)])
    found = limits_of(fit, "tv")
    noise, staleness = fit.by_source["noise"].limit, fit.by_source["staleness"].limit
    assert found.total_by_source == {"noise": {"tv": noise}, "staleness": {"tv": staleness}}
    assert found.total == {"tv": min(noise, staleness, fit.total.limit)}


def test_a_source_whose_lowest_level_fails_has_no_limit() -> None:
    fit = limits([*made(0.05, 2.0), *made(-0.2, 2.0, source="quantization", seed=1)])
    assert fit.by_source["quantization"].limit is None
    assert limits_of(fit, "tv").total_by_source["quantization"] is None


@pytest.mark.parametrize(("lost", "limit"), [(0.5, None), (0.0, 0.03)])
def test_a_source_of_one_level_gets_no_limit_from_another(lost: float, limit: float | None) -> None:
    """Where the sources disagree, nothing is known of the one that failed, or beyond the one level that passed."""
    losses = [lost + 0.001 * seed for seed in range(5)]
    alone = LevelLosses(name="kv cache fp8", source="quantization", mismatch=0.03, losses=losses)
    fit = limits([*made(0.05, 2.0), *made(0.1, 2.0, source="staleness", seed=1), alone])
    assert fit.agreement_p < 0.05
    assert fit.by_source["quantization"].limit == limit
    assert limits_of(fit, "tv").total_by_source["quantization"] == (None if limit is None else {"tv": limit})


def test_sources_that_agree_share_one() -> None:
    fit = limits([*made(0.05, 2.0), *made(0.05, 2.0, source="staleness", seed=1)])
    assert fit.agreement_p > 0.05
    assert fit.by_source == {}
    assert limits_of(fit, "tv").total_by_source == {}
