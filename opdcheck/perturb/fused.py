"""Linear layers that vLLM fuses into one matrix when it loads a checkpoint, so that they must be quantized alike."""

from __future__ import annotations

from collections.abc import Iterable

FUSED_SHARDS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}


def fused_groups(names: Iterable[str]) -> list[list[str]]:
    """The module names that become one matrix in vLLM, in groups of at least two; the rest is left out."""
    groups: dict[str, list[str]] = {}
    for name in names:
        parent, _, leaf = name.rpartition(".")
        for fused, shards in FUSED_SHARDS.items():
            if leaf in shards:
                groups.setdefault(f"{parent}.{fused}", []).append(name)
    return [group for group in groups.values() if len(group) > 1]
