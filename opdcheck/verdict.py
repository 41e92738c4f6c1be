"""Measurement + budget -> verdict. Pure: the same record gives the same verdict, anywhere and at any time.

Every check yields reasons, and each reason has an effect. The verdict is the strongest effect: any `reject` rejects;
otherwise any `inconclusive` leaves it undecided; only when nothing stands against it is the candidate admitted.

What a confidence sequence cannot see keeps a candidate from being admitted without rejecting it: parts of the candidate
that were not applied in the measurement (the numbers are then about something else), limits that were not measured, a
bound that holds for certain and lies above the limit, a mean that is above the limit once clipping is undone.

Several limits. Each limited mean has a gate of its own at level alpha, and the candidate is admitted only if every gate
admits. That is an intersection-union test: to admit wrongly, the gate of a limit that is exceeded must err, so the
error level alpha holds without a correction for their number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from opdcheck.budget import Budget, Change, TailLimits
from opdcheck.config import Decision, DType, Metric, Model, Rollout, Sampling, Source
from opdcheck.errors import BudgetInvalidError, ExitCode, UncertifiedError
from opdcheck.fingerprint import shorten
from opdcheck.measurement import Estimator, Measurement, SourceName
from opdcheck.stats.gate import MAX_CLIPPED_SHARE, Gate
from opdcheck.units import number, percent, plural, quantity

Outcome = Literal["admit", "reject", "inconclusive"]
Effect = Literal["pass", "note", "inconclusive", "reject"]

CLIP_MULTIPLE = 5.0
"""Prompt means above this multiple of the limit count as this multiple."""

EXIT_CODES: dict[Outcome, ExitCode] = {
    "admit": ExitCode.ADMITTED,
    "reject": ExitCode.REJECTED,
    "inconclusive": ExitCode.NO_VERDICT,
}


class Reason(Model):
    """One sentence of a verdict and what follows from it."""

    code: str
    """Stable name: total, heavy_tailed, other_total, source, source_unmeasured, tail, non_finite, clipped, ..."""
    text: str
    value: float | None = None
    limit: float | None = None
    effect: Effect
    """`pass`: a check that holds. `note`: to be known. The others keep the candidate out."""

    @property
    def ok(self) -> bool:
        return self.effect in ("pass", "note")


class Verdict(Model):
    """What was decided, and why."""

    decision: Outcome
    exit_code: int
    observed: bool
    """`--observe` turned the exit code into 0."""
    metric: Metric
    estimator: Estimator
    limit: float
    limit_of: Source | None = None
    """The source whose limit it is, where the budget limits the total by source."""
    mean: float
    """Over prompts, not clipped."""
    interval: tuple[float, float]
    """Anytime-valid confidence interval of the (clipped) mean at level 1 - alpha."""
    alpha: float
    prompts: int
    clipped: int
    """Prompts whose mean was clipped for the interval."""
    kernel_floor: float | None
    """The budget's kernel floor of this metric: the part of the mean that no candidate can avoid."""
    provenance: Literal["declared", "calibrated"]
    """Of the budget."""
    forgiven: list[Change]
    reasons: list[Reason]

    @property
    def against(self) -> list[Reason]:
        """The reasons that keep the candidate out, rejecting ones first."""
        return [r for r in self.reasons if r.effect == "reject"] + [
            r for r in self.reasons if r.effect == "inconclusive"
        ]


@dataclass(frozen=True)
class Target:
    """What a gate decides on."""

    metric: Metric
    limit: float
    of: Source | None = None
    """The source whose limit this is, where the budget has a limit of the total for each."""


def target(budget: Budget, decision: Decision, rollout: Rollout) -> Target:
    """The decision metric, and the limit that holds for the candidate's sources.

    The metric is the one chosen, else the budget's only one, else `tv`. Where the budget limits the total by source,
    the strictest limit among the candidate's sources holds: what it says of one was seen with that one at work. A
    source that the budget does not list is held to `total`, and so is a dtype of the rollout that it was not made with.

    Raises:
        BudgetInvalidError: the budget has no limit for that metric, could not certify one for a source, or was
            calibrated at other sampling.
    """
    _check_sampling(budget, rollout)
    limits = budget.limits.total
    metric = decision.metric or (next(iter(limits)) if len(limits) == 1 else "tv")
    if metric not in limits:
        raise BudgetInvalidError(
            f"budget {budget.name} has no limit for {metric}, only for {', '.join(limits)}",
            hint=f"Set `decision.metric: {next(iter(limits))}`, or make a budget that limits {metric}.",
        )
    return _strictest(budget, metric, rollout)


