# ruff: noqa: F722  (jaxtyping's shape strings)
"""Estimator `topk`: the engine tells its k most probable tokens; all others are one bucket, the tail.

Nothing is ever renormalised to the top-k. The unbiased estimates of tv and kl need the sampled token only where it
lies in the tail. With Q = sum_topk q and a ~ q:

    tv = 1[a in top-k] sum_topk (q - p)_+ / Q  +  1[a in tail] (1 - r(a))_+
    kl = sum_topk q (r - 1 - log r)            +  1[a in tail] (r(a) - 1 - log r(a))

Means under q. tv: Q sum_topk (q - p)_+ / Q + sum_tail q (1 - r)_+ = sum_a (q - p)_+ = TV. It is the conditional mean of
the sampled estimate (1 - r)_+ given "a in top-k" or the tail token, so it too stays in [0, 1] and has no more variance
(Rao-Blackwell; arXiv 2504.10637). kl: sum over all a of q (r - 1 - log r) = KL(q||p) + sum_a (p - q) = KL(q||p). The
same as sum_topk q log(q/p) + 1[tail] (r - 1 - log r) - (tail_p - tail_q), written so that no term is negative. This
one needs p to have no mass outside the support of q except on listed tokens: else kl is low by that mass (tv is not).
The scorer sees to it by scoring p on q's support where the sampler truncates.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Bool, Float, Int

from opdcheck.mismatch import metrics
from opdcheck.mismatch.sampled import sampled_mismatch, sampled_tv
from opdcheck.mismatch.tokens import Floats, TokenMismatch

ROUNDING = 1e-6
"""Engines give float32: a tail mass, 1 minus a sum of probabilities, is known to about this."""

MAX_EXCESS = 1e-2
"""Top-k probabilities that sum to more than 1 plus this are no distribution."""


@dataclass(frozen=True)
class _Split:
    """One completion's two distributions as far as they are known: top-k [tokens, k], sampled token and tail [tokens].

    Entries with a negative id are padding: no token, probability 0 on both sides.
    """

    q: Floats  # [tokens, k]
    p: Floats  # [tokens, k]
    log_r: Floats  # [tokens, k]
    sampled_q: Floats  # [tokens]; 0 where the sampled token is one of the top-k
    sampled_p: Floats
    sampled_log_r: Floats
    in_tail: Bool[np.ndarray, " tokens"]
    exhausted: Bool[np.ndarray, " tokens"]  # the top-k reaches the end of q's support

    @cached_property
    def top_q(self) -> Floats:
        return self.q.sum(1)

    @cached_property
    def tail_q(self) -> Floats:
        return np.where(self.exhausted, 0.0, np.clip(1 - self.top_q, 0.0, 1.0))

    @cached_property
    def tail_p(self) -> Floats:
        # Where the whole of q is listed its sum is 1 up to rounding, and the same rounding is then taken off p.
        whole = np.where(self.exhausted, self.top_q, 1.0)
        return np.clip(whole - self.p.sum(1), 0.0, 1.0)

    @property
    def rest_q(self) -> Floats:
        """Tail without the sampled token."""
        return np.maximum(self.tail_q - self.sampled_q, 0.0)

    @property
    def rest_p(self) -> Floats:
        return np.maximum(self.tail_p - self.sampled_p, 0.0)


def topk_mismatch(
    token_ids: Int[np.ndarray, " tokens"],
    logq: Float[np.ndarray, " tokens"],
    logp: Float[np.ndarray, " tokens"],
    top_ids: Int[np.ndarray, "tokens k"],
    top_logq: Float[np.ndarray, "tokens k"],
    top_logp: Float[np.ndarray, "tokens k"],
    argmax_p: Int[np.ndarray, " tokens"],
) -> TokenMismatch:
    """Mismatch of one completion from the engine's top-k. With k = 0 this is `sampled_mismatch`.

    `tv` and `kl` are unbiased for each token (module docstring); `tv_lower`, `tv_upper` and `kl_lower` hold for
    certain. A single token's estimate may lie outside its bounds, since it depends on the draw; its mean does not.

    Args:
        token_ids, logq, logp: the sampled tokens and their log-probabilities under q and p.
        top_ids: most probable under q first, distinct within a row; negative ids are padding.
        top_logq: -inf for listed tokens outside q's support; one such entry says that the support ends within the list.
        top_logp: the trainer's log-probabilities of the same tokens.
        argmax_p: the trainer's most probable token.

    Raises:
        ValueError: shapes do not fit, an id is listed twice, or the top-k probabilities sum to more than 1.
    """
    _check_shapes(token_ids, logq, logp, top_ids, top_logq, top_logp, argmax_p)
    if top_ids.shape[1] == 0:
        return sampled_mismatch(logq, logp)
    split = _split(token_ids, logq, logp, top_ids, top_logq, top_logp)
    flip = np.where(top_ids[:, 0] < 0, np.nan, top_ids[:, 0] != argmax_p)
    return TokenMismatch(
        estimator="topk",
        logq=np.asarray(logq, np.float64),
        logp=np.asarray(logp, np.float64),
        tv=_tv(split),
        tv_lower=_tv_lower(split),
        tv_upper=_tv_upper(split),
        kl=_kl(split),
        kl_lower=_kl_lower(split),
        argmax_flip=flip,
    )


def _check_shapes(*arrays: np.ndarray) -> None:
    tokens, k = arrays[0].shape[0], arrays[3].shape[-1]
    expected = [(tokens,)] * 3 + [(tokens, k)] * 3 + [(tokens,)]
    if (shapes := [array.shape for array in arrays]) != expected:
        raise ValueError(f"expected {expected} for ids, logq, logp, top ids, top logq, top logp, argmax; got {shapes}")


def _split(
    token_ids: Int[np.ndarray, " tokens"],
    logq: Float[np.ndarray, " tokens"],
    logp: Float[np.ndarray, " tokens"],
    top_ids: Int[np.ndarray, "tokens k"],
    top_logq: Float[np.ndarray, "tokens k"],
    top_logp: Float[np.ndarray, "tokens k"],
) -> _Split:
    listed = top_ids >= 0
    q = np.where(listed, np.exp(np.asarray(top_logq, np.float64)), 0.0)
    p = np.where(listed, np.exp(np.asarray(top_logp, np.float64)), 0.0)
    _check_distribution(top_ids, q, p)
    in_tail = ~((top_ids == token_ids[:, None]) & listed).any(1)
    return _Split(
        q=q,
        p=p,
        log_r=metrics.log_ratio(top_logq, top_logp),
        sampled_q=np.where(in_tail, np.exp(np.asarray(logq, np.float64)), 0.0),
        sampled_p=np.where(in_tail, np.exp(np.asarray(logp, np.float64)), 0.0),
        sampled_log_r=metrics.log_ratio(logq, logp),
        in_tail=in_tail,
        exhausted=np.any(listed & (top_logq == -np.inf), axis=1),
    )


def _check_distribution(top_ids: Int[np.ndarray, "tokens k"], q: Floats, p: Floats) -> None:
    in_order = np.sort(top_ids, axis=1)
    if np.any((in_order[:, 1:] == in_order[:, :-1]) & (in_order[:, 1:] >= 0)):
        raise ValueError("a token is listed twice among the top-k of one position")
    for name, mass in (("rollout", q.sum(1)), ("trainer", p.sum(1))):
        if np.any(mass > 1 + MAX_EXCESS):
            raise ValueError(
                f"the {name} side's top-k probabilities sum to {np.nanmax(mass):.4g} at one position: "
                "not log-probabilities of one distribution"
            )


def _tv(split: _Split) -> Floats:
    top = np.maximum(split.q - split.p, 0.0).sum(1)
    share = np.divide(top, split.top_q, out=np.zeros_like(top), where=split.top_q != 0)
    return np.where(split.in_tail, sampled_tv(split.sampled_log_r), np.minimum(share, 1.0))


def _tv_lower(split: _Split) -> Floats:
    """TV of the distributions coarsened to top-k, sampled token and rest (data processing).

    That the sampled token has a bucket of its own makes the partition random, which does no harm: whatever the
    partition, coarsening cannot raise TV.
    """
    known = np.abs(split.q - split.p).sum(1) + np.abs(split.sampled_q - split.sampled_p)
    return np.minimum((known + np.abs(split.rest_q - split.rest_p)) / 2, 1.0)


def _tv_upper(split: _Split) -> Floats:
    """1/2 sum_topk |q - p| + 1/2 (tail_q + tail_p): the tails do not overlap at all."""
    return np.minimum((np.abs(split.q - split.p).sum(1) + split.tail_q + split.tail_p) / 2, 1.0)


def _kl(split: _Split) -> Floats:
    sampled = np.where(split.in_tail, metrics.expm1_minus(split.sampled_log_r), 0.0)
    # Where the list reaches the end of q's support, what p has beyond it is known and never sampled.
    outside = np.where(split.exhausted, split.tail_p, 0.0)
    return metrics.k3_terms(split.q, split.p, split.log_r).sum(1) + outside + sampled


def _kl_lower(split: _Split) -> Floats:
    """KL of the same coarsened distributions as in `_tv_lower`, as a sum of non-negative terms.

    Both masses of the rest bucket are known up to rounding only. Raising both to at least `ROUNDING` brings them
    closer together and can only lower the term, which is then finite.
    """
    rest_q, rest_p = np.maximum(split.rest_q, ROUNDING), np.maximum(split.rest_p, ROUNDING)
    rest = metrics.k3_terms(rest_q, rest_p, np.log(rest_p) - np.log(rest_q))
    sampled = metrics.k3_terms(split.sampled_q, split.sampled_p, split.sampled_log_r)
    return metrics.k3_terms(split.q, split.p, split.log_r).sum(1) + sampled + rest
