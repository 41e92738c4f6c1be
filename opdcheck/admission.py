"""`admit`: candidate file + budget -> report. The order of the steps is the order in which they can fail cheaply."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, assert_never

from opdcheck import __version__, preflight
from opdcheck.budget import Budget, Environment, load_budget, no_budget_named, require_valid
from opdcheck.config import Candidate, EngineName, load_candidate, resolve
from opdcheck.environment import current_environment
from opdcheck.errors import ConfigError
from opdcheck.fingerprint import ModelFingerprint, fingerprint_model, weights_hash
from opdcheck.gathering import Gathering
from opdcheck.measurement import Measurement, SourceShare
from opdcheck.progress import Progress, Silent
from opdcheck.report.record import Report, budget_summary
from opdcheck.rollouts import Rollout
from opdcheck.rounds import Round
from opdcheck.session import Session
from opdcheck.splits import load_split, save_split, split_file
from opdcheck.text import replaced
from opdcheck.verdict import Verdict, reach, targets
from opdcheck.yamlfile import Located, load_located

SPLIT_BYTES = 2**30
"""Of the trainer's hidden states, which the split by source keeps for all its passes."""


def admit(
    candidate_file: str | Path,
    *,
    overrides: Mapping[str, Any] | None = None,
    flags: Mapping[str, str] | None = None,
    sources: bool | None = None,
    accept_stale: str | None = None,
    observe: bool = False,
    fresh: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Measures a candidate prompt by prompt until the verdict is known, or its prompts are used up.

    Args:
        candidate_file: YAML file of `opdcheck.config.Candidate`.
        overrides: dotted keys of the candidate that a flag or variable sets, e.g. `{"decision.alpha": 0.1}`.
        flags: what the user wrote for an overridden key, for messages; default `--alpha` for `decision.alpha`.
        sources: split the mismatch by source. True: also if the candidate is admitted. False: only if the budget limits
            sources. Default: a reject is split.
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
    located = load_candidate(Path(candidate_file), overrides, flags=flags)
    candidate, base = located.value, located.path.parent
    progress.stage("checking candidate and budget")
    budget, budget_path = _load_budget(located)
    targets(budget, candidate.decision, candidate.rollout)  # before anything is loaded: is there a limit at all?
    with located.pointing():
        subject = identify(candidate, base)
    accepted = require_valid(budget, subject.student, subject.teacher, subject.environment, accept_stale=accept_stale)
    preflight.check_prompts(located, base)
    preflight.check(located, base)

    judge = partial(
        reach, budget=budget, decision=candidate.decision, rollout=candidate.rollout, accepted=accepted, observe=observe
    )
    with located.pointing():
        measured, measured_subject = _with_steps_taken(candidate, base, budget, subject, progress)
        with Session(measured, base, progress=progress) as session:
            measurement, verdict = _measure(session, budget, measured_subject, judge, sources=sources, fresh=fresh)
    return Report(
        opdcheck_version=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        candidate_file=replaced(str(candidate_file)),
        candidate=candidate,
        budget=budget_summary(budget, budget_path),
        student=subject.student,
        teacher=subject.teacher,
        environment=subject.environment,
        measurement=measurement,
        verdict=verdict,
        seconds=time.monotonic() - started,
    )


def files_of(candidate_file: Path, budget: Path | None = None) -> dict[str, Path]:
    """What `admit` reads, by the name to call it: no report may be written there.

    Args:
        budget: instead of the one that the candidate names.

    Returns:
        Less where the candidate cannot be read: what is wrong with it is not told here.
    """
    files = {"the candidate": candidate_file}
    if budget is not None:
        files["the budget"] = budget
    try:
        candidate = load_located(candidate_file, Candidate).value
    except ConfigError:
        return files
    base = candidate_file.parent
    if candidate.budget is not None:
        files.setdefault("the budget", resolve(candidate.budget, base))
    return {**files, "the prompts": resolve(candidate.workload.prompts, base)}


@dataclass(frozen=True)
class Subject:
    """Whose mismatch is measured, and where."""

    student: ModelFingerprint
    teacher: ModelFingerprint | None
    environment: Environment
    key: dict[str, Any]
    """Everything besides the prompts that a measured number depends on; see `measurement_key`."""


def identify(candidate: Candidate, base: Path) -> Subject:
    """Fingerprints of the models that a candidate names, and the environment they run in.

    Raises:
        ConfigError: vLLM is asked for and not installed; a model or the device is not there.
        EngineError: the hub could not be reached.
    """
    from opdcheck.models import end_token_ids, resolve_device

    variables = _number_variables(candidate.rollout.engine)
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
        "variables": variables,
        "end_token_ids": sorted(end_token_ids(candidate.student, base)),  # no fingerprint covers generation_config.json
        "rollout": rollout.model_dump(mode="json", exclude={"model", "staleness"}),
        "samples_per_prompt": workload.samples_per_prompt,
        "max_completion_length": workload.max_completion_length,
        "seed": workload.seed,
    }
    return Subject(student, teacher, environment, key)


def _number_variables(engine: EngineName) -> dict[str, str]:
    """The environment variables that an engine's numbers may depend on.

    Raises:
        ConfigError: the engine is not installed.
    """
    match engine:
        case "vllm":
            from opdcheck.engines.vllm_support import number_variables, require

            require()
            return number_variables()
        case "transformers":
            return {}
        case _:
            assert_never(engine)


