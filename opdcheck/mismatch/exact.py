# ruff: noqa: F722  (jaxtyping's shape strings)
"""Estimator `exact`: both next-token distributions are known in full. The only module here that imports torch."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from opdcheck.mismatch.tokens import Floats, TokenMismatch

BLOCK_ELEMENTS = 2**19
"""Temporaries hold so many elements (2 MiB in float32), however many tokens and vocabulary entries come in."""


class Divergence(NamedTuple):
    """Per token, on the device of the inputs."""

    tv: Float[Tensor, " tokens"]  # float64, in [0, 1]
    kl: Float[Tensor, " tokens"]  # float64, nats
    argmax_flip: Bool[Tensor, " tokens"]


def divergence(logq: Float[Tensor, "tokens vocab"], logp: Float[Tensor, "tokens vocab"]) -> Divergence:
    """TV, KL(q||p) and whether the most probable token differs, for each row of two log-probability tables.

    tv = 1/2 sum_a |q(a) - p(a)|; kl = sum_a q(a) (log q(a) - log p(a)), over the support of q, infinite where p = 0
    inside it (the Rao-Blackwellised KL of arXiv 2504.10637, section 3). Rows must be normalised: exp sums to 1.

    KL is summed as sum_a (p - q - q log(p/q)), whose terms are all >= 0 and which is the same number: the first two
    add up to 0 over the vocabulary (outside the support of q the term is p, which makes up for p's mass there). In
    float32 this matters: a row whose logsumexp is off by c shifts the plain sum by c, this one by c^2 / 2.

    Accuracy (tests/mismatch/test_exact.py, 49,152 entries): sums are in float64, elements in the inputs' dtype. With
    float32 the elements cost 1e-7 of tv and 1e-7 sqrt(kl) of kl. Log-probabilities that were rounded to float32 before
    cost more: up to 2e-6 of tv and 3e-6 sqrt(kl) of kl, far below any kernel's own mismatch.

    Args:
        logq, logp: [tokens, vocab], float32 or float64, natural logs; -inf outside the support. NaN gives NaN.

    Raises:
        ValueError: the shapes differ or a dtype is not float32 or float64.
    """
    _check(logq, logp)
    tokens, vocab = logq.shape
    tv = torch.zeros(tokens, dtype=torch.float64, device=logq.device)
    kl = torch.zeros_like(tv)
    columns = max(1, BLOCK_ELEMENTS // max(1, tokens))
    for start in range(0, vocab, columns):
        block = slice(start, start + columns)
        block_tv, block_kl = _block_sums(logq[:, block], logp[:, block])
        tv += block_tv
        kl += block_kl
    return Divergence(tv.clamp_(max=1.0), kl, logq.argmax(-1) != logp.argmax(-1))


def _check(logq: Tensor, logp: Tensor) -> None:
    if logq.shape != logp.shape or logq.ndim != 2:
        raise ValueError(f"logq and logp must be [tokens, vocab] alike, not {tuple(logq.shape)}, {tuple(logp.shape)}")
    if not {logq.dtype, logp.dtype} <= {torch.float32, torch.float64}:
        raise ValueError(f"logq and logp must be float32 or float64, not {logq.dtype}, {logp.dtype}")


def _block_sums(logq: Tensor, logp: Tensor) -> tuple[Tensor, Tensor]:
    """The block's share of tv and kl, float64 [tokens]."""
    q = logq.exp()
    log_r = logp - logq  # NaN where both are -inf
    # p - q. Where they are close, q expm1(log r) keeps the digits that the difference of two exponentials loses.
    difference = torch.where(log_r.abs() < 1, q * torch.expm1(log_r), logp.exp() - q)
    tv = difference.abs().sum(-1, dtype=torch.float64) / 2
    log_r.masked_fill_(q == 0, 0.0)  # 0 log(p/0) = 0, also where q underflows
    terms = difference.addcmul_(q, log_r, value=-1)  # p - q - q log r
    terms.masked_fill_((logp == -math.inf) & (logq > -math.inf), math.inf)
    return tv, terms.sum(-1, dtype=torch.float64)


def exact_mismatch(
    logq: Float[Tensor, " tokens"] | Float[np.ndarray, " tokens"],
    logp: Float[Tensor, " tokens"] | Float[np.ndarray, " tokens"],
    tv: Float[Tensor, " tokens"],
    kl: Float[Tensor, " tokens"],
    argmax_flip: Shaped[Tensor, " tokens"],
) -> TokenMismatch:
    """The record of one completion from its sampled tokens' log-probabilities and its `divergence`.

    `exact_mismatch(logq, logp, *divergence(logq_all, logp_all))`. Bounds equal the values.

    Raises:
        ValueError: the lengths differ.
    """
    arrays = [_to_numpy(values) for values in (logq, logp, tv, kl, argmax_flip)]
    if len({array.shape for array in arrays}) != 1:
        raise ValueError(f"one value per token expected, got shapes {[array.shape for array in arrays]}")
    q, p, tv_, kl_, flip = arrays
    return TokenMismatch("exact", q, p, tv=tv_, tv_lower=tv_, tv_upper=tv_, kl=kl_, kl_lower=kl_, argmax_flip=flip)


def _to_numpy(values: Tensor | np.ndarray) -> Floats:
    if isinstance(values, Tensor):
        return values.detach().to("cpu", torch.float64).numpy()
    return np.asarray(values, np.float64)