def _check_sampling(budget: Budget, rollout: Rollout) -> None:
    """The same mismatch costs something else where other tokens are sampled."""
    if budget.method is None:
        return
    calibrated, found = Sampling(temperature=budget.method.temperature), rollout.sampling
    if found.temperature == calibrated.temperature and not found.truncates:
        return
    different = [name for name in Sampling.model_fields if getattr(found, name) != getattr(calibrated, name)]
    listed = ", ".join(f"{name} {getattr(calibrated, name):g}" for name in different)
    given = ", ".join(f"{name} {getattr(found, name):g}" for name in different)
    raise BudgetInvalidError(
        f"budget {budget.name} was calibrated at {listed}, and this candidate samples at {given}",
        hint="Set `rollout.sampling` to what the training will use, and calibrate at that.",
    )


def _strictest(budget: Budget, metric: Metric, rollout: Rollout) -> Target:
    by_source = budget.limits.total_by_source
    found = [_of_source(budget, metric, source) for source in rollout.sources if source in by_source]
    if not found or len(found) < len(rollout.sources) or rollout.dtype not in _known_dtypes(budget):
        found.append(Target(metric, budget.limits.total[metric]))
    return min(found, key=lambda aim: aim.limit)


def _of_source(budget: Budget, metric: Metric, source: Source) -> Target:
    limits = budget.limits.total_by_source[source]
    if limits is None:
        raise UncertifiedError(
            f"budget {budget.name} has no limit for {source}: its calibration could certify none",
            hint="Calibrate again with more seeds or with lower levels of it, or leave it out of the candidate.",
        )
    if metric not in limits:
        return Target(metric, budget.limits.total[metric])
    return Target(metric, limits[metric], source)


def _known_dtypes(budget: Budget) -> set[DType]:
    """Compute dtypes of the rollout that the limits by source are about: those trained under, else the trainer's."""
    trained = {Rollout.model_validate(one.rollout).dtype for one in budget.evidence}
    return trained or {budget.environment.trainer_dtype}


def targets(budget: Budget, decision: Decision, rollout: Rollout) -> list[Target]:
    """Every limited total, each to be decided by a gate of its own; the decision metric first.

    Raises:
        BudgetInvalidError: as `target`.
    """
    aim = target(budget, decision, rollout)
    others = [metric for metric in budget.limits.total if metric != aim.metric]
    return [aim, *(_strictest(budget, metric, rollout) for metric in others)]


def new_gate(aim: Target, decision: Decision) -> Gate:
    """An empty gate for the target. Total variation cannot exceed 1, which makes its interval narrower."""
    return Gate(
        aim.limit,
        alpha=decision.alpha,
        min_prompts=decision.min_prompts,
        clip_multiple=CLIP_MULTIPLE,
        bound=1.0 if aim.metric == "tv" else None,
    )


def reach(
    measurement: Measurement,
    budget: Budget,
    decision: Decision,
    rollout: Rollout,
    *,
    accepted: Sequence[Change] = (),
    observe: bool = False,
) -> Verdict:
    """The verdict on a measurement.

    Args:
        rollout: the candidate's, whose sources decide which limits hold.
        accepted: fields whose change was forgiven (`budget.require_valid`).
        observe: exit code 0 also for reject and inconclusive.

    Raises:
        BudgetInvalidError: the budget has no limit for the decision metric.
    """
    aim = target(budget, decision, rollout)
    values = measurement.prompt_values[aim.metric]
    gate = new_gate(aim, decision)
    gate.update(values)
    mean = _mean(values)
    reasons = [
        *_total(gate, aim, mean, decision),
        *_non_finite(measurement, aim),
        *_not_applied(measurement),
        *_lower_bound(measurement, aim),
        *_clipped(gate, aim, mean),
        *_other_totals(measurement, targets(budget, decision, rollout)[1:], decision),
        *_tails(measurement, budget),
        *_sources(measurement, budget, aim, decision),
        *_unmeasured_limits(budget),
        *_notes(measurement, budget, accepted),
    ]
    outcome = _outcome(reasons)
    exit_code = EXIT_CODES[outcome]
    return Verdict(
        decision=outcome,
        exit_code=int(ExitCode.ADMITTED if observe else exit_code),
        observed=observe and exit_code != ExitCode.ADMITTED,
        metric=aim.metric,
        estimator=measurement.metrics[aim.metric].estimator,
        limit=aim.limit,
        limit_of=aim.of,
        mean=mean,
        interval=gate.interval,
        alpha=decision.alpha,
        prompts=gate.prompts,
        clipped=gate.clipped,
        kernel_floor=budget.floor.kernel.get(aim.metric) if budget.floor else None,
        provenance=budget.provenance,
        forgiven=list(accepted),
        reasons=reasons,
    )


