"""Candidates and rollouts for tests, without a file or an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from opdcheck.config import Candidate
from opdcheck.rollouts import Prompt, Rollout

CALIBRATION = [list(range(4, 40)), list(range(60, 90))]


def candidate(student: Path, *, student_dtype: str = "float32", **rollout: Any) -> Candidate:
    """A candidate on the CPU whose rollout dtype is the trainer's unless given."""
    return Candidate.model_validate(
        {
            "student": {"path": str(student), "dtype": student_dtype, "device": "cpu"},
            "rollout": {"engine": "transformers", "dtype": student_dtype, **rollout},
            "workload": {"prompts": "prompts.jsonl", "max_completion_length": 16},
        }
    )


def random_rollouts(prompts: int = 3, samples: int = 2, tokens: int = 12, vocab: int = 256) -> list[Rollout]:
    """Completions of random tokens: for scoring, where they come from does not matter."""
    rng = np.random.default_rng(0)
    return [
        Rollout(
            prompt=Prompt(index, [int(token) for token in rng.integers(4, vocab, 5 + index)]),
            sample=sample,
            token_ids=rng.integers(4, vocab, tokens + sample),
            logq=np.zeros(tokens + sample),
            finish_reason="length",
        )
        for index in range(prompts)
        for sample in range(samples)
    ]
