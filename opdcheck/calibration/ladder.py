"""The levels of a calibration: rollout configurations of rising mismatch, from several sources."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal, assert_never

from opdcheck.calibration.file import Calibration
from opdcheck.config import Candidate, Decision, Noise, Quantization, Rollout, Source, Staleness

LadderSource = Literal["none", "noise", "logit_noise", "staleness", "quantization", "kv_cache", "mixture"]
"""Where a level's mismatch comes from. `none`: the unperturbed run that all others are paired with."""


@dataclass(frozen=True)
class Level:
    """One rollout configuration to train under."""

    name: str
    """Such as `noise 0.05`; unique within a ladder."""
    source: LadderSource
    rollout: Rollout

    @property
    def limited_as(self) -> Source:
        """The source whose limit this level informs.

        Raises:
            KeyError: it has none, or several.
        """
        match self.source:
            case "noise" | "logit_noise":
                return "noise"
            case "staleness":
                return "staleness"
            case "quantization" | "kv_cache":
                return "quantization"
            case "none" | "mixture":
                raise KeyError(self.source)
            case _:
                assert_never(self.source)

    @property
    def slug(self) -> str:
        """The name as part of a file name, cut where long; what tells levels apart is the key beside it."""
        return re.sub(r"[^A-Za-z0-9.]+", "-", self.name).strip("-").lower()[:80]

    @property
    def lag(self) -> int:
        """Optimizer steps that the rollout weights are behind."""
        staleness = self.rollout.staleness
        return 0 if staleness is None or staleness.lag is None else staleness.lag


def unperturbed(calibration: Calibration) -> Level:
    """The level without any mismatch but the engine's own."""
    return Level("unperturbed", "none", calibration.rollout)


def levels(calibration: Calibration) -> list[Level]:
    """The unperturbed level and then the ladder's, source by source, as the file lists them."""
    ladder, rollout = calibration.ladder, calibration.rollout
    return [
        unperturbed(calibration),
        *(Level(f"noise {x:g}", "noise", _with(rollout, noise=Noise(weights=x))) for x in ladder.noise),
        *(
            Level(f"logit noise {x:g}", "logit_noise", _with(rollout, noise=Noise(logits=x)))
            for x in ladder.logit_noise
        ),
        *(Level(f"staleness {x:g}", "staleness", _with(rollout, staleness=Staleness(lag=x))) for x in ladder.staleness),
        *(Level(scheme_label(x), "quantization", _with(rollout, quantization=x)) for x in ladder.quantization),
        *(Level(f"kv cache {x}", "kv_cache", _with(rollout, kv_cache_dtype=x)) for x in ladder.kv_cache_dtype),
    ]


def as_candidate(calibration: Calibration, level: Level) -> Candidate:
    """The level as `admit` would be given it: same student, teacher, workload and metric."""
    return Candidate(
        student=calibration.student,
        teacher=calibration.teacher,
        rollout=level.rollout,
        workload=calibration.workload,
        decision=Decision(metric=calibration.metric),
    )


def scheme_label(scheme: Any) -> str:
    """A short name of a quantization."""
    if isinstance(scheme, str):
        return scheme
    if isinstance(scheme, Quantization):
        shown = [scheme.scheme, *([f"group {scheme.group_size}"] if scheme.group_size else [])]
        if scheme.ignore != ["lm_head"]:
            shown.append(f"except {' '.join(scheme.ignore) or 'nothing'}")
        if scheme.targets != ["Linear"]:
            shown.append(f"of {' '.join(scheme.targets)}")
        return " ".join(shown)
    groups = scheme.get("config_groups", {}).values()
    return " + ".join(dict.fromkeys(_weights_label(group.get("weights") or {}) for group in groups))


def _weights_label(weights: dict[str, Any]) -> str:
    """Such as `3-bit int group 32`."""
    shown = [f"{weights.get('num_bits', 8)}-bit {weights.get('type', 'int')}", str(weights.get("strategy", "tensor"))]
    return " ".join([*shown, *([str(weights["group_size"])] if weights.get("group_size") else [])])


def _with(rollout: Rollout, **changes: Any) -> Rollout:
    return rollout.model_copy(update=changes)


__all__ = ["LadderSource", "Level", "as_candidate", "levels", "scheme_label", "unperturbed"]