def _mean(values: Sequence[float]) -> float:
    """Arithmetic mean; NaN of nothing."""
    return sum(values) / len(values) if values else math.nan


def _outcome(reasons: Sequence[Reason]) -> Outcome:
    effects = {reason.effect for reason in reasons}
    if "reject" in effects:
        return "reject"
    return "inconclusive" if "inconclusive" in effects else "admit"


# --- the checks: each yields the reasons it finds ------------------------------------------------------------------


def _total(gate: Gate, aim: Target, mean: float, decision: Decision) -> Iterator[Reason]:
    effect, finding = _finding(gate, aim, mean, decision)
    code = "heavy_tailed" if effect == "inconclusive" and _held_up_by_clipping(gate, mean) else "total"
    text = f"{_measured(gate, aim, mean, decision)}{finding}"
    yield Reason(code=code, text=text, value=mean, limit=aim.limit, effect=effect)


def _measured(gate: Gate, aim: Target, mean: float, decision: Decision) -> str:
    return f"{aim.metric} {quantity(aim.metric, mean)} ({_interval(gate, decision.alpha)})"


def _finding(gate: Gate, aim: Target, mean: float, decision: Decision) -> tuple[Effect, str]:
    """What a gate says about its limit, and the end of the sentence that says so."""
    limit = number(aim.limit) if aim.of is None else f"{number(aim.limit)} (that of {aim.of})"
    lower, upper = gate.interval
    if gate.state == "reject":
        return "reject", f" is above the limit {limit}"
    if gate.state == "admit" and mean <= aim.limit:
        return "pass", f" is within the limit {limit}"
    if gate.prompts < decision.min_prompts:
        needed = f"of the {decision.min_prompts} needed for any verdict"
        return "inconclusive", f": {plural(gate.prompts, 'prompt')} {needed}"
    if _held_up_by_clipping(gate, mean):
        return "inconclusive", (
            f": mean and interval lie below the limit {limit}, but {gate.clipped} of {plural(gate.prompts, 'prompt')} "
            f"lie above {number(CLIP_MULTIPLE)} times the limit, and with more than {percent(MAX_CLIPPED_SHARE)} of "
            "such prompts the interval says too little about the mean"
        )
    if lower <= aim.limit <= upper:
        return "inconclusive", f": the limit {limit} lies inside the interval after {plural(gate.prompts, 'prompt')}"
    return "inconclusive", f": mean and interval lie on different sides of the limit {limit}, as prompts were clipped"


def _held_up_by_clipping(gate: Gate, mean: float) -> bool:
    """Whether nothing but too many clipped prompts keeps the gate from admitting."""
    within = gate.interval[1] <= gate.limit and mean <= gate.limit
    return within and gate.state == "undecided" and gate.prompts >= gate.min_prompts and gate.heavy_tailed


def _interval(gate: Gate, alpha: float) -> str:
    lower, upper = gate.interval
    counted = f", prompts counted up to {number(gate.clip)}" if gate.clipped else ""
    return f"{number((1 - alpha) * 100)} % interval {number(lower)} to {number(upper)}{counted}"


def _non_finite(measurement: Measurement, aim: Target) -> Iterator[Reason]:
    count = measurement.non_finite_tokens
    if count:
        text = f"{plural(count, 'token')} with NaN or infinite log-probabilities; that is a defect, not a mismatch"
        yield Reason(code="non_finite", text=text, value=count, limit=0, effect="reject")
    prompts = sum(not math.isfinite(value) for value in measurement.prompt_values[aim.metric])
    if prompts:
        text = f"{aim.metric} is not finite on {plural(prompts, 'prompt')}"
        yield Reason(code="non_finite", text=text, value=prompts, limit=0, effect="reject")


