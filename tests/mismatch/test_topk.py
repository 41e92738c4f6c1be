"""The top-k estimator: unbiased by enumeration of every possible sample, bounds for each of them, odd inputs."""

import math

import numpy as np
import pytest
import reference
from distributions import log_normalize, make_pair, pairs, seeds, supported_pairs
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from opdcheck.mismatch.sampled import sampled_mismatch
from opdcheck.mismatch.topk import ROUNDING, topk_mismatch

ks = st.integers(1, 25)


def every_sample(logq, logp, k):
    """One row for each token that q can sample. Returns (weights q(a), ids of the top-k, the mismatch)."""
    k = min(k, len(logq))
    samples = np.flatnonzero(np.isfinite(logq))
    top = np.argsort(-logq, kind="stable")[:k]
    rows = len(samples)
    mismatch = topk_mismatch(
        samples,
        logq[samples],
        logp[samples],
        np.tile(top, (rows, 1)),
        np.tile(logq[top], (rows, 1)),
        np.tile(logp[top], (rows, 1)),
        np.full(rows, np.argmax(logp)),
    )
    return np.exp(logq[samples]), top.tolist(), mismatch


@given(pair=supported_pairs, k=ks)
def test_estimates_are_unbiased(pair, k):
    q, _, mismatch = every_sample(*pair, k)
    assert (q * mismatch.tv).sum() == pytest.approx(reference.tv(*pair), rel=1e-12, abs=1e-12)
    assert (q * mismatch.kl).sum() == pytest.approx(reference.kl(*pair), rel=1e-12, abs=1e-12)


@given(pair=pairs, k=ks)
def test_mass_outside_the_support_is_missing_from_kl_alone(pair, k):
    logq, logp = pair
    q, top, mismatch = every_sample(logq, logp, k)
    exhausted = np.isneginf(logq[top]).any()
    outside = math.fsum(math.exp(b) for a, b in enumerate(logp) if logq[a] == -math.inf and not exhausted)
    assert (q * mismatch.tv).sum() == pytest.approx(reference.tv(*pair), rel=1e-12, abs=1e-12)
    assert (q * mismatch.kl).sum() == pytest.approx(reference.kl(*pair) - outside, rel=1e-12, abs=1e-12)


@given(pair=pairs)
def test_a_list_that_covers_the_support_is_exact(pair):
    logq, logp = pair
    q, _, mismatch = every_sample(logq, logp, len(logq))
    assert mismatch.kl == pytest.approx(reference.kl(*pair), rel=1e-9, abs=1e-12)
    assert (q * mismatch.tv).sum() == pytest.approx(reference.tv(*pair), rel=1e-9, abs=1e-12)
    assert mismatch.tv_lower == pytest.approx(reference.tv(*pair), rel=1e-9, abs=1e-12)
    assert mismatch.tv_upper == pytest.approx(reference.tv(*pair), rel=1e-9, abs=1e-12)


@given(pair=st.builds(make_pair, seeds, st.integers(5, 60), st.just("zeros")))
def test_support_that_ends_within_the_list_needs_no_flag(pair):
    support = int(np.isfinite(pair[0]).sum())
    _, _, mismatch = every_sample(*pair, support + 1)
    assert mismatch.kl == pytest.approx(reference.kl(*pair), rel=1e-9, abs=1e-12)


@given(pair=pairs, k=ks)
def test_bounds_hold_for_every_sample(pair, k):
    _, _, mismatch = every_sample(*pair, k)
    tv, kl = reference.tv(*pair), reference.kl(*pair)
    assert (mismatch.tv_lower <= tv + 1e-12).all()
    assert (mismatch.tv_upper >= tv - 1e-12).all()
    assert (mismatch.kl_lower <= kl + 1e-12).all()
    for bound in (mismatch.tv_lower, mismatch.tv_upper, mismatch.tv):
        assert ((bound >= 0) & (bound <= 1)).all()
    assert (mismatch.kl_lower >= 0).all()
    assert (mismatch.kl >= 0).all()


