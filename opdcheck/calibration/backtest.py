"""`backtest`: does the gate say what a full training shows, on configurations that the calibration never saw?

A training shows a configuration harmless by the test that certifies a calibration's levels: the upper confidence bound
of its loss is within the margin. That is what an admission promises, so gate and training are asked the same question.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from opdcheck.admission import admit
from opdcheck.budget import Budget, load_budget
from opdcheck.calibration.ahead import rollouts_to_know
from opdcheck.calibration.calibrator import Calibrator
from opdcheck.calibration.file import Calibration, load_calibration
from opdcheck.calibration.ladder import Level
from opdcheck.calibration.records import Backtest, BacktestRow, Fitted
from opdcheck.config import Candidate, load_candidate, resolve
from opdcheck.errors import ConfigError, UncertifiedError
from opdcheck.progress import Progress, Silent
from opdcheck.stats.noninferiority import fixed_sequence
from opdcheck.verdict import Outcome, target
from opdcheck.yamlfile import Located

DEFAULT_SEEDS = 5


@dataclass(frozen=True)
class _HeldOut:
    """One configuration file, read and checked."""

    path: Path
    candidate: Candidate


def backtest(
    budget_file: str | Path,
    configs: str | Path,
    *,
    seeds: int = DEFAULT_SEEDS,
    calibration_file: str | Path | None = None,
    jobs: int = 1,
    progress: Progress | None = None,
) -> Backtest:
    """Asks the gate about every configuration of a folder, and trains fully under each.

    Args:
        budget_file: a calibrated budget.
        configs: folder of candidate files (`*.yaml`).
        seeds: trainings per configuration; other seeds than the calibration's.
        calibration_file: default: the one that the budget names.
        jobs: how many trainings at a time, each in a process of its own.

    Raises:
        ConfigError: the budget was declared, or its calibration file has changed since; the folder holds no candidates,
            or one is for another student, teacher or prompts than the calibration's, or cannot be trained under.
        BudgetInvalidError: the budget does not hold for one of them.
        EngineError: a measurement or a training failed; finished ones are kept.
    """
    progress = progress or Silent()
    budget_path = Path(budget_file)
    budget = load_budget(budget_path)
    fit = _fit_of(budget, budget_path)
    located = load_calibration(_calibration_path(budget, budget_path, calibration_file))
    held_out = _load_configs(Path(configs), budget_path)
    _check_same_calibration(budget, fit, located)
    _check_same_subject(held_out, located)
    fresh = _with_other_seeds(located, budget, seeds)
    levels = [Level(one.path.stem, "mixture", one.candidate.rollout) for one in held_out]
    calibrator = Calibrator(fresh, progress, instead_of_ladder=levels, jobs=jobs)
    answers = [_ask(one, budget, budget_path, progress) for one in held_out]
    losses = calibrator.losses(calibrator.trainings())
    method = located.value.method
    rows = [_row(one, answer, losses[one.path.stem], fit) for one, answer in zip(held_out, answers, strict=True)]
    asked = sum(answer.completions for answer in answers)
    stepped = sum(rollouts_to_know(method, level.lag) for level in levels)
    return Backtest(
        margin=fit.total.margin,
        alpha=fit.alpha,
        quality=fit.quality,
        seeds=fresh.value.seeds,
        gate_share=(asked + stepped) / (method.batch_size * method.steps * seeds * len(levels)),
        rows=rows,
    )


@dataclass(frozen=True)
class _Answer:
    """What the gate said of one configuration, and from how much."""

    verdict: Outcome
    limit: float | None = None
    mismatch: float | None = None
    prompts: int = 0
    completions: int = 0


def _ask(held_out: _HeldOut, budget: Budget, budget_path: Path, progress: Progress) -> _Answer:
    progress.stage(f"asking the gate: {held_out.path.name}")
    try:
        target(budget, held_out.candidate.decision, held_out.candidate.rollout)
    except UncertifiedError:  # no limit could be certified for one of its sources
        return _Answer("inconclusive")
    report = admit(held_out.path, overrides={"budget": budget_path}, sources=False, progress=progress)
    measurement, verdict = report.measurement, report.verdict
    return _Answer(verdict.decision, verdict.limit, verdict.mean, measurement.prompts, measurement.completions)


def _row(held_out: _HeldOut, answer: _Answer, losses: Sequence[float], fit: Fitted) -> BacktestRow:
    (test,) = fixed_sequence([np.asarray(losses)], fit.total.margin, fit.alpha)
    return BacktestRow(
        name=held_out.path.stem,
        rollout=held_out.candidate.rollout.model_dump(mode="json", exclude_defaults=True),
        limit=answer.limit,
        mismatch=answer.mismatch,
        verdict=answer.verdict,
        prompts=answer.prompts,
        losses=list(losses),
        mean=test.mean,
        upper=test.upper,
        passed=test.passed,
    )


def _fit_of(budget: Budget, path: Path) -> Fitted:
    if budget.fit is None:
        raise ConfigError(
            f"{path}: budget {budget.name} was declared, so there are no trainings to test it against",
            hint="`opdcheck calibrate` makes a budget that can be backtested.",
        )
    return budget.fit


def _calibration_path(budget: Budget, budget_path: Path, given: str | Path | None) -> Path:
    if given is not None:
        return Path(given)
    if budget.calibration is None:
        raise ConfigError(f"{budget_path}: the budget names no calibration file", hint="Pass --calibration.")
    return resolve(budget.calibration, budget_path.parent)


def _load_configs(folder: Path, budget: Path) -> list[_HeldOut]:
    if not folder.is_dir():
        raise ConfigError(f"{folder}: expected a folder of candidate files")
    files = sorted(file for file in folder.iterdir() if file.suffix in (".yaml", ".yml"))
    if not files:
        raise ConfigError(f"{folder}: no candidate files (*.yaml) in this folder")
    return [_HeldOut(file, load_candidate(file, {"budget": budget}).value) for file in files]


def _check_same_calibration(budget: Budget, fit: Fitted, located: Located[Calibration]) -> None:
    """The trainings to come must be of the kind that the budget's limit came from."""
    calibration, method = located.value, budget.method
    now = {
        **calibration.method.model_dump(),
        "temperature": calibration.rollout.sampling.temperature,
        "max_completion_length": calibration.workload.max_completion_length,
    }
    then = {} if method is None else method.model_dump()
    changed = [f"{name} {then.get(name)} -> {value}" for name, value in now.items() if then.get(name) != value]
    if calibration.quality != fit.quality:
        changed.append(f"quality {fit.quality} -> {calibration.quality}")
    if changed:
        raise ConfigError(
            f"{located.path}: changed since budget {budget.name} was calibrated: {', '.join(changed)}",
            hint="Calibrate again, or pass the file that the budget was calibrated with as --calibration.",
        )


