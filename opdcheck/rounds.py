"""Measured rounds on disk: what makes an interrupted `admit` go on, and a repeated one answer at once.

A round is a few prompts, sampled and scored. Its file is named by a hash of everything that its numbers depend on
(weights, tokenizer, candidate, prompts, seeds, versions, device), so a stale file can never be read by mistake. The
format is NumPy's `.npz`, read with pickling off.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from opdcheck.files import cache_dir, prune, write_atomically
from opdcheck.measurement import Part
from opdcheck.mismatch.tokens import TokenMismatch
from opdcheck.rollouts import Prompt, Rollout

FORMAT = 4
"""Part of every key. Raise it when the meaning of a stored number changes."""

MAX_CACHE_BYTES = 2 * 2**30

_TOKEN_ARRAYS = ("logq", "logp", "tv", "tv_lower", "tv_upper", "kl", "kl_lower", "argmax_flip")


@dataclass(frozen=True)
class Round:
    """Some prompts' rollouts and their per-token mismatch, in the same order, and the engine's account of itself."""

    rollouts: list[Rollout]
    mismatch: list[TokenMismatch]
    engine: str = ""
    provenance: tuple[Part, ...] = ()

    def by_prompt(self) -> list[list[TokenMismatch]]:
        """The mismatch of each prompt's samples together; prompts in their first order."""
        groups: dict[int, list[TokenMismatch]] = {}
        for rollout, mismatch in zip(self.rollouts, self.mismatch, strict=True):
            groups.setdefault(rollout.prompt.index, []).append(mismatch)
        return list(groups.values())


def round_key(measurement_key: Mapping[str, Any], prompts: Sequence[Prompt]) -> str:
    """Hash of all that the numbers of one round depend on."""
    content = {"format": FORMAT, "prompts": [[prompt.index, prompt.token_ids] for prompt in prompts], **measurement_key}
    return blake3(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


class RoundStore:
    """Reads and writes rounds. An unreadable file counts as absent: it is measured again."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or cache_dir() / "rounds"

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.npz"

    def load(self, key: str, prompts: Sequence[Prompt]) -> Round | None:
        """The stored round, or None."""
        path = self._path(key)
        try:
            with np.load(path, allow_pickle=False) as stored:
                arrays = dict(stored.items())
            if str(arrays.pop("key")) != key or str(arrays.pop("digest")) != _digest(arrays):
                return None
            loaded = _from_arrays(arrays, prompts)
            os.utime(path)  # so that what is used stays when the cache is pruned
        except Exception:  # a damaged file can raise anything, and is no more than a file that is not there
            return None
        return loaded

    def save(self, key: str, measured: Round) -> None:
        """Stores a round. A cache that cannot be written is no reason to lose the measurement: it is then not kept."""
        buffer = io.BytesIO()
        arrays = _to_arrays(measured)
        marks = {"key": np.array(key), "digest": np.array(_digest(arrays))}
        np.savez_compressed(buffer, allow_pickle=False, **arrays, **marks)
        try:
            write_atomically(self._path(key), buffer.getvalue())
            prune(self.folder, "*.npz", MAX_CACHE_BYTES)
        except OSError:
            return


def _digest(arrays: Mapping[str, np.ndarray[Any, Any]]) -> str:
    """Hash of the arrays' contents: a file under another's name, or changed since, is then not taken for a round."""
    digest = blake3()
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(f"{name} {array.dtype.str} {array.shape} ".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def _to_arrays(measured: Round) -> dict[str, np.ndarray[Any, Any]]:
    arrays: dict[str, np.ndarray[Any, Any]] = {
        "prompt_index": np.array([rollout.prompt.index for rollout in measured.rollouts]),
        "sample": np.array([rollout.sample for rollout in measured.rollouts]),
        "lengths": np.array([len(rollout) for rollout in measured.rollouts]),
        "stopped": np.array([rollout.finish_reason == "stop" for rollout in measured.rollouts]),
        "token_ids": np.concatenate([rollout.token_ids for rollout in measured.rollouts]),
        "estimator": np.array(measured.mismatch[0].estimator),
        "engine": np.array(measured.engine),
        "provenance": np.array(json.dumps([part.model_dump() for part in measured.provenance])),
    }
    for name in _TOKEN_ARRAYS:
        arrays[name] = np.concatenate([getattr(mismatch, name) for mismatch in measured.mismatch])
    return arrays


def _from_arrays(arrays: Mapping[str, np.ndarray[Any, Any]], prompts: Sequence[Prompt]) -> Round:
    by_index = {prompt.index: prompt for prompt in prompts}
    ends = np.cumsum(arrays["lengths"])[:-1]
    columns = {name: np.split(arrays[name], ends) for name in ("token_ids", *_TOKEN_ARRAYS)}
    rollouts = [
        Rollout(
            prompt=by_index[int(index)],
            sample=int(sample),
            token_ids=columns["token_ids"][row],
            logq=columns["logq"][row],
            finish_reason="stop" if stopped else "length",
        )
        for row, (index, sample, stopped) in enumerate(
            zip(arrays["prompt_index"], arrays["sample"], arrays["stopped"], strict=True)
        )
    ]
    estimator: Any = str(arrays["estimator"])
    mismatch = [
        TokenMismatch(estimator=estimator, **{name: columns[name][row] for name in _TOKEN_ARRAYS})
        for row in range(len(rollouts))
    ]
    provenance = tuple(Part(**part) for part in json.loads(str(arrays["provenance"])))
    return Round(rollouts, mismatch, engine=str(arrays["engine"]), provenance=provenance)