def _not_applied(measurement: Measurement) -> Iterator[Reason]:
    for part in measurement.provenance:
        if part.how == "not applied":
            text = f"{part.part}: asked for, but not part of this measurement, so it is not what would run"
            yield Reason(code="not_applied", text=f"{text} ({part.detail})", effect="inconclusive")


def _lower_bound(measurement: Measurement, aim: Target) -> Iterator[Reason]:
    """An estimate below what holds for certain does not admit.

    No estimator gives a mere lower bound as the mean: `topk` is unbiased even where no sampled token fell outside the
    engine's top tokens and the estimate happens to equal the bound. So the bound itself is all there is to check.
    """
    summary = measurement.metrics[aim.metric]
    if summary.estimator == "topk" and summary.lower is not None and summary.lower > aim.limit:
        text = f"{aim.metric} is at least {number(summary.lower)} by the engine's top tokens alone, above the limit"
        yield Reason(code="lower_bound", text=text, value=summary.lower, limit=aim.limit, effect="inconclusive")


def _clipped(gate: Gate, aim: Target, mean: float) -> Iterator[Reason]:
    """Clipping lets a few very bad prompts count for less than they are; then the plain mean has to hold as well."""
    if not gate.clipped:
        return
    some = f"{plural(gate.clipped, 'prompt')} of {gate.prompts} above {number(CLIP_MULTIPLE)} times the limit"
    if mean <= aim.limit or gate.state == "reject":
        text = f"{some}: cut to that in the interval, counted in full in the mean"
        yield Reason(code="clipped", text=text, value=mean, limit=aim.limit, effect="note")
    else:
        text = f"{some}: counted in full, the mean {quantity(aim.metric, mean)} is not within the limit"
        yield Reason(code="clipped", text=text, value=mean, limit=aim.limit, effect="inconclusive")


def _other_totals(measurement: Measurement, others: Sequence[Target], decision: Decision) -> Iterator[Reason]:
    """The limited totals besides the decision metric, each through a gate of its own."""
    for aim in others:
        values = measurement.prompt_values.get(aim.metric)
        if not values:
            text = f"{aim.metric}: the budget limits it, and it was not measured"
            yield Reason(code="other_total", text=text, limit=aim.limit, effect="inconclusive")
            continue
        gate = new_gate(aim, decision)
        gate.update(values)
        mean = _mean(values)
        effect, finding = _finding(gate, aim, mean, decision)
        text = f"{_measured(gate, aim, mean, decision)}{finding}"
        yield Reason(code="other_total", text=text, value=mean, limit=aim.limit, effect=effect)


def _tails(measurement: Measurement, budget: Budget) -> Iterator[Reason]:
    for metric, limits in budget.limits.tails.items():
        summary = measurement.metrics.get(metric)
        for name in TailLimits.model_fields:
            limit = getattr(limits, name)
            if limit is None:
                continue
            if summary is None:
                text = f"{metric} {_tail_name(name)}: the budget limits it, and it was not measured"
                yield Reason(code="tail", text=text, limit=limit, effect="inconclusive")
                continue
            value = getattr(summary, name)
            fits = value <= limit  # false for NaN
            text = (
                f"{metric} {_tail_name(name)} {number(value)} is {'within' if fits else 'above'} its tail limit "
                f"{number(limit)}"
            )
            yield Reason(code="tail", text=text, value=value, limit=limit, effect="pass" if fits else "reject")


def _tail_name(name: str) -> str:
    return {"p99": "p99", "p99_9": "p99.9", "max": "maximum"}[name]


def _sources(measurement: Measurement, budget: Budget, aim: Target, decision: Decision) -> Iterator[Reason]:
    """Each limited source through a gate of its own, on the decision metric."""
    for source, limits in budget.limits.per_source.items():
        if aim.metric in limits:
            yield _source(measurement, budget, source, Target(aim.metric, limits[aim.metric]), decision)
        else:
            text = f"{source}: its limit is on {', '.join(limits)}, but {aim.metric} decides, so it was not checked"
            yield Reason(code="source_unmeasured", text=text, effect="inconclusive")


