"""Sampling transforms against an independent numpy reference; noise against the distributions it claims."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from opdcheck.config import Sampling
from opdcheck.sampling import (
    gumbel_noise,
    log_probabilities,
    log_probabilities_on_support,
    normal_noise,
    state_keys,
)

VOCAB = 40


def softmax(logits: np.ndarray) -> np.ndarray:
    exp = np.exp(logits - logits.max())
    return exp / exp.sum()


def reference(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """One row in float64, token by token, from vLLM's description: temperature, min-p, top-k, top-p."""
    logits = logits.astype(np.float64) / sampling.temperature
    kept = set(range(len(logits)))
    if sampling.min_p > 0:
        p = softmax(logits)
        kept = {token for token in kept if p[token] >= sampling.min_p * p.max()}
    if 0 < sampling.top_k < len(logits):
        alive = sorted((logits[token] for token in kept), reverse=True)
        if len(alive) > sampling.top_k:
            kept = {token for token in kept if logits[token] >= alive[sampling.top_k - 1]}
    if sampling.top_p < 1:
        masked = np.full(len(logits), -np.inf)
        masked[list(kept)] = logits[list(kept)]
        p, tail = softmax(masked), 0.0
        for token in sorted(kept, key=lambda token: logits[token])[:-1]:
            tail += p[token]
            if tail <= 1 - sampling.top_p:
                kept.remove(token)
    result = np.full(len(logits), -np.inf)
    chosen = sorted(kept)
    result[chosen] = np.log(softmax(logits[chosen]))
    return result


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7},
        {"top_k": 1},
        {"top_k": 5},
        {"top_k": 0},
        {"top_k": VOCAB + 10},
        {"top_p": 0.9},
        {"top_p": 0.01},
        {"min_p": 0.1},
        {"min_p": 1.0},
        {"temperature": 0.7, "top_k": 10, "top_p": 0.8, "min_p": 0.05},
        {"temperature": 1.5, "top_k": 4, "top_p": 0.5},
    ],
)
def test_transform_matches_the_reference(options: dict) -> None:
    sampling = Sampling(**options)
    logits = np.random.default_rng(0).normal(scale=3, size=(50, VOCAB)).astype(np.float32)
    got = log_probabilities(torch.tensor(logits), sampling).numpy()
    expected = np.stack([reference(row, sampling) for row in logits])
    assert np.array_equal(np.isinf(got), np.isinf(expected))
    np.testing.assert_allclose(got, expected, atol=2e-5)


@given(
    seed=st.integers(0, 10_000),
    temperature=st.floats(0.2, 3),
    top_k=st.integers(-1, VOCAB),
    top_p=st.floats(0.05, 1),
    min_p=st.floats(0, 1),
)
@settings(max_examples=60, deadline=None)
def test_transform_is_a_distribution(seed: int, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = torch.tensor(np.random.default_rng(seed).normal(scale=4, size=(3, VOCAB)), dtype=torch.float32)
    before = logits.clone()
    logq = log_probabilities(logits, sampling)
    assert torch.equal(logits, before)
    torch.testing.assert_close(logq.exp().sum(-1), torch.ones(3))
    assert torch.equal(logq.argmax(-1), logits.argmax(-1))


def test_ties_at_the_kth_logit_are_all_kept() -> None:
    logq = log_probabilities(torch.tensor([[3.0, 1.0, 1.0, 0.0]]), Sampling(top_k=2))
    assert torch.isfinite(logq).tolist() == [[True, True, True, False]]


def test_transform_is_vllms() -> None:
    """Against vLLM's own function, where vLLM is installed."""
    sampler = pytest.importorskip("vllm.v1.sample.ops.topk_topp_sampler")
    logits = torch.tensor(np.random.default_rng(1).normal(scale=3, size=(64, VOCAB)), dtype=torch.float32)
    k, p = torch.full((64,), 12), torch.full((64,), 0.85)
    theirs = sampler.apply_top_k_top_p_pytorch(logits.clone() / 0.8, k, p).log_softmax(-1)
    ours = log_probabilities(logits, Sampling(temperature=0.8, top_k=12, top_p=0.85))
    assert torch.equal(ours, theirs)


def test_nan_logits_stay_visible() -> None:
    logits = torch.zeros(2, 8)
    logits[0, 3] = torch.nan
    for sampling in (Sampling(), Sampling(top_k=3, top_p=0.9, min_p=0.1)):
        logq = log_probabilities(logits, sampling)
        assert logq[0].isnan().any()
        assert not logq[1].isnan().any()


def test_support_of_the_other_side() -> None:
    logits = np.random.default_rng(2).normal(size=(4, VOCAB)).astype(np.float32)
    mask = np.random.default_rng(3).random((4, VOCAB)) < 0.3
    got = log_probabilities_on_support(torch.tensor(logits), 0.7, torch.tensor(mask)).numpy()
    for row in range(4):
        np.testing.assert_allclose(got[row, mask[row]], np.log(softmax(logits[row, mask[row]] / 0.7)), atol=1e-5)
    assert np.isneginf(got[~mask]).all()


def test_support_of_all_tokens_changes_nothing() -> None:
    logits = torch.randn(4, VOCAB)
    everywhere = torch.ones(4, VOCAB, dtype=torch.bool)
    assert torch.equal(
        log_probabilities_on_support(logits, 1.3, everywhere), log_probabilities(logits, Sampling(temperature=1.3))
    )


def test_gumbel_noise_has_the_gumbel_distribution() -> None:
    noise = gumbel_noise(range(20), 3, 5000).numpy().ravel()
    assert np.isfinite(noise).all()
    assert stats.kstest(noise, stats.gumbel_r().cdf).pvalue > 1e-3


def test_gumbel_max_samples_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03])
    draws = (probabilities.log() + gumbel_noise(range(10_000), 0, 5)).argmax(-1)
    counts = torch.bincount(draws, minlength=5).numpy()
    assert (
        stats.chisquare(counts, probabilities.double().numpy() / probabilities.double().sum().item() * 10_000).pvalue
        > 1e-3
    )


