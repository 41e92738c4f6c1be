"""The exact divergence against the reference, its properties, and how accurate it is in float32."""

import math

import numpy as np
import pytest
import reference
import torch
from distributions import KINDS, log_normalize, make_pair, pairs
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

import opdcheck.mismatch.exact as exact
from opdcheck.mismatch.exact import divergence, exact_mismatch


def as_rows(*arrays):
    return [torch.from_numpy(np.atleast_2d(array)) for array in arrays]


@given(pair=pairs)
def test_matches_reference(pair):
    logq, logp = pair
    found = divergence(*as_rows(logq, logp))
    q, p = logq.tolist(), logp.tolist()
    # 1e-15: float64's own resolution of sums of probabilities.
    assert found.tv.item() == pytest.approx(reference.tv(q, p), rel=1e-6, abs=1e-15)
    assert found.kl.item() == pytest.approx(reference.kl(q, p), rel=1e-6, abs=1e-15)
    assert found.argmax_flip.item() == reference.argmax_flip(q, p)


@given(pair=pairs)
def test_properties(pair):
    tv, kl, _ = divergence(*as_rows(*pair))
    assert 0 <= tv.item() <= 1
    assert kl.item() >= 0
    assert kl.item() >= 2 * tv.item() ** 2 * (1 - 1e-9) - 1e-15  # Pinsker


@given(pair=pairs)
def test_a_policy_against_itself_is_exactly_zero(pair):
    logq = as_rows(pair[0])[0]
    for dtype in (torch.float32, torch.float64):
        tv, kl, flip = divergence(logq.to(dtype), logq.to(dtype).clone())
        assert tv.item() == 0
        assert kl.item() == 0
        assert not flip.item()


@given(pair=pairs, seed=st.integers(0, 1000))
def test_token_order_does_not_matter(pair, seed):
    order = np.random.default_rng(seed).permutation(len(pair[0]))
    first = divergence(*as_rows(*pair))
    second = divergence(*as_rows(pair[0][order], pair[1][order]))
    assert second.tv.item() == pytest.approx(first.tv.item(), rel=1e-12, abs=1e-16)
    assert second.kl.item() == pytest.approx(first.kl.item(), rel=1e-12, abs=1e-16)


