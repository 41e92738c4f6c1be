"""`admit`: candidate file + budget -> report. The order of the steps is the order in which they can fail cheaply."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from opdcheck import __version__, preflight
from opdcheck.budget import Budget, Environment, load_budget, no_budget_named, require_valid
from opdcheck.config import Candidate, load_candidate, resolve
from opdcheck.environment import current_environment
from opdcheck.fingerprint import ModelFingerprint, fingerprint_model, weights_hash
from opdcheck.measure import rounds, summarize_rounds
from opdcheck.measurement import Measurement, SourceShare
from opdcheck.progress import Progress, Silent
from opdcheck.report.record import Report, budget_summary
from opdcheck.rollouts import Rollout
from opdcheck.rounds import Round, RoundStore
from opdcheck.session import Session
from opdcheck.splits import load_split, save_split, split_file
from opdcheck.stats.gate import Gate
from opdcheck.verdict import Target, new_gate, reach, target
from opdcheck.yamlfile import Located

SPLIT_BYTES = 2**30
"""Of the trainer's hidden states, which the split by source keeps for all its passes."""


def admit(
    candidate_file: str | Path,
    *,
    overrides: Mapping[str, Any] | None = None,
    sources: bool = False,
    accept_stale: str | None = None,
    observe: bool = False,
    fresh: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Measures a candidate prompt by prompt until the verdict is known, or its prompts are used up.

    Args:
        candidate_file: YAML file of `opdcheck.config.Candidate`.
        overrides: dotted keys of the candidate that a flag or variable sets, e.g. `{"decision.alpha": 0.1}`.
        sources: split the mismatch by source even if the candidate is admitted; a reject is always split.
        accept_stale: the one fingerprint field whose change is forgiven.
        observe: the report's exit code is 0 for reject and no verdict.
        fresh: do not read measured rounds from the cache.

    Raises:
        ConfigError: the candidate file is wrong, or does not fit model or engine.
        BudgetInvalidError: no budget, or one that belongs to something else.
        EngineError: the engine or the model failed.
    """
    progress = progress or Silent()
    started = time.monotonic()
    located = load_candidate(Path(candidate_file), overrides)
    candidate, base = located.value, located.path.parent
    progress.stage("checking candidate and budget")
    budget, budget_path = _load_budget(located)
    aim = target(budget, candidate.decision)
    subject = identify(candidate, base)
    accepted = require_valid(budget, subject.student, subject.teacher, subject.environment, accept_stale=accept_stale)
    preflight.check(located, base)

    with Session(candidate, base, progress=progress) as session:
        gathered = _gather(session, aim, subject.key, fresh=fresh, progress=progress)
        measurement = gathered.summary()
        verdict = reach(measurement, budget, candidate.decision, accepted=accepted, observe=observe)
        if sources or verdict.decision == "reject" or budget.limits.per_source:
            measurement = with_sources(
                session,
                measurement,
                gathered.rounds,
                key=subject.key,
                kernel_tv=budget.floor.kernel.get("tv", 0.0) if budget.floor else 0.0,
                metric=aim.metric,
                fresh=fresh,
            )
            verdict = reach(measurement, budget, candidate.decision, accepted=accepted, observe=observe)
    return Report(
        opdcheck_version=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        candidate_file=str(candidate_file),
        candidate=candidate,
        budget=budget_summary(budget, budget_path),
        student=subject.student,
        teacher=subject.teacher,
        environment=subject.environment,
        measurement=measurement,
        verdict=verdict,
        seconds=time.monotonic() - started,
    )


@dataclass(frozen=True)
class Subject:
    """Whose mismatch is measured, and where."""

    student: ModelFingerprint
    teacher: ModelFingerprint | None
    environment: Environment
    key: dict[str, Any]
    """Everything besides the prompts that a measured number depends on."""


def identify(candidate: Candidate, base: Path) -> Subject:
    """Fingerprints of the models that a candidate names, and the environment they run in."""
    from opdcheck.models import resolve_device

    student = fingerprint_model(candidate.student, base)
    teacher = fingerprint_model(candidate.teacher, base) if candidate.teacher else None
    device = resolve_device(candidate.student.device)
    environment = current_environment(candidate.rollout.engine, device, trainer_dtype=candidate.student.dtype)
    rollout, workload = candidate.rollout, candidate.workload
    stale = rollout.staleness.as_model() if rollout.staleness else None
    others = {
        "rollout.model": rollout.model and weights_hash(rollout.model, base),
        "staleness": stale and weights_hash(stale, base),
    }
    key = {
        "opdcheck": __version__,
        "student": student.model_dump(),
        "others": others,
        "environment": environment.model_dump(),
        "device": device,
        "rollout": rollout.model_dump(mode="json", exclude={"model", "staleness"}),
        "samples_per_prompt": workload.samples_per_prompt,
        "max_completion_length": workload.max_completion_length,
        "seed": workload.seed,
    }
    return Subject(student, teacher, environment, key)


def verify(candidate_file: str | Path, *, budget: str | Path | None = None) -> tuple[Budget, Subject]:
    """A candidate's budget, and the student and environment that it would have to belong to.

    Raises:
        ConfigError: the candidate or the budget file is wrong.
        BudgetInvalidError: the candidate names no budget.
    """
    located = load_candidate(Path(candidate_file), {"budget": None if budget is None else Path(budget)})
    return _load_budget(located)[0], identify(located.value, located.path.parent)


def _load_budget(located: Located[Candidate]) -> tuple[Budget, Path]:
    if located.value.budget is None:
        raise no_budget_named(located.path)
    path = resolve(located.value.budget, located.path.parent)
    return load_budget(path), path


@dataclass
class _Gathered:
    rounds: list[Round] = field(default_factory=list)
    all_cached: bool = True

    def note(self, cached: bool) -> None:
        self.all_cached = self.all_cached and cached

    def summary(self) -> Measurement:
        return summarize_rounds(self.rounds, cached=self.all_cached)


def _gather(session: Session, aim: Target, key: Mapping[str, Any], *, fresh: bool, progress: Progress) -> _Gathered:
    """Measures rounds until the gate knows, looking after each."""
    decision = session.candidate.decision
    max_prompts = min(decision.max_prompts or len(session.prompts), len(session.prompts))
    gate: Gate = new_gate(aim, decision)
    gathered = _Gathered()
    for measured in rounds(
        session, key=key, max_prompts=max_prompts, store=RoundStore(), fresh=fresh, on_cached=gathered.note
    ):
        gathered.rounds.append(measured)
        gate.update(_prompt_values(measured, aim.metric))
        progress.look(gate, metric=aim.metric, max_prompts=max_prompts)
        if gate.state != "undecided":
            break
    return gathered


def _prompt_values(measured: Round, metric: str) -> list[float]:
    from opdcheck.mismatch.aggregate import summarize

    return summarize(measured.by_prompt()).prompt_values[metric]


def with_sources(
    session: Session,
    measurement: Measurement,
    measured: Sequence[Round],
    *,
    key: Mapping[str, Any],
    kernel_tv: float,
    metric: str,
    fresh: bool = False,
) -> Measurement:
    """The measurement with its split by source and what the sources, one by one, do not explain.

    Args:
        key: what the numbers depend on besides prompts and tokens.
        kernel_tv: the budget's kernel floor, which no perturbed student reproduces.
        metric: decision metric, for the per-prompt values of each source.
        fresh: do not read a stored split.
    """
    rollouts = _within_memory(session, [rollout for one in measured for rollout in one.rollouts])
    file = split_file(key, rollouts, metric)
    shares = None if fresh else load_split(file)
    if shares is None:
        shares = _split(session, rollouts, metric)
        save_split(file, shares)
    prompts = len({rollout.prompt.index for rollout in rollouts})
    total = math.fsum(measurement.prompt_values["tv"][:prompts]) / prompts
    explained = kernel_tv + sum(share.tv for share in shares)
    return measurement.model_copy(
        update={"sources": shares, "sources_prompts": prompts, "left_over": total - explained}
    )


def _split(session: Session, rollouts: Sequence[Rollout], metric: str) -> list[SourceShare]:
    from opdcheck.sources import split

    session.close_engine()  # its memory is needed for the perturbed students
    session.progress.stage("splitting the mismatch by source")
    return split(
        session.candidate,
        session.base,
        rollouts,
        session.scorer,
        session.trainer_hidden(rollouts),
        metric=metric,
        calibration_ids=session.calibration_ids,
        progress=session.progress.stage,
    )


def _within_memory(session: Session, rollouts: Sequence[Rollout]) -> list[Rollout]:
    """The first prompts' rollouts, so many that the trainer's hidden states on them stay within `SPLIT_BYTES`."""
    from opdcheck.models import hidden_bytes

    per_token = hidden_bytes(session.candidate.student, session.base)
    kept: list[Rollout] = []
    tokens = 0
    for rollout in rollouts:
        tokens += len(rollout)
        if kept and rollout.prompt != kept[-1].prompt and tokens * per_token > SPLIT_BYTES:
            break
        kept.append(rollout)
    return kept
