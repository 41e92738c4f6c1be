"""Which of opdcheck's files a mapping is, by its top-level keys: one given for another is told so, in one sentence."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """One kind of file."""

    name: str
    marks: frozenset[str]
    """Top-level keys that it always has and that, together, no kind before it in `KINDS` has."""
    shown: str
    """The keys that somebody who wrote it would know it by."""
    purpose: str
    """What it is good for, where another kind was expected."""


CANDIDATE = Kind(
    "candidate",
    frozenset({"rollout", "workload"}),
    "`student`, `rollout`, `workload`",
    "`opdcheck admit FILE` measures it; `opdcheck budget declare FILE` makes a budget for its student.",
)
BUDGET = Kind(
    "budget",
    frozenset({"provenance", "limits"}),
    "`provenance`, `limits`, `environment`",
    "A candidate names its budget as `budget: FILE`; so does `--budget FILE`.",
)
CALIBRATION = Kind(
    "calibration",
    frozenset({"ladder", "method"}),
    "`method`, `evaluation`, `ladder`",
    "`opdcheck calibrate FILE` makes a budget from it.",
)
REPORT = Kind(
    "report",
    frozenset({"candidate_file", "verdict"}),
    "`measurement`, `verdict`",
    "It is what `opdcheck admit --json FILE` writes.",
)
KINDS = (REPORT, BUDGET, CALIBRATION, CANDIDATE)


def kind_of(keys: Collection[str]) -> Kind | None:
    """The kind that top-level keys tell; None where they tell none."""
    return next((kind for kind in KINDS if kind.marks <= set(keys)), None)
