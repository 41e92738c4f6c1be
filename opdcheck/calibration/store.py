"""Finished trainings on disk. Each is one small JSON file, so that a kill loses at most the training in flight."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from blake3 import blake3
from filelock import FileLock, Timeout
from pydantic import BaseModel, ValidationError

from opdcheck.budget import Floor
from opdcheck.calibration.training import Outcome
from opdcheck.config import Model, Rollout
from opdcheck.files import write_atomically

FORMAT = 1
"""Part of every key. Raise it when the meaning of a stored number changes."""

T = TypeVar("T", bound=BaseModel)


class Run(Model):
    """One finished training."""

    key: str
    level: str
    source: str
    rollout: Rollout
    seed: int
    outcome: Outcome


class LevelMismatch(Model):
    """The mismatch of one level, as `admit` measures it: mean per metric."""

    key: str
    level: str
    metrics: dict[str, float]
    prompts: int
    tokens: int


class KeptFloor(Model):
    """The floor of the student, for the budget."""

    key: str
    floor: Floor


def content_key(content: Mapping[str, Any]) -> str:
    """Hash of all that a result depends on."""
    text = json.dumps({"format": FORMAT, **content}, sort_keys=True, default=str)
    return blake3(text.encode()).hexdigest(length=16)


class RunStore:
    """Reads and writes finished work. A file that cannot be read, or has another key, counts as absent."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, name: str, key: str, kind: type[T]) -> T | None:
        """What was finished under this name and key, or None."""
        try:
            stored = kind.model_validate_json(self._path(name, key).read_bytes())
        except (OSError, ValidationError):
            return None
        return stored if getattr(stored, "key", None) == key else None

    def save(self, name: str, key: str, result: BaseModel) -> None:
        """Keeps a result.

        Raises:
            OSError: the folder cannot be written to, or the disk is full; nothing is half-written.
        """
        write_atomically(self._path(name, key), result.model_dump_json(indent=1) + "\n")

    @contextmanager
    def claimed(self, name: str, key: str) -> Iterator[bool]:
        """Whether this process may do this piece of work: False while another one is at it.

        So the same command in two terminals, or on two nodes with a shared folder, shares the work. The operating
        system frees a killed process's claim.
        """
        path = self._path(name, key).with_suffix(".lock")
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path, blocking=False)
        try:
            lock.acquire()
        except Timeout:
            yield False
            return
        try:
            yield True
        finally:
            path.unlink(missing_ok=True)  # before the release: whoever waits for this file finds the result instead
            lock.release()

    def _path(self, name: str, key: str) -> Path:
        return self.folder / f"{name}-{key[:8]}.json"


__all__ = ["KeptFloor", "LevelMismatch", "Run", "RunStore", "content_key"]