def _source(measurement: Measurement, budget: Budget, source: SourceName, aim: Target, decision: Decision) -> Reason:
    share = next((share for share in measurement.sources if share.source == source), None)
    if share is None:
        return _absent_source(measurement, budget, source, aim)
    gate = new_gate(aim, decision)
    gate.update(share.prompt_values)
    mean = _mean(share.prompt_values)
    effect: Effect
    if gate.state == "reject" or not math.isfinite(mean):
        effect, finding = "reject", "is above"
    elif gate.state == "admit" and mean <= aim.limit:
        effect, finding = "pass", "is within"
    else:
        effect, finding = "inconclusive", "does not decide against"
    shown = f"{source} alone: {aim.metric} {quantity(aim.metric, mean)} ({_interval(gate, decision.alpha)})"
    text = f"{shown} {finding} its limit {number(aim.limit)}"
    return Reason(code="source", text=text, value=mean, limit=aim.limit, effect=effect)


def _absent_source(measurement: Measurement, budget: Budget, source: SourceName, aim: Target) -> Reason:
    """No share: the candidate has no such source, or it was not measured. The kernel's is the budget's floor."""
    floor = budget.floor.kernel.get(aim.metric) if budget.floor else None
    limited = f"its limit {quantity(aim.metric, aim.limit)}"
    if source == "kernel" and floor is not None:
        fits = floor <= aim.limit
        text = f"kernel floor {number(floor)} is {'within' if fits else 'above'} {limited}"
        return Reason(code="source", text=text, value=floor, limit=aim.limit, effect="pass" if fits else "reject")
    if source == "kernel" or any(part.part == source for part in measurement.provenance):
        text = f"{source}: not measured alone, so {limited} was not checked"
        return Reason(code="source_unmeasured", text=text, limit=aim.limit, effect="inconclusive")
    text = f"{source}: not part of this candidate, so within {limited}"
    return Reason(code="source", text=text, value=0, limit=aim.limit, effect="pass")


def _unmeasured_limits(budget: Budget) -> Iterator[Reason]:
    limits = budget.limits
    if limits.per_layer:
        text = f"the budget limits {plural(len(limits.per_layer), 'layer')}, which this version does not measure"
        yield Reason(code="layer_unmeasured", text=text, effect="inconclusive")
    if limits.prefix_shift is not None:
        text = "the budget limits the prefix shift, which this version does not measure"
        yield Reason(code="prefix_shift_unmeasured", text=text, limit=limits.prefix_shift, effect="inconclusive")


def _notes(measurement: Measurement, budget: Budget, accepted: Sequence[Change]) -> Iterator[Reason]:
    for part in measurement.provenance:
        if part.how == "simulated":
            yield Reason(code="simulated", text=f"{part.part}: simulated ({part.detail})", effect="note")
    if budget.provenance == "declared":
        by = f" by {budget.declared_by}" if budget.declared_by else ""
        why = f" (reason given: {budget.reason})" if budget.reason else ""
        text = f"limit declared{by}, not calibrated: its cost in quality was not measured for this student{why}"
        yield Reason(code="declared", text=text, effect="note")
    if budget.method is not None and measurement.by_position:
        measured, calibrated = measurement.by_position[-1].stop, budget.method.max_completion_length
        if measured > calibrated:
            text = f"completions had up to {measured} tokens; the limit was calibrated on at most {calibrated}"
            yield Reason(code="longer", text=text, effect="note")
    for change in accepted:
        if change.differs:
            text = (
                f"forgiven by --accept-stale: {change.field} was {shorten(change.stored)}, is {shorten(change.found)}"
            )
        else:
            text = f"--accept-stale {change.field} was not needed: it has not changed"
        yield Reason(code="forgiven", text=text, effect="note")


def floor_share(verdict: Verdict) -> str | None:
    """The budget's kernel floor as a sentence; None where the budget has none."""
    floor, mean = verdict.kernel_floor, verdict.mean
    if floor is None:
        return None
    shown = f"Kernel floor {quantity(verdict.metric, floor)}"
    if floor < mean:
        return f"{shown}: {percent(floor / mean)} of the mean comes from the kernels alone."
    return f"{shown}: this candidate is not above it."