def _with_other_seeds(located: Located[Calibration], budget: Budget, count: int) -> Located[Calibration]:
    """Seeds that no training of the calibration had."""
    used = {*located.value.seeds, *(seed for one in budget.evidence for seed in one.seeds)}
    first = max(used) + 1
    return located.replace(located.value.model_copy(update={"seeds": list(range(first, first + count))}))


def _check_same_subject(held_out: Sequence[_HeldOut], located: Located[Calibration]) -> None:
    calibration, base = located.value, located.path.parent
    for one in held_out:
        folder = one.path.parent
        for key, ours, theirs in (
            ("student.path", calibration.student.path, one.candidate.student.path),
            ("teacher.path", calibration.teacher.path, one.candidate.teacher.path if one.candidate.teacher else None),
            ("workload.prompts", calibration.workload.prompts, one.candidate.workload.prompts),
        ):
            if theirs is None or resolve(ours, base) != resolve(theirs, folder):
                raise ConfigError(f"{one.path}: {key}: expected the calibration's, {resolve(ours, base)}")
        _check_trainable(one, calibration)


def _check_trainable(one: _HeldOut, calibration: Calibration) -> None:
    """What a training cannot do as the gate measures it would compare two different things."""
    rollout, steps = one.candidate.rollout, calibration.method.steps
    stale = rollout.staleness
    if rollout.model is not None:
        raise ConfigError(
            f"{one.path}: rollout.model: no training can sample from a checkpoint that does not follow it"
        )
    if stale is not None and stale.checkpoint is not None:
        raise ConfigError(f"{one.path}: rollout.staleness.checkpoint: expected a lag alone, as trainings have it")
    if stale is not None and (stale.lag or 0) >= steps:
        raise ConfigError(f"{one.path}: rollout.staleness.lag: expected less than method.steps ({steps})")
    if one.candidate.workload.max_completion_length != calibration.workload.max_completion_length:
        raise ConfigError(
            f"{one.path}: workload.max_completion_length: expected the calibration's, "
            f"{calibration.workload.max_completion_length}"
        )


__all__ = ["backtest"]
