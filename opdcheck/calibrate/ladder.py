"""The levels of a calibration: rollout configurations of rising mismatch, from several sources."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any, Literal

from opdcheck.calibrate.file import Calibration
from opdcheck.config import Candidate, Decision, Noise, Quantization, Rollout, Staleness

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
    def slug(self) -> str:
        """The name as part of a file name."""
        return re.sub(r"[^A-Za-z0-9.]+", "-", self.name).strip("-").lower()

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
    found = [unperturbed(calibration)]
    for sigma in ladder.noise:
        found.append(Level(f"noise {sigma:g}", "noise", _with(rollout, noise=Noise(weights=sigma))))
    for sigma in ladder.logit_noise:
        found.append(Level(f"logit noise {sigma:g}", "logit_noise", _with(rollout, noise=Noise(logits=sigma))))
    for lag in ladder.staleness:
        found.append(Level(f"staleness {lag}", "staleness", _with(rollout, staleness=Staleness(lag=lag))))
    for scheme in ladder.quantization:
        found.append(Level(scheme_label(scheme), "quantization", _with(rollout, quantization=scheme)))
    for dtype in ladder.kv_cache_dtype:
        found.append(Level(f"kv cache {dtype}", "kv_cache", _with(rollout, kv_cache_dtype=dtype)))
    return found


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
    """A short name of a quantization, unique for what it says."""
    if isinstance(scheme, str):
        return scheme
    if isinstance(scheme, Quantization):
        shown = [scheme.scheme, *([f"group {scheme.group_size}"] if scheme.group_size else [])]
        if scheme.ignore != ["lm_head"]:
            shown.append(f"except {' '.join(scheme.ignore) or 'nothing'}")
        if scheme.targets != ["Linear"]:
            shown.append(f"of {' '.join(scheme.targets)}")
        return " ".join(shown)
    return "config " + json.dumps(scheme, sort_keys=True)[:60]


def _with(rollout: Rollout, **changes: Any) -> Rollout:
    return rollout.model_copy(update=changes)


__all__ = ["LadderSource", "Level", "as_candidate", "levels", "scheme_label", "unperturbed"]
