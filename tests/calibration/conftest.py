"""The addition pair: small, real, and with a verifier."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from addition import ADDITION

CALIBRATION = """
student: {{path: {addition}/student, dtype: float32, device: cpu}}
teacher: {{path: {addition}/teacher}}
rollout: {{engine: transformers, dtype: float32}}
method: {{learning_rate: 1.0e-3, beta: 0.5, steps: 3, batch_size: 4}}
workload: {{prompts: {addition}/train.jsonl, num_prompts: 16, max_completion_length: 34}}
evaluation: {{prompts: {addition}/held_out.jsonl, num_prompts: 8, every: 2}}
verifier: {{pattern: ";([0-9]+)$"}}
ladder:
  noise: [0.05, 0.1, 0.3]
  staleness: [1, 2]
seeds: [0, 1, 2]
mismatch_prompts: 8
budget: budget.yaml
runs: runs
"""


@pytest.fixture
def addition() -> Path:
    """Folder of the pair: student/, teacher/, train.jsonl, held_out.jsonl."""
    return ADDITION


@pytest.fixture
def calibration_file(tmp_path: Path) -> Path:
    """A calibration of a few seconds."""
    path = tmp_path / "calibration.yaml"
    path.write_text(textwrap.dedent(CALIBRATION.format(addition=ADDITION)))
    return path