@given(pair=supported_pairs, k=ks)
def test_bounds_match_reference(pair, k):
    _, top, mismatch = every_sample(*pair, k)
    for row, sample in enumerate(range(len(pair[0]))):
        own = top if sample in top else [*top, sample]
        assert mismatch.tv_lower[row] == pytest.approx(reference.tv_lower(*pair, own), rel=1e-6, abs=1e-12)
        assert mismatch.tv_upper[row] == pytest.approx(reference.tv_upper(*pair, top), rel=1e-6, abs=1e-12)
        if min(side[-1] for side in reference.coarsen(*pair, own)) > 1e-3 or len(own) == len(pair[0]):
            # Else the allowance for rounding of the rest's mass shows; the bound is then lower, see the next assertion.
            assert mismatch.kl_lower[row] == pytest.approx(reference.kl_lower(*pair, own), rel=1e-6, abs=1e-5)
        # The rest's masses are 1 minus a sum: off by 2e-16, which a logarithm at `ROUNDING` makes 2e-10.
        assert mismatch.kl_lower[row] <= reference.kl_lower(*pair, own) + 1e-9


@given(pair=supported_pairs, k=ks)
def test_no_more_variance_than_sampling_and_the_argmax_is_known(pair, k):
    logq, logp = pair
    q, _, mismatch = every_sample(logq, logp, k)
    plain = sampled_mismatch(logq, logp)
    tv, kl = reference.tv(*pair), reference.kl(*pair)
    assert (q * (mismatch.tv - tv) ** 2).sum() <= (q * (plain.tv - tv) ** 2).sum() + 1e-12
    assert kl == pytest.approx((q * plain.kl).sum(), rel=1e-9, abs=1e-12)
    assert (mismatch.argmax_flip == reference.argmax_flip(logq, logp)).all()


@given(pair=pairs, k=ks)
def test_a_policy_against_itself_is_exactly_zero(pair, k):
    logq, _ = pair
    _, _, mismatch = every_sample(logq, logq, k)
    for name in ("tv", "tv_lower", "kl", "kl_lower", "argmax_flip"):
        assert (getattr(mismatch, name) == 0).all()


@given(pair=supported_pairs, k=ks, seed=st.integers(0, 1000))
def test_names_of_tokens_do_not_matter(pair, k, seed):
    order = np.random.default_rng(seed).permutation(len(pair[0]))
    q, _, first = every_sample(*pair, k)
    q_again, _, second = every_sample(pair[0][order], pair[1][order], k)
    assert (q * first.tv_lower).sum() == pytest.approx((q_again * second.tv_lower).sum(), rel=1e-9, abs=1e-12)
    assert (q * first.kl).sum() == pytest.approx((q_again * second.kl).sum(), rel=1e-9, abs=1e-12)


def one_token(token, logq, logp, top_ids, top_logq, top_logp, argmax_p=0):
    return topk_mismatch(
        np.array([token]),
        np.array([logq]),
        np.array([logp]),
        np.array([top_ids]),
        np.array([top_logq]),
        np.array([top_logp]),
        np.array([argmax_p]),
    )


def test_float32_rounding_of_the_tail_stays_harmless():
    # Both lists sum to 1 within float32; neither KL bound may become infinite or NaN from the rest.
    logq = log_normalize(np.array([3.0, 2.0, 1.0])).astype(np.float32)
    logp = log_normalize(np.array([3.0, 2.1, 1.0])).astype(np.float32)
    for excess in (-1e-6, 0.0, 1e-6):
        mismatch = one_token(0, logq[0], logp[0], [0, 1, 2], logq + np.float32(excess), logp)
        true = reference.kl(logq.tolist(), logp.tolist())
        assert mismatch.kl[0] == pytest.approx(true, abs=3e-6)
        assert mismatch.kl_lower[0] == pytest.approx(true, abs=3e-6)
        assert mismatch.tv_lower[0] <= mismatch.tv_upper[0] + ROUNDING


