"""The record that travels from an engine to the scorer: token ids and rollout log-probabilities, never text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Prompt:
    """One prompt as the token ids that both sides see. `index` is its place in the workload file."""

    index: int
    token_ids: list[int]


@dataclass(frozen=True)
class RolloutRequest:
    """One completion to sample. `seed` makes it independent of what else is in the batch."""

    prompt: Prompt
    sample: int
    seed: int


@dataclass(frozen=True)
class Rollout:
    """One sampled completion and what the engine said about it.

    All log-probabilities are natural logs under the distribution that was sampled from, that is after temperature and
    top-k / top-p / min-p.
    """

    prompt: Prompt
    sample: int
    token_ids: np.ndarray[Any, np.dtype[np.int64]]  # [tokens]
    logq: np.ndarray[Any, np.dtype[np.float64]]  # [tokens], log-probability of each sampled token
    finish_reason: str  # "stop" (end token, which is part of token_ids) or "length"
    top_ids: np.ndarray[Any, np.dtype[np.int64]] | None = None  # [tokens, k], most probable first; < 0: none
    top_logq: np.ndarray[Any, np.dtype[np.float64]] | None = None  # [tokens, k]; -inf outside the sampling support
    final_hidden: torch.Tensor | None = None  # [tokens, hidden] as decoded, only where the engine has its own head

    def __len__(self) -> int:
        return len(self.token_ids)
