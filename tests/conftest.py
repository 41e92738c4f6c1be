"""Shared fixtures: a tiny random student for speed, and the real SmolLM2-135M that `make student` prepares."""

import os
from pathlib import Path

import pytest
from tiny import make_tiny_student

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as opdcheck.__main__ does, and why

SMOLLM2 = Path("~/.cache/opdcheck/students/smollm2-135m-instruct").expanduser()


@pytest.fixture(scope="session")
def tiny_student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random float32 student."""
    return make_tiny_student(tmp_path_factory.mktemp("tiny_student"))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Folder of the real student; skipped, with the command that makes it, where it is missing."""
    if not (SMOLLM2 / "model.safetensors").exists():
        pytest.skip("no SmolLM2 student: run `make student`")
    return SMOLLM2
