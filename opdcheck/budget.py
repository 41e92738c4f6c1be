"""The budget file: how much mismatch one student takes, in one environment, and when that stops being valid.

A budget is YAML under version control. `opdcheck budget declare` writes one with the limits a team sets by hand;
calibration writes one with limits it measured. Nothing here imports torch.
"""

from __future__ import annotations

import difflib
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, ValidationError, model_validator

from opdcheck.calibration.records import Backtest, BudgetMethod, Evidence, Fitted
from opdcheck.config import DType, EngineName, Metric, Model, Source
from opdcheck.errors import BudgetInvalidError, ConfigError
from opdcheck.files import write_atomically
from opdcheck.fingerprint import ModelFingerprint, shorten
from opdcheck.kinds import BUDGET
from opdcheck.measurement import SourceName
from opdcheck.units import number, quantity

SMALLEST_LIMIT = 1e-12
"""Far below what float32 can tell from no mismatch at all; the interval's arithmetic fails at still smaller numbers."""


def _large_enough(limit: float) -> float:
    if limit < SMALLEST_LIMIT:
        raise ValueError(f"expected at least {SMALLEST_LIMIT:g}, found {limit!r}; no measurement tells so little")
    return limit


Positive = Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False), AfterValidator(_large_enough)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
TokenMetric = Literal["tv", "kl", "k1", "k3", "abs_dlogp", "token_mult_prob_error", "probs_diff"]


class Environment(Model):
    """What a measurement ran on. `opdcheck.environment` fills it in and says why each field is compared or not."""

    engine: EngineName
    torch: str | None
    transformers: str | None
    vllm: str | None = None
    compressed_tensors: str | None
    device: str
    """GPU name, or `cpu`."""
    trainer_dtype: DType
    python: str | None = None
    """Recorded, not compared."""
    cpu_capability: str | None = None
    """Widest instruction set that torch uses. Recorded, not compared."""


COMPARED_ENVIRONMENT = ("engine", "torch", "transformers", "vllm", "compressed_tensors", "device", "trainer_dtype")
COMPARED_MODEL = ("weights", "tokenizer", "chat_template")


class TailLimits(Model):
    """Limits on single tokens; values clipped for the confidence bound are guarded by them."""

    p99: Positive | None = None
    p99_9: Positive | None = None
    max: Positive | None = None


class Limits(Model):
    """Upper limits, each in its metric's unit: nats/token for kl, k3 and abs_dlogp, none for tv."""

    total: Annotated[dict[Metric, Positive], Field(min_length=1)]
    """Of the mean mismatch over tokens and prompts, all sources together."""
    total_by_source: dict[Source, dict[Metric, Positive] | None] = {}
    """The total's limit by what causes the mismatch, where a calibration found that it matters: a candidate is held to
    the strictest of its own. Null: for this one no limit could be certified."""
    per_source: dict[SourceName, dict[Metric, Positive]] = {}
    """Stricter limits for one source alone."""
    per_layer: dict[str, dict[Metric, Positive]] = {}
    """Stricter limits for sensitive layers, by module name."""
    prefix_shift: Positive | None = None
    """Of the shift in the training signal, nats/token."""
    tails: dict[TokenMetric, TailLimits] = {}


class Floor(Model):
    """Mean mismatch of the unperturbed student, per metric, in the metric's unit."""

    kernel: dict[Metric, NotNegative]
    """Same weights, same dtype, the other engine."""
    trainer_null: dict[Metric, NotNegative]
    """The trainer against itself with another batch shape: what no measurement can tell from zero."""
    prompts: Annotated[int, Field(ge=1)]
    tokens: Annotated[int, Field(ge=1)]


