"""Finished splits by source on disk, so that a rejected candidate answers at once when it is asked again."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from blake3 import blake3
from pydantic import ValidationError

from opdcheck.config import Model
from opdcheck.files import cache_dir, prune, write_atomically
from opdcheck.measurement import SourceShare
from opdcheck.rollouts import Rollout

FORMAT = 4
"""Part of every key. Raise it when the meaning of a stored number changes."""

MAX_CACHE_BYTES = 64 * 2**20


class _Kept(Model):
    """A split with the name of its file and a hash of itself: under another name, or changed, it is not taken."""

    name: str
    digest: str
    shares: list[SourceShare]


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
        stored = _Kept.model_validate_json(file.read_bytes())
        os.utime(file)  # so that what is used stays when the cache is pruned
    except (OSError, ValidationError):
        return None
    return stored.shares if stored == _kept(file, stored.shares) else None


def save_split(file: Path, shares: list[SourceShare]) -> None:
    """Keeps a split. A cache that cannot be written loses nothing but the cache."""
    try:
        write_atomically(file, _kept(file, shares).model_dump_json())
        prune(file.parent, "*.json", MAX_CACHE_BYTES)
    except OSError:
        return


def _kept(file: Path, shares: list[SourceShare]) -> _Kept:
    text = json.dumps([share.model_dump(mode="json") for share in shares], sort_keys=True)
    return _Kept(name=file.stem, digest=blake3(text.encode()).hexdigest(), shares=shares)
