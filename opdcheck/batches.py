"""Sequences that share a pass of a model: of similar length, padded together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from opdcheck.rollouts import Rollout


def length_batches(lengths: Sequence[int], max_tokens: int, max_rows: int | None = None) -> Iterator[list[int]]:
    """Groups of indices, longest first, so that memory peaks at once.

    Args:
        max_tokens: bound of rows times the longest length in a group; one sequence is always allowed.
        max_rows: bound of a group's size.
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        if batch and ((len(batch) + 1) * lengths[batch[0]] > max_tokens or len(batch) == max_rows):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def teacher_forced(rollouts: Sequence[Rollout]) -> tuple[Tensor, Tensor]:
    """Prompts with their completions, padded on the right: token ids and mask, int64 [rollouts, tokens].

    The last token predicts nothing, so it is left out.
    """
    sequences = [[*rollout.prompt.token_ids, *rollout.token_ids.tolist()][:-1] for rollout in rollouts]
    longest = max(map(len, sequences))
    input_ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids in sequences])
    mask = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in sequences])
    return input_ids, mask


def completion_rows(hidden: Tensor, rollouts: Sequence[Rollout]) -> list[Tensor]:
    """Of `teacher_forced`'s hidden states, [rollouts, tokens, hidden], those that predict the completions' tokens.

    Returns:
        Views, [tokens, hidden] per rollout.
    """
    ends = [len(rollout.prompt.token_ids) + len(rollout) - 1 for rollout in rollouts]
    return [row[end - len(rollout) : end] for row, end, rollout in zip(hidden, ends, rollouts, strict=True)]
