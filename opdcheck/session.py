"""Trainer, engine and prompts of one candidate, opened when first needed and closed together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from blake3 import blake3

from opdcheck.config import Candidate
from opdcheck.progress import Progress, Silent
from opdcheck.rollouts import Prompt, Rollout, RolloutRequest

if TYPE_CHECKING:
    import torch

    from opdcheck.engines.base import RolloutEngine
    from opdcheck.models import CausalLM
    from opdcheck.scoring import Scorer

CALIBRATION_PROMPTS = 8


class Session:
    """Holds what costs seconds to open. Use as a context manager.

    Args:
        candidate: what to measure.
        base: folder that the candidate file's relative paths start from.
        progress: told what is being opened.
    """

    def __init__(self, candidate: Candidate, base: Path, *, progress: Progress | None = None) -> None:
        self.candidate = candidate
        self.base = base
        self.progress: Progress = progress or Silent()
        self._engine: RolloutEngine | None = None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close_engine()

    @cached_property
    def tokenizer(self) -> Any:
        from opdcheck.workload import load_tokenizer

        return load_tokenizer(self.candidate.student, self.base)

    @cached_property
    def prompts(self) -> list[Prompt]:
        """The workload's prompts as token ids, in file order; see `drawn_prompts` for the order of measurement."""
        from opdcheck.models import context_length
        from opdcheck.workload import load_prompts

        limit = context_length(self.candidate.student, self.base)
        return load_prompts(self.candidate.workload, self.base, self.tokenizer, limit)

    @cached_property
    def drawn_prompts(self) -> list[Prompt]:
        """The prompts in the order in which they are measured: see `in_random_order`."""
        return in_random_order(self.prompts, self.candidate.workload.seed)

    @cached_property
    def trainer(self) -> CausalLM:
        from opdcheck.models import load_causal_lm

        student = self.candidate.student
        self.progress.stage("loading the student as the trainer holds it")
        return load_causal_lm(student, self.base, dtype=student.dtype, device=student.device)

    @cached_property
    def scorer(self) -> Scorer:
        from opdcheck.scoring import Scorer

        return Scorer(self.trainer)

    @property
    def engine(self) -> RolloutEngine:
        if self._engine is None:
            from opdcheck.engines import open_engine

            self.progress.stage(f"starting the rollout engine: {self.candidate.rollout.engine}")
            self._engine = open_engine(self.candidate, self.base, self.prompts, self.calibration_ids)
        return self._engine

    def close_engine(self) -> None:
        """Frees the engine's memory; a later use opens it again."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    @property
    def calibration_ids(self) -> list[list[int]]:
        """Token ids that static activation scales are set from: the first few prompts of the file."""
        return [prompt.token_ids for prompt in self.prompts[:CALIBRATION_PROMPTS]]

    def requests(self, prompts: Sequence[Prompt]) -> list[RolloutRequest]:
        """One request per prompt and sample, each with a seed of its own."""
        workload = self.candidate.workload
        return [
            RolloutRequest(prompt, sample, request_seed(workload.seed, prompt.index, sample))
            for prompt in prompts
            for sample in range(workload.samples_per_prompt)
        ]

    def trainer_hidden(self, rollouts: Sequence[Rollout]) -> list[torch.Tensor]:
        """The trainer's final hidden states on the rollouts' completions, [tokens, hidden] each."""
        return self.scorer.final_hidden(rollouts)


def request_seed(seed: int, prompt: int, sample: int) -> int:
    """A seed in [0, 2^31) that depends on nothing but its arguments, on any machine and Python version."""
    digest = blake3(f"{seed}/{prompt}/{sample}".encode()).digest(length=4)
    return int.from_bytes(digest, "big") & 0x7FFFFFFF


def in_random_order(prompts: Sequence[Prompt], seed: int) -> list[Prompt]:
    """The prompts in a random order that depends on `seed` and their number alone (NumPy's default generator).

    The confidence sequence takes what it has seen so far for a random sample, and files are often sorted: by topic, by
    length, by difficulty.
    """
    order = np.random.default_rng([seed % 2**64, len(prompts)]).permutation(len(prompts))
    return [prompts[at] for at in order]


def in_rounds(prompts: Sequence[Prompt], size: int) -> Iterator[Sequence[Prompt]]:
    """Consecutive groups of `size` prompts; the last may be smaller."""
    for start in range(0, len(prompts), size):
        yield prompts[start : start + size]
