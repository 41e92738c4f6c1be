"""The metrics of sampled tokens against the reference, and where the reference itself loses its digits."""

import math
import warnings

import numpy as np
import pytest
import reference
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from opdcheck.mismatch import metrics
from opdcheck.mismatch.sampled import sampled_mismatch

PER_TOKEN = ("k1", "k3", "abs_dlogp", "token_mult_prob_error", "probs_diff")

logprob = st.floats(-20, 0)
token_pairs = st.lists(st.tuples(logprob, logprob), min_size=1, max_size=30)


def columns(pairs):
    table = np.array(pairs, np.float64)
    return table[:, 0].copy(), table[:, 1].copy()


@pytest.mark.parametrize("name", PER_TOKEN)
@given(pairs=token_pairs)
def test_per_token_metric_matches_reference(name, pairs):
    logq, logp = columns(pairs)
    expected = [getattr(reference, name)(a, b) for a, b in zip(logq.tolist(), logp.tolist(), strict=True)]
    # 1e-15: what `exp(x) - 1 - x` in float64 is itself good for near x = 0.
    np.testing.assert_allclose(getattr(metrics, name)(logq, logp), expected, rtol=1e-6, atol=1e-15)


@given(pairs=token_pairs)
def test_chi2_and_ess_match_reference(pairs):
    logq, logp = columns(pairs)
    assert metrics.chi2_token(logq, logp) == pytest.approx(reference.chi2_token(logq, logp), rel=1e-6, abs=1e-14)
    assert metrics.ess(logq, logp) == pytest.approx(reference.ess(logq, logp), rel=1e-6)


@pytest.mark.parametrize("step", [1e-12, 1e-9, 1e-6, 1e-3, 0.029, 0.031, -1e-9, -0.029, -0.031, -1.0])
def test_k3_keeps_its_digits_for_tiny_differences(step):
    # Reference: the Taylor series in exact rational arithmetic.
    from fractions import Fraction

    x = Fraction(step)
    series = sum((x**n / math.factorial(n) for n in range(2, 40)), Fraction(0))
    assert metrics.k3(np.array([0.0]), np.array([step]))[0] == pytest.approx(float(series), rel=1e-10)


@pytest.mark.parametrize("name", PER_TOKEN)
def test_equal_policies_give_exactly_zero(name):
    logq = np.array([-1.5, -0.0, -300.0])
    expected = 1.0 if name == "token_mult_prob_error" else 0.0
    values = getattr(metrics, name)(logq, logq)
    assert (values == expected).all()
    assert not np.signbit(values).any()
    assert metrics.chi2_token(logq, logq) == 0
    assert metrics.ess(logq, logq) == 1


def test_ess_does_not_overflow():
    logq = np.array([-900.0, -1.0, -1.0])
    logp = np.array([-1.0, -1.0, -1.0])
    assert metrics.ess(logq, logp) == pytest.approx(1 / 3)
    assert metrics.ess(logp, logq) == pytest.approx(2 / 3)


@pytest.mark.parametrize("bad", [math.nan, -math.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_non_finite_values_show_and_do_not_warn(bad, side):
    pair = [np.array([-1.0, -2.0]), np.array([-1.5, -2.0])]
    pair[side][0] = bad
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        values = {name: getattr(metrics, name)(*pair) for name in PER_TOKEN}
        mismatch = sampled_mismatch(*pair)
    for name in ("k1", "k3", "abs_dlogp", "token_mult_prob_error"):
        assert not math.isfinite(values[name][0])
        assert math.isfinite(values[name][1])
    if math.isnan(bad):
        assert math.isnan(mismatch.tv[0])
        assert math.isnan(values["probs_diff"][0])


@given(pairs=token_pairs)
def test_sampled_estimates(pairs):
    logq, logp = columns(pairs)
    mismatch = sampled_mismatch(logq, logp)
    r = np.exp(logp - logq)
    np.testing.assert_allclose(mismatch.tv, np.where(r < 1, 1 - r, 0), rtol=1e-6, atol=1e-15)
    np.testing.assert_allclose(mismatch.kl, metrics.k3(logq, logp))
    assert ((mismatch.tv >= 0) & (mismatch.tv <= 1) & (mismatch.kl >= 0)).all()
    assert mismatch.estimator == "sampled"
    assert np.isnan(mismatch.argmax_flip).all()


def test_sampled_refuses_unequal_lengths():
    with pytest.raises((ValueError, TypeCheckError)):
        sampled_mismatch(np.zeros(2), np.zeros(3))