def test_padding_is_no_token():
    half = math.log(0.5)
    full = one_token(0, half, math.log(0.6), [0, 1], [half, half], [math.log(0.6), math.log(0.4)])
    padded = one_token(0, half, math.log(0.6), [0, 1, -1, -1], [half, half, -math.inf, -math.inf], [
        math.log(0.6), math.log(0.4), -0.1, -0.1])  # fmt: skip
    for name in ("tv", "tv_lower", "tv_upper", "kl", "kl_lower"):
        assert getattr(padded, name)[0] == pytest.approx(getattr(full, name)[0], abs=1e-12)


@pytest.mark.parametrize("logp", [-0.1, -math.inf])
def test_padding_does_not_say_that_the_support_ends(logp):
    """Two of three tokens are listed: what the third has is the tail's, and p may have more of it than q."""
    names = [0, 1]
    q, p = [math.log(0.5), math.log(0.3)], [math.log(0.3), math.log(0.2)]
    full = one_token(2, math.log(0.2), math.log(0.5), names, q, p)
    padded = one_token(2, math.log(0.2), math.log(0.5), [*names, -1], [*q, -math.inf], [*p, logp])
    for name in ("tv", "tv_lower", "tv_upper", "kl", "kl_lower"):
        assert getattr(padded, name)[0] == pytest.approx(getattr(full, name)[0], abs=1e-12)


def test_listed_token_outside_the_support():
    # q = (1/2, 1/2, 0, 0), p = (1/4, 1/4, 1/4, 1/4): the third is listed with -inf, the fourth not at all.
    half, quarter = math.log(0.5), math.log(0.25)
    mismatch = one_token(0, half, quarter, [0, 1, 2], [half, half, -math.inf], [quarter] * 3)
    assert mismatch.tv[0] == pytest.approx(0.5)
    assert mismatch.tv_lower[0] == pytest.approx(0.5)
    assert mismatch.tv_upper[0] == pytest.approx(0.5)
    assert mismatch.kl[0] == pytest.approx(math.log(2))
    assert mismatch.kl_lower[0] == pytest.approx(math.log(2), abs=3e-5)


def test_k_0_is_the_sampled_estimator():
    logq, logp = np.array([-1.0, -2.0]), np.array([-1.1, -1.9])
    empty = np.zeros((2, 0))
    mismatch = topk_mismatch(np.array([1, 2]), logq, logp, empty.astype(np.int64), empty, empty, np.array([1, 1]))
    assert mismatch.estimator == "sampled"
    np.testing.assert_array_equal(mismatch.tv, sampled_mismatch(logq, logp).tv)


def test_nan_from_the_trainer_shows():
    half = math.log(0.5)
    mismatch = one_token(0, half, half, [0, 1], [half, half], [half, math.nan])
    assert math.isnan(mismatch.tv[0])
    assert math.isnan(mismatch.kl[0])
    assert math.isnan(mismatch.tv_upper[0])


def test_impossible_inputs_are_refused():
    half = math.log(0.5)
    with pytest.raises(ValueError, match="listed twice"):
        one_token(0, half, half, [0, 0], [half, half], [half, half])
    with pytest.raises(ValueError, match=r"rollout side's top-k probabilities sum to 1\.5"):
        one_token(0, half, half, [0, 1, 2], [half] * 3, [math.log(0.1)] * 3)
    with pytest.raises(ValueError, match="trainer side's"):
        one_token(0, half, half, [0, 1, 2], [math.log(0.1)] * 3, [half] * 3)
    with pytest.raises((ValueError, TypeCheckError)):
        one_token(0, half, half, [0, 1, 2], [half, half], [half, half])


def test_a_wide_vocabulary_in_one_call():
    logq, logp = make_pair(0, 60, "peaked")
    q, _, mismatch = every_sample(logq, logp, 20)
    assert len(mismatch) == 60
    assert (q * mismatch.tv_lower).sum() <= reference.tv(logq, logp) <= (q * mismatch.tv_upper).sum()