class Budget(Model):
    """How much mismatch one student takes from its rollout engine."""

    schema_version: Literal[1] = 1
    name: str
    provenance: Literal["declared", "calibrated"]
    """`declared`: set by a team. `calibrated`: measured by `opdcheck calibrate`."""
    created: str | None = None
    """ISO 8601 date and time of a declared budget. A calibrated one has none: the same trainings give the same file."""
    declared_by: str | None = None
    reason: str | None = None
    """Why a declared limit is what it is; shown with every verdict."""
    student: ModelFingerprint
    teacher: ModelFingerprint | None = None
    environment: Environment
    method: BudgetMethod | None = None
    """Of a calibrated budget: how the student was trained."""
    limits: Limits
    floor: Floor | None = None
    calibration: str | None = None
    """Calibration file that a calibrated budget came from, relative to this file."""
    fit: Fitted | None = None
    """How a calibrated limit came about."""
    evidence: list[Evidence] = []
    """The levels that were trained under, and what each cost."""
    backtest: Backtest | None = None
    """Verdicts on configurations that the calibration never saw, against full trainings."""

    @classmethod
    def checked(cls, **fields: Any) -> Self:
        """A budget from code, checked like one from a file.

        Raises:
            ConfigError: a field or a limit is wrong; the message names it.
        """
        try:
            budget = cls(**fields)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            message = first["msg"].removeprefix("Value error, ")
            raise ConfigError(f"budget: {where}: {message}" if where else f"budget: {message}") from error
        for key, message in budget.refusals():
            raise ConfigError(f"budget: {key}: {message}")
        return budget

    @model_validator(mode="after")
    def _created_is_a_date(self) -> Self:
        try:
            datetime.fromisoformat(self.created or "2026-01-01")
        except ValueError:
            raise ValueError(f"created: expected an ISO 8601 date and time, found {self.created!r}") from None
        return self

    def refusals(self) -> list[tuple[str, str]]:
        """Limits that cannot be decided on or that nothing stands behind, as (key, what is wrong)."""
        null = self.floor.trainer_null if self.floor else {}
        found: list[tuple[str, str]] = []
        if self.provenance == "calibrated":
            found += [
                (key, f"required by `provenance: calibrated` ({what}); a limit set by hand is `provenance: declared`")
                for key, value, what in (
                    ("method", self.method, "how the student was trained"),
                    ("fit", self.fit, "how the limit came about"),
                )
                if value is None
            ]
        for where, metric, limit in limit_list(self.limits):
            if metric == "tv" and limit >= 1:
                found.append((f"limits.{where}", f"total variation is at most 1, so {number(limit)} limits nothing"))
            if where.startswith("per_source.") and metric == "abs_dlogp":
                message = "abs_dlogp of one source alone is not measured; limit its tv, kl or k3"
                found.append((f"limits.{where}", message))
            if limit < null.get(metric, 0):
                message = (
                    f"{quantity(metric, limit)} is below what the trainer differs from itself with another batch "
                    f"shape, {quantity(metric, null[metric])}: no measurement could tell"
                )
                found.append((f"limits.{where}", message))
        return found

    def warnings(self) -> list[str]:
        """What is allowed and still questionable, as sentences: limits that the kernels alone exceed."""
        kernel = self.floor.kernel if self.floor else {}
        found = [
            f"limits.{where}: {quantity(metric, limit)} is below the kernel floor {quantity(metric, kernel[metric])}: "
            "even the unperturbed student would be rejected"
            for where, metric, limit in limit_list(self.limits)
            if where.startswith(("total", "per_source.kernel")) and limit < kernel.get(metric, 0)
        ]
        if self.floor is None:
            found.append("floor: not measured, so a limit below it would go unnoticed")
        return found


def limit_list(limits: Limits) -> list[tuple[str, Metric, float]]:
    """Every limit on a mean as (key below `limits`, metric, value)."""
    found: list[tuple[str, Metric, float]] = [
        (f"total.{metric}", metric, value) for metric, value in limits.total.items()
    ]
    for group, members in (
        ("total_by_source", limits.total_by_source),
        ("per_source", limits.per_source),
        ("per_layer", limits.per_layer),
    ):
        for name, by_metric in members.items():
            found += [(f"{group}.{name}.{metric}", metric, value) for metric, value in (by_metric or {}).items()]
    return found


# --- files ---------------------------------------------------------------------------------------------------------


def load_budget(path: Path) -> Budget:
    """Reads a budget file.

    Raises:
        ConfigError: no such file, or something in it is wrong; names file, line and key.
    """
    from opdcheck.yamlfile import load_located

    located = load_located(path, Budget, BUDGET)
    for key, message in located.value.refusals():
        raise located.error(key, message)
    return located.value


