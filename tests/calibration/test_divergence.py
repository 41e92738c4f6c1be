"""The losses against their formulas in float64 NumPy, and their gradients against finite differences."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from opdcheck.calibration.divergence import (
    generalized_jsd,
    group_advantages,
    policy_gradient,
    sampled_reverse_kl_advantages,
)

TOKENS, VOCAB = 5, 11


def logits(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(scale=2.0, size=(TOKENS, VOCAB))


def softmax(values: np.ndarray) -> np.ndarray:
    weights = np.exp(values - values.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def reference(student: np.ndarray, teacher: np.ndarray, beta: float) -> np.ndarray:
    """From the definition: M = beta T + (1 - beta) S, beta KL(T||M) + (1 - beta) KL(S||M); KLs at the ends."""
    s, t = softmax(student), softmax(teacher)

    def kl(p: np.ndarray, q: np.ndarray) -> np.ndarray:
        return (p * np.log(p / q)).sum(axis=-1)

    if beta == 0:
        return kl(t, s)
    if beta == 1:
        return kl(s, t)
    m = beta * t + (1 - beta) * s
    return beta * kl(t, m) + (1 - beta) * kl(s, m)


def measured(student: torch.Tensor, teacher: torch.Tensor, beta: float) -> torch.Tensor:
    return generalized_jsd(student.log_softmax(-1), teacher.log_softmax(-1), beta)


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_value(beta: float) -> None:
    student, teacher = logits(1), logits(2)
    found = measured(torch.tensor(student), torch.tensor(teacher), beta).numpy()
    np.testing.assert_allclose(found, reference(student, teacher, beta), rtol=1e-10)


@pytest.mark.parametrize("beta", [0.0, 0.3, 0.5, 1.0])
def test_gradient_against_finite_differences(beta: float) -> None:
    student, teacher = logits(3), logits(4)
    leaf = torch.tensor(student, requires_grad=True)
    measured(leaf, torch.tensor(teacher), beta).sum().backward()
    step = 1e-6
    for token in range(TOKENS):
        for entry in range(VOCAB):
            up, down = student.copy(), student.copy()
            up[token, entry] += step
            down[token, entry] -= step
            slope = (reference(up, teacher, beta) - reference(down, teacher, beta)).sum() / (2 * step)
            assert leaf.grad is not None
            assert abs(leaf.grad[token, entry].item() - slope) < 1e-5 * max(1.0, abs(slope))


def test_closed_forms_of_two_tokens() -> None:
    """S = (1/2, 1/2), T = (3/4, 1/4): by hand."""
    student, teacher = torch.log(torch.tensor([[0.5, 0.5]])), torch.log(torch.tensor([[0.75, 0.25]]))
    forward = 0.75 * np.log(1.5) + 0.25 * np.log(0.5)
    reverse = 0.5 * np.log(2 / 3) + 0.5 * np.log(2.0)
    middle = 0.5 * (0.75 * np.log(0.75 / 0.625) + 0.25 * np.log(0.25 / 0.375)) + 0.5 * (
        0.5 * np.log(0.5 / 0.625) + 0.5 * np.log(0.5 / 0.375)
    )
    for beta, expected in ((0.0, forward), (1.0, reverse), (0.5, middle)):
        assert generalized_jsd(student, teacher, beta).item() == pytest.approx(expected, rel=1e-5)


def test_jensen_shannon_is_symmetric_and_at_most_log_two() -> None:
    student, teacher = torch.tensor(logits(5)) * 20, torch.tensor(logits(6)) * 20
    one, other = measured(student, teacher, 0.5), measured(teacher, student, 0.5)
    torch.testing.assert_close(one, other)
    assert one.max() <= np.log(2)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_alike_is_zero_with_zero_gradient(beta: float) -> None:
    leaf = torch.tensor(logits(7), requires_grad=True)
    loss = measured(leaf, leaf.detach(), beta)
    loss.sum().backward()
    assert loss.abs().max() < 1e-12
    assert leaf.grad is not None
    assert leaf.grad.abs().max() < 1e-12


def test_impossible_tokens_give_no_nan() -> None:
    """A token that the teacher excludes: the bounded divergence stays finite, and so does its gradient."""
    leaf = torch.tensor(logits(8), requires_grad=True)
    teacher = torch.tensor(logits(9))
    teacher[:, 0] = -torch.inf
    loss = measured(leaf, teacher, 0.5)
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert leaf.grad is not None
    assert torch.isfinite(leaf.grad).all()
    assert torch.isinf(measured(leaf.detach(), teacher, 1.0)).all()


def test_wrong_arguments() -> None:
    row = torch.zeros(1, 3)
    with pytest.raises(ValueError, match="beta must lie in"):
        generalized_jsd(row, row, 1.5)
    with pytest.raises(ValueError, match="shapes differ"):
        generalized_jsd(row, torch.zeros(2, 3), 0.5)


def test_the_sampled_reverse_kl_has_the_full_ones_gradient_in_expectation() -> None:
    """Summed over all tokens with their probabilities, the policy gradient is the gradient of KL(S||T)."""
    student, teacher = logits(10), logits(11)
    full = torch.tensor(student, requires_grad=True)
    measured(full, torch.tensor(teacher), 1.0).sum().backward()
    leaf = torch.tensor(student, requires_grad=True)
    logp = leaf.log_softmax(-1)
    teacher_logp = torch.tensor(teacher).log_softmax(-1)
    total = torch.zeros((), dtype=torch.float64)
    for entry in range(VOCAB):
        of_sampled = logp[:, entry]
        advantages = sampled_reverse_kl_advantages(of_sampled, teacher_logp[:, entry])
        total = total + (of_sampled.exp().detach() * policy_gradient(of_sampled, advantages)).sum()
    total.backward()
    torch.testing.assert_close(leaf.grad, full.grad, rtol=1e-9, atol=1e-12)


def test_group_advantages() -> None:
    found = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0]]))
    torch.testing.assert_close(found[0], torch.tensor([1.0, -1.0, -1.0, 1.0]))
    assert (found[1] == 0).all()
    assert found[2].sum().abs() < 1e-6
    assert found[2, 3] == pytest.approx(3**0.5, rel=1e-6)
