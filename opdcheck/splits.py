"""Finished splits by source on disk, so that a rejected candidate answers at once when it is asked again."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from blake3 import blake3
from pydantic import TypeAdapter, ValidationError

from opdcheck.files import cache_dir, write_atomically
from opdcheck.measurement import SourceShare
from opdcheck.rollouts import Rollout

FORMAT = 2
"""Part of every key. Raise it when the meaning of a stored number changes."""

_Shares = TypeAdapter(list[SourceShare])


def split_file(measurement_key: Mapping[str, Any], rollouts: Sequence[Rollout], metric: str) -> Path:
    """Where the split of these rollouts is kept: named by all that its numbers depend on."""
    content = {"format": FORMAT, "metric": metric, **measurement_key}
    digest = blake3(json.dumps(content, sort_keys=True, default=str).encode())
    for rollout in rollouts:
        digest.update(json.dumps([rollout.prompt.token_ids, rollout.token_ids.tolist()]).encode())
    return cache_dir() / "splits" / f"{digest.hexdigest()}.json"


def load_split(file: Path) -> list[SourceShare] | None:
    """The stored split; None if there is none that can be read."""
    try:
        return _Shares.validate_json(file.read_bytes())
    except (OSError, ValidationError):
        return None


def save_split(file: Path, shares: list[SourceShare]) -> None:
    """Keeps a split. A cache that cannot be written loses nothing but the cache."""
    try:
        write_atomically(file, _Shares.dump_json(shares))
    except OSError:
        return