def write_budget(path: Path, budget: Budget) -> None:
    """Writes a budget file atomically.

    Raises:
        OSError: the folder cannot be written to.
    """
    from opdcheck.yamlfile import dump

    write_atomically(path, dump(budget))


# --- validity ------------------------------------------------------------------------------------------------------


class Change(Model):
    """One fingerprinted field, as the budget stores it and as it was found now."""

    field: str
    """Such as `student.weights` or `environment.vllm`."""
    stored: str | None
    found: str | None

    @property
    def differs(self) -> bool:
        return self.stored != self.found

    def __str__(self) -> str:
        return f"{self.field}: {shorten(self.stored)} -> {shorten(self.found)}"


def comparisons(
    budget: Budget, student: ModelFingerprint, teacher: ModelFingerprint | None, environment: Environment
) -> list[Change]:
    """Every fingerprinted field, whether it differs or not."""
    fields = _model_fields("student", budget.student, student)
    if budget.teacher is not None and teacher is not None:
        fields += _model_fields("teacher", budget.teacher, teacher)
    else:  # one side has no teacher: that is one difference, not three
        fields.append(Change(field="teacher", stored=_weights(budget.teacher), found=_weights(teacher)))
    fields += [
        Change(
            field=f"environment.{name}",
            stored=getattr(budget.environment, name),
            found=getattr(environment, name),
        )
        for name in COMPARED_ENVIRONMENT
    ]
    return fields


def _model_fields(side: str, stored: ModelFingerprint, found: ModelFingerprint) -> list[Change]:
    return [
        Change(field=f"{side}.{name}", stored=getattr(stored, name), found=getattr(found, name))
        for name in COMPARED_MODEL
    ]


def _weights(model: ModelFingerprint | None) -> str | None:
    return None if model is None else model.weights


def changes(
    budget: Budget, student: ModelFingerprint, teacher: ModelFingerprint | None, environment: Environment
) -> list[Change]:
    """The fingerprinted fields that differ. Any one of them makes the budget invalid."""
    return [field for field in comparisons(budget, student, teacher, environment) if field.differs]


def require_valid(
    budget: Budget,
    student: ModelFingerprint,
    teacher: ModelFingerprint | None,
    environment: Environment,
    *,
    accept_stale: str | None = None,
) -> list[Change]:
    """Checks that the budget belongs to this student, teacher and environment.

    Args:
        accept_stale: the one field to forgive.

    Returns:
        The forgiven field, for the verdict; empty without `accept_stale`. A forgiven field that has not changed is
        there too, with `differs` false.

    Raises:
        BudgetInvalidError: something else changed; lists it, stored -> found.
        ConfigError: `accept_stale` names no fingerprinted field.
    """
    compared = comparisons(budget, student, teacher, environment)
    forgiven = [] if accept_stale is None else [_named(accept_stale, compared)]
    changed = [field for field in compared if field.differs and field not in forgiven]
    if changed:
        listed = "".join(f"\n  {change}" for change in changed)
        raise BudgetInvalidError(
            f"budget {budget.name} is not valid here: it was made for something else (stored -> found)" + listed,
            hint=f"`--accept-stale {changed[0].field}` forgives that one field, and the verdict will say so; "
            "otherwise make a budget for what is there now: `opdcheck budget declare`."
            if len(changed) == 1 and accept_stale is None
            else "`--accept-stale FIELD` forgives exactly one field; here make a budget for what is there now: "
            "`opdcheck budget declare`.",
        )
    return forgiven


def _named(field: str, compared: list[Change]) -> Change:
    by_name = {change.field: change for change in compared}
    if field in by_name:
        return by_name[field]
    near = difflib.get_close_matches(field, by_name, n=1, cutoff=0.5)
    raise ConfigError(
        f"--accept-stale: {field} is not a fingerprinted field" + (f"; did you mean {near[0]}?" if near else ""),
        hint="One of: " + ", ".join(by_name),
    )


def no_budget_named(candidate_file: str | Path) -> BudgetInvalidError:
    """The error (exit code 3) for a candidate without a budget. A `budget:` path to no file is a ConfigError."""
    return BudgetInvalidError(
        f"{candidate_file} names no budget, so there is nothing to admit it against",
        hint="Set `budget:` in the candidate or pass --budget; `opdcheck budget declare` makes one.",
    )
