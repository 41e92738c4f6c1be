"""The one record behind every face of a verdict: terminal, JSON, Markdown and the exit code."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import ValidationError

from opdcheck.budget import Budget, Environment
from opdcheck.config import Candidate, Model
from opdcheck.errors import ConfigError
from opdcheck.fingerprint import ModelFingerprint
from opdcheck.measurement import Measurement
from opdcheck.verdict import Verdict, reach


class BudgetSummary(Budget):
    """The budget as the verdict used it, and the file it came from. Its evidence stays in that file."""

    file: str


class Report(Model):
    """Everything that was measured and decided for one candidate."""

    schema_version: Literal[1] = 1
    opdcheck_version: str
    created: str
    """ISO 8601 date and time."""
    command: str = "admit"
    candidate_file: str
    candidate: Candidate
    budget: BudgetSummary
    student: ModelFingerprint
    teacher: ModelFingerprint | None = None
    environment: Environment
    measurement: Measurement
    verdict: Verdict
    seconds: float
    """Wall-clock time of the whole command."""

    def recomputed(self) -> Self:
        """The same report with its verdict reached anew from the stored measurement and budget."""
        verdict = reach(
            self.measurement,
            self.budget,
            self.candidate.decision,
            self.candidate.rollout,
            accepted=self.verdict.forgiven,
            observe=self.verdict.observed,
        )
        return self.model_copy(update={"verdict": verdict})


def budget_summary(budget: Budget, path: str | Path) -> BudgetSummary:
    """The budget for a report."""
    fields = {name: getattr(budget, name) for name in Budget.model_fields if name != "evidence"}
    return BudgetSummary(**fields, file=str(path))


def to_json(report: Report) -> str:
    """The report as standard JSON."""
    return standard_json(report)


def standard_json(record: Model) -> str:
    """A record as standard JSON; NaN and infinities, which JSON lacks, become the strings pydantic reads back."""
    return json.dumps(_standard(record.model_dump(mode="json")), indent=2, ensure_ascii=False, allow_nan=False)


def from_json(text: str) -> Report:
    """Reads what `to_json` wrote.

    Raises:
        ConfigError: the text is no report of this schema version.
    """
    try:
        return Report.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise ConfigError(f"not an opdcheck report: {where}: {first['msg']}") from error


def _standard(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _standard(member) for key, member in value.items()}
    if isinstance(value, list):
        return [_standard(member) for member in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