def test_blocks_do_not_change_the_result(monkeypatch):
    made = [make_pair(seed, 50, kind) for seed in range(4) for kind in KINDS]
    logq, logp = as_rows(np.stack([q for q, _ in made]), np.stack([p for _, p in made]))
    whole = divergence(logq, logp)
    monkeypatch.setattr(exact, "BLOCK_ELEMENTS", 7 * len(made))
    blocks = divergence(logq, logp)
    assert torch.allclose(blocks.tv, whole.tv, rtol=1e-13, atol=1e-16)
    assert torch.allclose(blocks.kl, whole.kl, rtol=1e-13, atol=1e-16)
    assert torch.equal(blocks.argmax_flip, whole.argmax_flip)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_different_supports(dtype):
    half, inf = math.log(0.5), math.inf
    third = math.log(1 / 3)
    logq = torch.tensor([[half, half, -inf], [half, half, -inf], [0.0, -inf, -inf], [0.0, -200.0, -inf]], dtype=dtype)
    logp = torch.tensor([[0.0, -inf, -inf], [third] * 3, [-inf, 0.0, -inf], [0.0, -inf, -inf]], dtype=dtype)
    tv, kl, flip = divergence(logq, logp)
    assert tv.tolist() == pytest.approx([0.5, 1 / 3, 1.0, 0.0], abs=1e-7)
    # Infinite as soon as p = 0 somewhere in q's support, even where q underflows (last row).
    assert kl.tolist() == pytest.approx([inf, math.log(1.5), inf, inf], rel=1e-6)
    assert flip.tolist() == [False, False, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_ratios_neither_overflow_nor_vanish(dtype):
    logq = torch.tensor([[0.0, -800.0], [0.0, -800.0]], dtype=dtype)
    logp = torch.tensor([[-800.0, 0.0], [0.0, -800.0]], dtype=dtype)
    tv, kl, _ = divergence(logq, logp)
    assert tv.tolist() == [1.0, 0.0]
    assert kl.tolist() == pytest.approx([800.0, 0.0])


def test_nan_shows():
    logq, logp = as_rows(log_normalize(np.zeros((2, 5))), log_normalize(np.ones((2, 5))))
    logp[0, 3] = math.nan
    tv, kl, _ = divergence(logq, logp)
    assert tv.isnan().tolist() == [True, False]
    assert kl.isnan().tolist() == [True, False]


def float32_pair(vocab, noise, *, offset=0.0, seed=0):
    """Float32 log-probabilities as a scorer makes them from float32 logits, and what they stand for in float64."""
    generator = torch.Generator().manual_seed(seed)
    logits_q = torch.randn(16, vocab, generator=generator) * 3 + offset
    logits_p = logits_q + noise * torch.randn(16, vocab, generator=generator)
    single = [logits.log_softmax(-1) for logits in (logits_q, logits_p)]
    double = [logits.double().log_softmax(-1) for logits in (logits_q, logits_p)]
    return single, double


@pytest.mark.parametrize("noise", [1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1.0])
def test_float32_elements_lose_little_given_the_inputs(noise):
    single, _ = float32_pair(49152, noise)
    found = divergence(*single)
    same = divergence(*(logprobs.double() for logprobs in single))
    # Measured: tv 3e-8 relative, kl 3e-8 sqrt(kl).
    assert ((found.tv - same.tv).abs() <= 1e-7 * same.tv).all()
    assert ((found.kl - same.kl).abs() <= 1e-7 * same.kl.sqrt()).all()


@pytest.mark.parametrize("offset", [0.0, 30.0])
@pytest.mark.parametrize("noise", [1e-4, 1e-3, 1e-2, 0.1, 1.0])
def test_float32_inputs_cost_at_most_their_rounding(noise, offset):
    single, double = float32_pair(49152, noise, offset=offset)
    found, true = divergence(*single), divergence(*double)
    # Measured: tv 1.0e-6, kl 1.6e-6 sqrt(kl), both at noise 1; about a tenth of it at noise 0.1 and below.
    assert (found.tv - true.tv).abs().max() <= 2e-6
    assert ((found.kl - true.kl).abs() <= 3e-6 * true.kl.sqrt()).all()


def test_kl_forgives_an_error_in_the_normalisation():
    _, (logq, logp) = float32_pair(1000, 0.01)
    true, shifted = divergence(logq, logp), divergence(logq, logp + 1e-6)
    torch.testing.assert_close(shifted.kl, true.kl, rtol=0, atol=1e-11)  # the plain sum would be off by 1e-6


def test_temporaries_stay_small(monkeypatch):
    sizes = []
    original = exact._block_sums

    def spy(q, p):
        sizes.append(q.numel())
        return original(q, p)

    monkeypatch.setattr(exact, "_block_sums", spy)
    for tokens, vocab in ((4, 262_144), (512, 2048)):
        logq = torch.zeros(tokens, vocab).log_softmax(-1)
        divergence(logq, logq)
    assert max(sizes) <= exact.BLOCK_ELEMENTS


def test_wrong_arguments():
    # TypeCheckError: where the annotations are checked they are the first to notice.
    with pytest.raises((ValueError, TypeCheckError)):
        divergence(torch.zeros(2, 3), torch.zeros(2, 4))
    with pytest.raises((ValueError, TypeCheckError)):
        divergence(torch.zeros(2, 3, dtype=torch.bfloat16), torch.zeros(2, 3, dtype=torch.bfloat16))
    with pytest.raises((ValueError, TypeCheckError)):
        divergence(torch.zeros(3), torch.zeros(3))


def test_exact_mismatch_assembles():
    logq, logp = as_rows(*make_pair(1, 20, "peaked"))
    found = divergence(logq, logp)
    mismatch = exact_mismatch(logq[:, 3], logp[:, 3].numpy(), *found)
    assert mismatch.estimator == "exact"
    assert len(mismatch) == 1
    assert mismatch.tv.dtype == np.float64
    assert mismatch.tv[0] == mismatch.tv_lower[0] == mismatch.tv_upper[0] == found.tv.item()
    assert mismatch.kl[0] == mismatch.kl_lower[0] == found.kl.item()
    with pytest.raises((ValueError, TypeCheckError)):
        exact_mismatch(logq[0, :2], logp[0, :2], *found)
