# ruff: noqa: F722  (jaxtyping's shape strings)
"""What a training step minimises, per token. Pure functions on log-probabilities; autograd goes through them."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor


def generalized_jsd(
    student_logp: Float[Tensor, "tokens vocab"], teacher_logp: Float[Tensor, "tokens vocab"], beta: float
) -> Float[Tensor, " tokens"]:
    """Generalized Jensen-Shannon divergence of each row, in nats (GKD, arXiv 2306.13649; TRL's `beta`).

    With M = beta T + (1 - beta) S: beta KL(T||M) + (1 - beta) KL(S||M). At the ends, where that expression is 0, the
    limits of it divided by beta (1 - beta) take its place: beta = 0 is the forward KL(T||S), beta = 1 the reverse
    KL(S||T). So the scale jumps there, as it does in TRL.

    Args:
        student_logp, teacher_logp: natural log-probabilities, rows that sum to 1; -inf for impossible tokens.
        beta: in [0, 1].

    Raises:
        ValueError: beta outside [0, 1], or shapes that differ.
    """
    if not 0 <= beta <= 1:
        raise ValueError(f"beta must lie in [0, 1], not {beta}")
    if student_logp.shape != teacher_logp.shape:
        raise ValueError(f"shapes differ: {tuple(student_logp.shape)}, {tuple(teacher_logp.shape)}")
    if beta == 0:
        return _kl(teacher_logp, student_logp)
    if beta == 1:
        return _kl(student_logp, teacher_logp)
    mixture = torch.logaddexp(teacher_logp + math.log(beta), student_logp + math.log1p(-beta))
    return beta * _kl(teacher_logp, mixture) + (1 - beta) * _kl(student_logp, mixture)


def _kl(logp: Tensor, logq: Tensor) -> Tensor:
    """KL(p||q) of each row; terms with p = 0 are 0."""
    impossible = logp == -torch.inf
    difference = (logp - logq).masked_fill(impossible, 0.0)
    return (logp.exp() * difference).sum(-1)


def policy_gradient(logp: Float[Tensor, " tokens"], advantages: Float[Tensor, " tokens"]) -> Float[Tensor, " tokens"]:
    """-A log p(a) of each sampled token: its gradient is the policy gradient (REINFORCE).

    No importance ratio: one optimizer step per batch, so the trainer's own ratio is 1, and the ratio to the rollout
    policy is the mismatch whose cost a calibration measures.

    Args:
        logp: of the sampled tokens, with gradient.
        advantages: constants; gradients do not flow through them.
    """
    return -advantages.detach() * logp


def sampled_reverse_kl_advantages(
    student_logp: Float[Tensor, " tokens"], teacher_logp: Float[Tensor, " tokens"]
) -> Float[Tensor, " tokens"]:
    """log T(a) - log S(a) of each sampled token: its policy gradient is that of the per-token KL(S||T).

    As in tinker-cookbook's on-policy distillation: no discounting, each token answers for itself alone.
    """
    return (teacher_logp - student_logp).detach()


def group_advantages(rewards: Float[Tensor, "groups samples"]) -> Float[Tensor, "groups samples"]:
    """GRPO's advantages (arXiv 2402.03300): rewards less their group's mean, over its standard deviation.

    A group whose rewards are all alike teaches nothing: its advantages are 0.
    """
    centred = rewards - rewards.mean(dim=-1, keepdim=True)
    spread = rewards.std(dim=-1, keepdim=True, unbiased=False)
    return torch.where(spread > 0, centred / spread.clamp(min=1e-8), torch.zeros_like(centred))


__all__ = ["generalized_jsd", "group_advantages", "policy_gradient", "sampled_reverse_kl_advantages"]
