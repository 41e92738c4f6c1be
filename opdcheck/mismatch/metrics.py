# ruff: noqa: F722  (jaxtyping's shape strings)
"""Metrics of the sampled tokens' log-probabilities. All take `logq`, `logp` [tokens] and compute in float64.

A NaN or infinite log-probability gives a NaN or infinite value, never a warning and never a silent 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float, Shaped

from opdcheck.mismatch.tokens import Floats

_SERIES_BELOW = 0.03


def log_ratio(logq: Shaped[np.ndarray, ...], logp: Shaped[np.ndarray, ...]) -> Floats:
    """log r = logp - logq, float64, any shape; NaN where both are -inf."""
    with np.errstate(invalid="ignore"):
        return np.asarray(np.asarray(logp, np.float64) - np.asarray(logq, np.float64))


def expm1_minus(x: Shaped[np.ndarray, ...] | float) -> Floats:
    """exp(x) - 1 - x without cancellation; >= 0.

    `expm1(x) - x` still loses digits for small x (relative error about 1e-16 / |x|), hence the series below 0.03,
    whose first omitted term is below 1e-11 of the value.
    """
    x = np.asarray(x, np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        direct = np.expm1(x) - x
        series = x * x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120 + x / 720))))
    return np.where(np.abs(x) < _SERIES_BELOW, series, direct)


def k1(logq: Float[np.ndarray, " tokens"], logp: Float[np.ndarray, " tokens"]) -> Floats:
    """-log r, nats. Unbiased for KL(q||p), may be negative (Schulman, "Approximating KL divergence", 2020)."""
    return 0.0 - log_ratio(logq, logp)  # not `-x`: a difference of 0 must not become -0.0


def k3(logq: Float[np.ndarray, " tokens"], logp: Float[np.ndarray, " tokens"]) -> Floats:
    """r - 1 - log r, nats, >= 0 (Schulman 2020; prime-rl `mismatch_kl`, verl `rollout_corr/k3_kl`).

    Its mean is KL(q||p) where p has no mass outside the support of q; otherwise it is lower by that mass.
    """
    return expm1_minus(log_ratio(logq, logp))


def abs_dlogp(logq: Float[np.ndarray, " tokens"], logp: Float[np.ndarray, " tokens"]) -> Floats:
    """|log r|, nats (slime `train_rollout_logprob_abs_diff`, TRL `sampling_logp_difference`)."""
    return np.abs(log_ratio(logq, logp))


def token_mult_prob_error(logq: Float[np.ndarray, " tokens"], logp: Float[np.ndarray, " tokens"]) -> Floats:
    """exp(|log r|), >= 1 (NeMo-RL)."""
    with np.errstate(over="ignore"):
        return np.exp(np.abs(log_ratio(logq, logp)))


def probs_diff(logq: Float[np.ndarray, " tokens"], logp: Float[np.ndarray, " tokens"]) -> Floats:
    """|p - q| of the sampled token, in [0, 1] (verl `rollout_probs_diff_*`)."""
    # max(p, q) |1 - exp(-|log r|)|: keeps its digits where p and q are nearly equal, and cannot overflow.
    larger = np.exp(np.maximum(np.asarray(logq, np.float64), np.asarray(logp, np.float64)))
    with np.errstate(invalid="ignore"):
        return -larger * np.expm1(-np.abs(log_ratio(logq, logp))) + 0.0


def chi2_token(logq: Float[np.ndarray, " tokens"], logp: Float[np.ndarray, " tokens"]) -> float:
    """E[r^2] - 1 over the tokens, ratios not truncated (verl). May be slightly negative on a finite sample."""
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.mean(np.expm1(2 * log_ratio(logq, logp))))


def ess(logq: Float[np.ndarray, " tokens"], logp: Float[np.ndarray, " tokens"]) -> float:
    """1 / E[(r / E r)^2] over the tokens: effective sample size as a share of them, in (0, 1]. r is not truncated.

    Formula of verl. A common factor of all r cancels, so they are divided by the largest first and nothing overflows.
    """
    log_r = log_ratio(logq, logp)
    with np.errstate(invalid="ignore"):
        weights = np.exp(log_r - np.max(log_r))
    return float(np.mean(weights) ** 2 / np.mean(weights * weights))


def k3_terms(q: Floats, p: Floats, log_r: Floats) -> Any:
    """q (r - 1 - log r) = p - q - q log r, elementwise, >= 0; p where q = 0 and infinite where only p = 0.

    Summed over a partition on which q and p both add up to 1 this is KL(q||p): the terms p - q cancel. Unlike
    q log(q/p) every term is non-negative, and a small error in the normalisation of either side has only a
    second-order effect.
    """
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        near = q * expm1_minus(log_r)
        far = p - q - q * log_r
    return np.where(q == 0, p, np.where(np.abs(log_r) < 1, near, far))
