"""One optimizer step of OPD or RL on given rollouts.

Why not a maintained trainer: TRL's DistillationTrainer, GKDTrainer and GRPOTrainer sample inside their own training
loop, from their own model or a vLLM server that they keep in sync. A calibration has to own just that side: it perturbs
the rollout policy, makes it stale by an exact number of steps, and pairs runs by common random numbers down to the
token. What is left of a trainer after that is the loss and one AdamW step, which are here, and which take rollouts from
anywhere. `beta`, `lmbda` and the divergence follow TRL's definitions; the tests check them against the formulas.

The logits of a whole sequence never exist: the head runs on a few rows at a time, forward and backward, and the
decoder's backward pass runs once per batch from the gradients that the rows have left at its output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from opdcheck.batches import completion_rows, length_batches, teacher_forced
from opdcheck.calibration.divergence import generalized_jsd, policy_gradient, sampled_reverse_kl_advantages
from opdcheck.calibration.file import Method
from opdcheck.calibration.optimizer import MasterAdamW
from opdcheck.models import CausalLM, memory_explained
from opdcheck.rollouts import Rollout

# Student and teacher logits, their log-probabilities, the mixture, differences and what autograd keeps, per logit.
_BYTES_PER_LOGIT = 64


@dataclass(frozen=True)
class StepStats:
    """What one step says about itself. Means are over the completions' tokens."""

    loss: float
    grad_norm: float
    tokens: int
    k3: float
    """Mismatch of the student's rollouts among them, by the sampled tokens: mean of r - 1 - log r; 0 without any."""
    k3_tokens: int
    """How many tokens that mean is over: those of the teacher's own completions (`lmbda`) say nothing of mismatch."""


class Trainer:
    """Student, teacher and optimizer.

    Args:
        student: trained in place; its parameters get gradients.
        teacher: None for method `rl`.
        method: loss and optimizer settings.
        temperature: of the rollouts; both sides' logits are divided by it.
        chunk_bytes: bound of the memory for logits and all that is computed from them; one row is always allowed.
        batch_tokens: padded tokens in one pass of the decoder; one sequence is always allowed.
    """

    def __init__(
        self,
        student: CausalLM,
        teacher: CausalLM | None,
        method: Method,
        *,
        temperature: float,
        chunk_bytes: int = 256 * 2**20,
        batch_tokens: int = 4096,
    ) -> None:
        self.student = student
        self.teacher = teacher
        self._method = method
        self._temperature = temperature
        self._chunk_rows = max(1, chunk_bytes // (student.vocab_size * _BYTES_PER_LOGIT))
        self._batch_tokens = batch_tokens
        self._optimizer = MasterAdamW(student.model, method)

    def step(
        self,
        rollouts: Sequence[Rollout],
        advantages: Sequence[float] | None = None,
        *,
        of_student: Sequence[bool] | None = None,
    ) -> StepStats:
        """Trains on rollouts: the loss is the mean over all their tokens.

        Args:
            advantages: per rollout, for method `rl`.
            of_student: per rollout, whether the student's rollout side sampled it, not the teacher; default all.

        Raises:
            EngineError: out of memory.
        """
        loss, k3 = 0.0, 0.0
        tokens = sum(map(len, rollouts))
        counted = [True] * len(rollouts) if of_student is None else list(of_student)
        k3_tokens = sum(len(rollout) for rollout, counts in zip(rollouts, counted, strict=True) if counts)
        lengths = [len(rollout.prompt.token_ids) + len(rollout) for rollout in rollouts]
        with memory_explained("training"):
            for batch in length_batches(lengths, self._batch_tokens):
                chosen = [rollouts[index] for index in batch]
                weights = None if advantages is None else [advantages[index] for index in batch]
                batch_loss, batch_k3 = self._backward(chosen, weights, [counted[index] for index in batch], tokens)
                loss, k3 = loss + batch_loss, k3 + batch_k3
            norm = self._optimizer.step()
        return StepStats(loss=loss, grad_norm=norm, tokens=tokens, k3=k3 / max(1, k3_tokens), k3_tokens=k3_tokens)

    def _backward(
        self, rollouts: Sequence[Rollout], advantages: Sequence[float] | None, counted: Sequence[bool], all_tokens: int
    ) -> tuple[float, float]:
        """Adds one batch's gradients. Returns its share of the loss, and the sum of k3 over its counted tokens."""
        with torch.enable_grad():
            hidden = _completion_hidden(self.student.decode, rollouts)
        teacher_hidden = None if self.teacher is None else _completion_hidden(self.teacher.final_hidden, rollouts)
        sampled = torch.cat([torch.from_numpy(rollout.token_ids) for rollout in rollouts]).to(hidden.device)
        logq = torch.cat([torch.from_numpy(rollout.logq) for rollout in rollouts])
        by_token = None if advantages is None else _spread(advantages, rollouts).to(hidden.device)
        counts = _spread(counted, rollouts).double()
        leaf = hidden.detach().requires_grad_(True)
        total, k3 = 0.0, 0.0
        for rows in _row_ranges(len(leaf), self._chunk_rows):
            with torch.enable_grad():
                logp = self._log_probabilities(self.student.head_logits(leaf[rows]))
                of_sampled = logp.gather(1, sampled[rows, None])[:, 0]
                losses = self._losses(
                    logp,
                    of_sampled,
                    None if teacher_hidden is None else teacher_hidden[rows],
                    sampled[rows],
                    None if by_token is None else by_token[rows],
                )
                share = losses.sum() / all_tokens
            share.backward()
            total += share.item()
            log_r = of_sampled.detach().double().cpu() - logq[rows]
            k3 += float((counts[rows] * (torch.expm1(log_r) - log_r)).sum())
        hidden.backward(leaf.grad)
        return total, k3

    def _losses(
        self,
        logp: Tensor,
        of_sampled: Tensor,
        teacher_hidden: Tensor | None,
        sampled: Tensor,
        advantages: Tensor | None,
    ) -> Tensor:
        """The loss of each token of a chunk, with gradient."""
        if advantages is not None:
            return policy_gradient(of_sampled, advantages)
        if self.teacher is None or teacher_hidden is None:
            raise ValueError("without advantages there must be a teacher")
        with torch.no_grad():
            teacher_logp = self._log_probabilities(self.teacher.head_logits(teacher_hidden))
        teacher_logp = teacher_logp.to(logp.device)
        if self._method.loss == "sampled":
            of_teacher = teacher_logp.gather(1, sampled[:, None])[:, 0]
            return policy_gradient(of_sampled, sampled_reverse_kl_advantages(of_sampled, of_teacher))
        return generalized_jsd(logp, teacher_logp, self._method.beta)

    def _log_probabilities(self, logits: Tensor) -> Tensor:
        return (logits.float() / self._temperature).log_softmax(-1)


def _completion_hidden(decode: Callable[[Tensor, Tensor], Tensor], rollouts: Sequence[Rollout]) -> Tensor:
    """Hidden states at the positions that predict the completions' tokens, one after the other: [tokens, hidden]."""
    return torch.cat(completion_rows(decode(*teacher_forced(rollouts)), rollouts))


def _spread(values: Sequence[float], rollouts: Sequence[Rollout]) -> Tensor:
    """Each rollout's value at each of its tokens."""
    return torch.cat(
        [torch.full((len(rollout),), float(value)) for value, rollout in zip(values, rollouts, strict=True)]
    )


def _row_ranges(rows: int, size: int) -> Iterator[slice]:
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))
