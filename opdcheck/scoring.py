"""The trainer's side: log-probabilities and distributions at the tokens of a rollout, a few rows at a time.

The logits of a whole sequence never exist. A chunk's rows are chosen so that everything it needs at once (logits,
log-probabilities of both sides, their differences, ...) stays within `chunk_bytes`.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from opdcheck.batches import completion_rows, length_batches, teacher_forced
from opdcheck.config import Sampling
from opdcheck.errors import EngineError
from opdcheck.mismatch.exact import divergence, exact_mismatch
from opdcheck.mismatch.tokens import Floats, TokenMismatch
from opdcheck.models import CausalLM, memory_explained
from opdcheck.rollouts import Rollout
from opdcheck.sampling import log_probabilities, log_probabilities_on_support

# Upper bounds of what is alive at once per logit of a chunk (measured in tests/test_scoring.py), with some room for
# what the allocator holds on to meanwhile (measured in tests/benchmarks/scoring_memory.py).
_SCORE_BYTES_PER_LOGIT = 20
_COMPARE_BYTES_PER_LOGIT = 48

# How much of q's mass its listed top tokens must carry to count as its whole support.
_SUPPORT_MASS = 1 - 1e-4


@dataclass(frozen=True)
class TrainerScores:
    """The trainer's view of one rollout, under the rollout's sampling transform and on its support."""

    logp: Floats  # [tokens], log-probability of each sampled token
    top_logp: Floats | None  # [tokens, k], at rollout.top_ids; -inf outside the support
    argmax_p: np.ndarray[Any, np.dtype[np.int64]]  # [tokens], the trainer's most probable token


@dataclass(frozen=True)
class _Piece:
    """Rows start:stop of one rollout, in a chunk."""

    index: int
    start: int
    stop: int


class Scorer:
    """Scores rollouts by teacher forcing.

    Args:
        model: the trainer's policy p.
        chunk_bytes: bound of the memory for logits and all that is computed from them; one row is always allowed.
        batch_tokens: padded tokens in one pass of the decoder; one sequence is always allowed.
    """

    def __init__(self, model: CausalLM, *, chunk_bytes: int = 64 * 2**20, batch_tokens: int = 4096) -> None:
        self.model = model
        self.chunk_bytes = chunk_bytes
        self.batch_tokens = batch_tokens

    def final_hidden(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
        """The trainer's final hidden states at the positions that predict the completion's tokens.

        Sequences of similar length share a batch, padded on the right.

        Returns:
            Per rollout, in the given order: [tokens, hidden] in the model's dtype, on the CPU.

        Raises:
            EngineError: out of memory.
        """
        hidden: dict[int, Tensor] = {}
        for batch in self._batches(rollouts):
            hidden.update(zip(batch, self._decode([rollouts[index] for index in batch]), strict=True))
        return [hidden[index] for index in range(len(rollouts))]

    def null_hidden(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
        """The same as `final_hidden`, computed in batches of another shape.

        Mathematically nothing changes, so `compare` of the two is the `null`: the trainer against itself. A sequence
        that had a batch to itself gets a copy as its batch mate; every other one is computed alone.
        """
        hidden: dict[int, Tensor] = {}
        for batch in self._batches(rollouts):
            copies = 2 if len(batch) == 1 else 1
            for index in batch:
                hidden[index] = self._decode([rollouts[index]] * copies)[0]
        return [hidden[index] for index in range(len(rollouts))]

    def score(self, rollouts: Sequence[Rollout], sampling: Sampling) -> list[TrainerScores]:
        """The trainer's log-probabilities of the sampled tokens and of the engine's top tokens.

        Where the sampling truncates, p is renormalised over q's support, which the engine's top tokens must show.

        Raises:
            EngineError: the engine's top tokens do not hold q's whole support, or memory ran out.
        """
        supports = [_support_ids(rollout) for rollout in rollouts] if sampling.truncates else None
        hidden = self.final_hidden(rollouts)
        parts: list[list[TrainerScores]] = [[] for _ in rollouts]
        with memory_explained("scoring with the trainer"):
            for chunk in self._chunks([len(rollout) for rollout in rollouts], _SCORE_BYTES_PER_LOGIT):
                logp = self._chunk_logp(chunk, hidden, sampling, supports)
                row = 0
                for piece in chunk:
                    rows = logp[row : row + piece.stop - piece.start]
                    parts[piece.index].append(_scores(rows, rollouts[piece.index], piece))
                    row += len(rows)
                del logp, rows
                _return_freed_memory()
        return [_joined_scores(of_one) for of_one in parts]

    def compare(
        self,
        rollouts: Sequence[Rollout],
        hidden_p: Sequence[Tensor],
        hidden_q: Sequence[Tensor | None],
        logits_q: Callable[[Tensor], Tensor],
        sampling: Sampling,
    ) -> list[TokenMismatch]:
        """Estimator `exact`: both whole distributions, chunk by chunk.

        Where the sampling truncates, q's own support is the support of both sides.

        Args:
            hidden_p: the trainer's final hidden states, [tokens, hidden] per rollout.
            hidden_q: the rollout policy's.
            logits_q: the rollout policy's head, [tokens, hidden] -> float32 [tokens, vocab].

        Raises:
            EngineError: an engine that gave no hidden states, a vocabulary of another size, or memory ran out.
        """
        known_q = [_required(hidden) for hidden in hidden_q]
        lengths = [len(rollout) for rollout in rollouts]
        for length, of_p, of_q in zip(lengths, hidden_p, known_q, strict=True):
            if not len(of_p) == len(of_q) == length:
                raise ValueError(f"{length} tokens, but {len(of_p)} and {len(of_q)} hidden states")
        tables: list[list[Tensor]] = [[torch.empty(5, 0, dtype=torch.float64)] for _ in rollouts]
        with memory_explained("comparing the two policies"):
            for chunk in self._chunks(lengths, _COMPARE_BYTES_PER_LOGIT):
                logits = logits_q(_rows(chunk, known_q))
                table = self._compare_chunk(_tokens(chunk, rollouts), _rows(chunk, hidden_p), logits, sampling)
                row = 0
                for piece in chunk:
                    count = piece.stop - piece.start
                    tables[piece.index].append(table[:, row : row + count])
                    row += count
                del logits, table
                _return_freed_memory()
        return [exact_mismatch(*torch.cat(of_one, dim=1)) for of_one in tables]

    def _compare_chunk(self, tokens: Tensor, hidden_p: Tensor, logits_q: Tensor, sampling: Sampling) -> Tensor:
        """logq, logp, tv, kl, argmax_flip of a chunk: float64 [5, rows], on the CPU."""
        if logits_q.shape[-1] != self.model.vocab_size:
            raise EngineError(
                f"the rollout policy has {logits_q.shape[-1]} logits, the trainer {self.model.vocab_size}",
                hint="Both must be the same student; check `rollout.model`.",
            )
        logq = log_probabilities(logits_q.to(self.model.device), sampling)
        del logits_q
        logits_p = self.model.logits(hidden_p)
        if sampling.truncates:
            # `!= -inf` and not isfinite: a NaN must stay visible.
            logp = log_probabilities_on_support(logits_p, sampling.temperature, logq != -torch.inf)
        else:
            logp = log_probabilities(logits_p, sampling)
        del logits_p
        tv, kl, argmax_flip = divergence(logq, logp)
        tokens = tokens.to(logq.device)[:, None]
        sampled_q, sampled_p = logq.gather(1, tokens)[:, 0], logp.gather(1, tokens)[:, 0]
        return torch.stack([part.double() for part in (sampled_q, sampled_p, tv, kl, argmax_flip)]).cpu()

    def _chunk_logp(
        self, chunk: list[_Piece], hidden: list[Tensor], sampling: Sampling, supports: list[Tensor] | None
    ) -> Tensor:
        """The trainer's log-probabilities of a chunk, float32 [rows, vocab]."""
        logits = self.model.logits(_rows(chunk, hidden))
        if supports is None:
            return log_probabilities(logits, sampling)
        mask = torch.zeros(logits.shape, dtype=torch.bool, device=logits.device)
        row = 0
        for piece in chunk:
            ids = supports[piece.index][piece.start : piece.stop].to(logits.device)
            mask[row : row + len(ids)].scatter_(1, ids, True)
            row += len(ids)
        return log_probabilities_on_support(logits, sampling.temperature, mask)

    def _decode(self, rollouts: Sequence[Rollout]) -> list[Tensor]:
        """One pass of the decoder over one batch."""
        input_ids, mask = teacher_forced(rollouts)
        with memory_explained("running the trainer's decoder"):
            hidden = self.model.final_hidden(input_ids, mask)
        # Copies: a view would keep the whole padded batch alive.
        return [row.to("cpu", copy=True) for row in completion_rows(hidden, rollouts)]

    def _batches(self, rollouts: Sequence[Rollout]) -> Iterator[list[int]]:
        """Indices of the rollouts that share a pass of the decoder."""
        lengths = [len(rollout.prompt.token_ids) + len(rollout) - 1 for rollout in rollouts]
        return length_batches(lengths, self.batch_tokens)

    def _chunks(self, lengths: Sequence[int], bytes_per_logit: int) -> Iterator[list[_Piece]]:
        """Cuts all rows, in order, into chunks that fit `chunk_bytes`; short rollouts share one."""
        room = rows = max(1, self.chunk_bytes // (self.model.vocab_size * bytes_per_logit))
        chunk: list[_Piece] = []
        for index, length in enumerate(lengths):
            start = 0
            while start < length:
                stop = min(length, start + room)
                chunk.append(_Piece(index, start, stop))
                room -= stop - start
                start = stop
                if room == 0:
                    yield chunk
                    chunk, room = [], rows
        if chunk:
            yield chunk


def _libc() -> Any:
    """glibc, or None on other systems."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    return library if hasattr(library, "malloc_trim") else None


_LIBC = _libc()


def _return_freed_memory() -> None:
    """Gives what a chunk has freed back to the system.

    glibc does not reuse the gaps that torch's aligned allocations leave: without this, chunks of 50 MiB were seen to
    grow to 480 MiB of resident memory.
    """
    if _LIBC is not None:
        _LIBC.malloc_trim(0)


def _rows(chunk: Sequence[_Piece], hidden: Sequence[Tensor]) -> Tensor:
    """A chunk's hidden states, [rows, hidden]."""
    return torch.cat([hidden[piece.index][piece.start : piece.stop] for piece in chunk])


def _tokens(chunk: Sequence[_Piece], rollouts: Sequence[Rollout]) -> Tensor:
    """A chunk's sampled tokens, int64 [rows]."""
    return torch.from_numpy(
        np.concatenate([rollouts[piece.index].token_ids[piece.start : piece.stop] for piece in chunk])
    )


def _required(hidden: Tensor | None) -> Tensor:
    if hidden is None:
        raise EngineError("the engine gave no final hidden states, which the exact comparison needs")
    return hidden


def _support_ids(rollout: Rollout) -> Tensor:
    """q's support from the engine's top tokens: int64 [tokens, k + 1], the sampled token included, with repeats."""
    if rollout.top_ids is None or rollout.top_logq is None:
        raise EngineError(
            "the sampling truncates (top_p, top_k or min_p), but the engine gave no top log-probabilities, so the "
            "support of the rollout policy is unknown",
            hint="Set `rollout.logprobs` to at least `top_k`, or sample with top_p = 1, min_p = 0 and no top_k.",
        )
    mass = np.where(rollout.top_ids >= 0, np.exp(rollout.top_logq), 0.0).sum(axis=1)
    if len(mass) and not mass.min() > _SUPPORT_MASS and not np.isnan(mass).any():
        k = rollout.top_ids.shape[1]
        raise EngineError(
            f"the sampling truncates, but the engine's {k} top tokens carry only {mass.min():.4f} of the mass at some "
            "position, so the support of the rollout policy is unknown",
            hint="Raise `rollout.logprobs`, or set `top_k` to at most `rollout.logprobs`.",
        )
    sampled = rollout.token_ids[:, None]
    # Listed tokens outside the support, and padding, are replaced by the sampled one, which is in it.
    inside = np.where((rollout.top_logq != -np.inf) & (rollout.top_ids >= 0), rollout.top_ids, sampled)
    return torch.from_numpy(np.concatenate([inside, sampled], axis=1))


def _scores(logp: Tensor, rollout: Rollout, piece: _Piece) -> TrainerScores:
    """Picks one rollout's numbers out of log-probabilities [rows, vocab]."""
    tokens = torch.from_numpy(rollout.token_ids[piece.start : piece.stop]).to(logp.device)
    top_logp = None
    if rollout.top_ids is not None:
        top_ids = torch.from_numpy(rollout.top_ids[piece.start : piece.stop]).to(logp.device)
        of_top = logp.gather(1, top_ids.clamp_min(0)).double()
        top_logp = of_top.masked_fill(top_ids < 0, -math.inf).cpu().numpy()
    return TrainerScores(
        logp=logp.gather(1, tokens[:, None])[:, 0].double().cpu().numpy(),
        top_logp=top_logp,
        argmax_p=logp.argmax(dim=-1).cpu().numpy(),
    )


def _joined_scores(parts: Sequence[TrainerScores]) -> TrainerScores:
    if not parts:
        return TrainerScores(np.empty(0), None, np.empty(0, dtype=np.int64))
    tops = [part.top_logp for part in parts if part.top_logp is not None]
    return TrainerScores(
        logp=np.concatenate([part.logp for part in parts]),
        top_logp=np.concatenate(tops) if tops else None,
        argmax_p=np.concatenate([part.argmax_p for part in parts]),
    )