def measurement_key(subject: Subject, session: Session) -> dict[str, Any]:
    """The subject's key, with what the session's prompts put into every number: static scales are set from the first.

    Tokenizes the prompts.
    """
    if session.candidate.rollout.quantization is None:
        return subject.key
    return {**subject.key, "calibration": session.calibration_ids}


def verify(
    candidate_file: str | Path, *, budget: str | Path | None = None, flags: Mapping[str, str] | None = None
) -> tuple[Budget, Subject]:
    """A candidate's budget, and the student and environment that it would have to belong to.

    Args:
        budget: instead of the one that the candidate names.
        flags: as for `admit`.

    Raises:
        ConfigError: the candidate or the budget file is wrong.
        BudgetInvalidError: the candidate names no budget, or one without a limit for such a candidate.
        EngineError: the hub could not be reached.
    """
    overrides = {"budget": None if budget is None else Path(budget)}
    located = load_candidate(Path(candidate_file), overrides, flags=flags)
    stored = _load_budget(located)[0]
    targets(stored, located.value.decision, located.value.rollout)
    with located.pointing():
        return stored, identify(located.value, located.path.parent)


def _load_budget(located: Located[Candidate]) -> tuple[Budget, Path]:
    if located.value.budget is None:
        raise no_budget_named(located.path)
    path = resolve(located.value.budget, located.path.parent)
    return load_budget(path), path


def _with_steps_taken(
    candidate: Candidate, base: Path, budget: Budget, subject: Subject, progress: Progress
) -> tuple[Candidate, Subject]:
    """Where the candidate gives a lag and no older weights: the trainer is the student some real steps on.

    Raises:
        ConfigError: the budget has no method settings to take steps with.
    """
    staleness = candidate.rollout.staleness
    if staleness is None or staleness.checkpoint is not None:
        return candidate, subject
    if budget.method is None:
        raise ConfigError(
            f"rollout.staleness.lag: budget {budget.name} was declared and has no learning rate and batch size to take "
            f"{staleness.lag} optimizer steps with",
            hint="Use a calibrated budget (`opdcheck calibrate`), or name older weights as "
            "`rollout.staleness.checkpoint`.",
        )
    if budget.method.kind == "rl":
        raise ConfigError(
            f"rollout.staleness.lag: budget {budget.name} is one of `rl`, whose steps need a verifier that a candidate "
            "does not have",
            hint="Name older weights as `rollout.staleness.checkpoint`.",
        )
    from opdcheck.calibration.ahead import with_steps_taken

    ahead = with_steps_taken(candidate, base, budget.method, progress=progress)
    return ahead, identify(ahead, base)


def _measure(
    session: Session,
    budget: Budget,
    subject: Subject,
    judge: Callable[[Measurement], Verdict],
    *,
    sources: bool | None,
    fresh: bool,
) -> tuple[Measurement, Verdict]:
    """Measures until every limit is decided or the prompts are used up; splits by source where that is asked for."""
    key = measurement_key(subject, session)
    aims = targets(budget, session.candidate.decision, session.candidate.rollout)
    gathering = Gathering(session, aims, key, fresh=fresh, progress=session.progress)
    gathering.until_decided()
    measurement = gathering.summary()
    verdict = judge(measurement)
    wanted = sources or (sources is None and verdict.decision == "reject")
    if not (wanted or budget.limits.per_source):
        return measurement, verdict
    while True:
        measurement = with_sources(
            session,
            gathering.summary(),
            gathering.rounds,
            key=key,
            kernel_tv=budget.floor.kernel.get("tv", 0.0) if budget.floor else 0.0,
            metric=aims[0].metric,
            fresh=fresh,
        )
        verdict = judge(measurement)
        if not (_more_would_decide(measurement, verdict) and gathering.double()):
            return measurement, verdict


def _more_would_decide(measurement: Measurement, verdict: Verdict) -> bool:
    """Whether all that is open is a limited source, and the split sees every prompt: else more of them are no help."""
    only_sources = verdict.decision == "inconclusive" and {reason.code for reason in verdict.against} == {"source"}
    return only_sources and measurement.sources_prompts == measurement.prompts


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
    from opdcheck.sources import not_simulated

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
        update={
            "sources": shares,
            "sources_prompts": prompts,
            "sources_notes": not_simulated(session.candidate),
            "left_over": total - explained,
        }
    )


def _split(session: Session, rollouts: Sequence[Rollout], metric: str) -> list[SourceShare]:
    from opdcheck.sources import split

    session.close_engine()  # its memory is needed for the perturbed students
    scorer = session.scorer  # after cached rounds the trainer is loaded only here, which is a stage of its own
    session.progress.stage("splitting the mismatch by source")
    return split(
        session.candidate,
        session.base,
        rollouts,
        scorer,
        session.trainer_hidden(rollouts),
        metric=metric,
        calibration_ids=session.calibration_ids,
        progress=session.progress.stage,
    )


def _within_memory(session: Session, rollouts: Sequence[Rollout]) -> list[Rollout]:
    """The first prompts' rollouts, so many that the trainer's hidden states on them stay within `SPLIT_BYTES`.

    Prompts are whole, with all their samples, and the first is kept however long it is.
    """
    from opdcheck.models import hidden_bytes

    per_token = hidden_bytes(session.candidate.student, session.base)
    kept: list[Rollout] = []
    tokens = 0
    for _, samples in groupby(rollouts, key=lambda rollout: rollout.prompt.index):
        of_prompt = list(samples)
        tokens += sum(map(len, of_prompt))
        if kept and tokens * per_token > SPLIT_BYTES:
            break
        kept += of_prompt
    return kept
