# ruff: noqa: F722  (jaxtyping's shape strings)
"""Estimator `sampled`: only the sampled tokens' log-probabilities are known."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from opdcheck.mismatch import metrics
from opdcheck.mismatch.tokens import Floats, TokenMismatch


def sampled_tv(log_r: Float[np.ndarray, " tokens"]) -> Floats:
    """(1 - r)_+, in [0, 1]; its mean under q is the total variation.

    E_q[(1 - r)_+] = sum_a (q - p)_+ = TV, since q and p both sum to 1. The estimate 1/2 |r - 1| has the same mean,
    because |r - 1| = 2 (1 - r)_+ + (r - 1) and E_q[r - 1] = 0, but it adds half of the noise of r - 1, which is
    unbounded. It also needs E_q[r] = 1: where p has mass outside the support of q it comes out low, (1 - r)_+ does not.
    """
    return 0.0 - np.expm1(np.minimum(log_r, 0.0))


def sampled_mismatch(logq: Float[np.ndarray, " tokens"], logp: Float[np.ndarray, " tokens"]) -> TokenMismatch:
    """Mismatch of one completion from its tokens' log-probabilities (natural logs, [tokens]).

    tv = (1 - r)_+, kl = k3 = r - 1 - log r: unbiased, noisy. Nothing is certain about a single token, so the bounds
    are 0 and 1, and whether the argmax flips is unknown (NaN).

    Raises:
        ValueError: the lengths differ.
    """
    q, p = np.asarray(logq, np.float64), np.asarray(logp, np.float64)
    if q.ndim != 1 or q.shape != p.shape:
        raise ValueError(f"logq and logp must be [tokens] alike, not {q.shape} and {p.shape}")
    return TokenMismatch(
        estimator="sampled",
        logq=q,
        logp=p,
        tv=sampled_tv(metrics.log_ratio(q, p)),
        tv_lower=np.zeros_like(q),
        tv_upper=np.ones_like(q),
        kl=metrics.k3(q, p),
        kl_lower=np.zeros_like(q),
        argmax_flip=np.full_like(q, np.nan),
    )