def test_gumbel_noise_is_keyed_by_seed_position_and_token() -> None:
    noise = gumbel_noise([5, 6], 2, 100)
    assert torch.equal(gumbel_noise([6], 2, 100)[0], noise[1])
    assert torch.equal(gumbel_noise([5], 2, 60)[0], noise[0, :60])
    assert not torch.equal(gumbel_noise([5], 3, 100)[0], noise[0])
    rows = torch.cat([gumbel_noise(range(30), position, 2000) for position in range(3)])
    correlation = torch.corrcoef(rows).fill_diagonal_(0).abs().max()
    assert correlation < 0.12  # 5 standard errors of 90 x 90 / 2 correlations of 2,000 numbers


def test_a_single_token_support_is_drawn_whatever_the_noise() -> None:
    logq = torch.full((1000, 50), -torch.inf)
    logq[:, 17] = 0
    assert (logq + gumbel_noise(range(1000), 0, 50)).argmax(-1).unique().tolist() == [17]


def test_splitmix_is_the_published_one() -> None:
    from opdcheck.sampling import _mix, _mix_tensor, _signed

    # The first output of SplitMix64 seeded with 0, and the tensor version against the integer one.
    assert _mix(0) == 0xE220A8397B1DCDAF
    gamma = 0x9E3779B97F4A7C15
    states = [0, 1, 12345, 2**63, 2**64 - 1]
    tensor = torch.tensor([_signed((state + gamma) % 2**64) for state in states])
    assert [value % 2**64 for value in _mix_tensor(tensor).tolist()] == [_mix(state) for state in states]


def test_normal_noise_is_standard_normal() -> None:
    noise = normal_noise(torch.arange(20), 5000).numpy().ravel()
    assert np.isfinite(noise).all()
    assert stats.kstest(noise, stats.norm().cdf).pvalue > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_state_keys_depend_on_every_bit_order_and_seed(dtype: torch.dtype) -> None:
    hidden = torch.randn(3, 16).to(dtype)
    keys = state_keys(hidden, 0)
    assert torch.equal(keys[1:], state_keys(hidden[1:], 0))
    assert not (keys == state_keys(hidden, 1)).any()
    assert not (keys == state_keys(hidden.flip(-1), 0)).any()
    changed = hidden.clone()
    changed[:, 5] = torch.nextafter(changed[:, 5], torch.tensor(10, dtype=dtype))
    assert not (keys == state_keys(changed, 0)).any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_noise_is_the_same_on_a_gpu() -> None:
    on_gpu = gumbel_noise([1, 2], 7, 5000, "cuda").cpu()
    torch.testing.assert_close(on_gpu, gumbel_noise([1, 2], 7, 5000), rtol=1e-5, atol=1e-5)
    hidden = torch.randn(3, 16)
    assert torch.equal(state_keys(hidden.cuda(), 3).cpu(), state_keys(hidden, 3))
