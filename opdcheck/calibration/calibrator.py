"""`calibrate`: calibration file -> trainings -> budget. Finished work is kept, so the same command goes on."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from opdcheck import preflight
from opdcheck.admission import Subject, identify
from opdcheck.budget import Budget, Floor, Limits
from opdcheck.calibration.ahead import BURN_IN, with_steps_taken
from opdcheck.calibration.file import Calibration, load_calibration
from opdcheck.calibration.fit import CannotCalibrateError, LevelLosses, calibrate_limits
from opdcheck.calibration.laboratory import Laboratory
from opdcheck.calibration.ladder import Level, as_candidate, levels, unperturbed
from opdcheck.calibration.records import BudgetMethod, CalibrationFit, Evidence, Fitted
from opdcheck.calibration.store import KeptFloor, LevelMismatch, Run, RunStore, content_key
from opdcheck.calibration.workers import workers
from opdcheck.config import Metric, resolve
from opdcheck.errors import ConfigError, EngineError
from opdcheck.files import cache_dir
from opdcheck.floor import means, trainer_null
from opdcheck.progress import Progress, Silent
from opdcheck.units import plural
from opdcheck.yamlfile import Located

FLOOR_PROMPTS = 16
WAIT_SECONDS = 2.0


@dataclass(frozen=True)
class Plan:
    """What a calibration consists of, and what of it is already done."""

    levels: list[Level]
    seeds: list[int]
    finished: int
    """Trainings that are kept from before."""
    seconds_per_training: float | None
    """Median of the finished ones; None without any."""

    @property
    def trainings(self) -> int:
        return len(self.levels) * len(self.seeds)

    @property
    def seconds_left(self) -> float | None:
        if self.seconds_per_training is None:
            return None
        return (self.trainings - self.finished) * self.seconds_per_training


def calibrate(calibration_file: str | Path, *, jobs: int = 1, progress: Progress | None = None) -> Budget:
    """Trains the student under every level of the ladder, with every seed, and fits its limits.

    Args:
        calibration_file: YAML file of `opdcheck.calibration.file.Calibration`.
        jobs: how many trainings at a time, each in a process of its own.

    Returns:
        The budget; it is not written.

    Raises:
        ConfigError: the file is wrong, or does not fit the models.
        EngineError: a training failed, or its result could not be kept; finished ones are.
        CannotCalibrateError: the trainings do not support any limit.
    """
    return Calibrator(load_calibration(Path(calibration_file)), progress or Silent(), jobs=jobs).budget()


def plan(calibration_file: str | Path) -> Plan:
    """What `calibrate` would do: no training, no model in memory.

    Raises:
        ConfigError: as `calibrate`.
    """
    return Calibrator(load_calibration(Path(calibration_file)), Silent()).plan()


class Calibrator:
    """One calibration: its levels, seeds, finished work and what they say.

    Args:
        instead_of_ladder: train under these levels and the unperturbed one, as a backtest does.
        jobs: how many trainings at a time, each in a process of its own.
    """

    def __init__(
        self,
        located: Located[Calibration],
        progress: Progress,
        *,
        instead_of_ladder: Sequence[Level] | None = None,
        jobs: int = 1,
    ) -> None:
        self.located = located
        self.jobs = jobs
        self.calibration = located.value
        self.base = located.path.parent
        self.progress = progress
        ladder = levels(self.calibration)
        self.levels = ladder if instead_of_ladder is None else [ladder[0], *instead_of_ladder]
        self._check_names()
        self.store = RunStore(runs_folder(self.calibration, self.base))
        self.clean = as_candidate(self.calibration, unperturbed(self.calibration))
        progress.stage("checking models and ladder")
        self.subject: Subject = identify(self.clean, self.base)
        for index, level in enumerate(self.levels):
            self._check_level(level, index)
        self.laboratory = Laboratory(
            self.clean,
            self.base,
            self.calibration.method,
            evaluation=self.calibration.evaluation,
            verifier=self.calibration.verifier,
            progress=progress,
        )

    def _check_names(self) -> None:
        """Levels are told apart by name in every table, and so they must be."""
        names = [level.name for level in self.levels]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise self.located.error("ladder", f"expected levels of different names, found two called `{twice}`")

    def _check_level(self, level: Level, index: int) -> None:
        candidate = as_candidate(self.calibration, level)
        key = "rollout" if index == 0 else "ladder"
        try:
            preflight.check(Located(candidate, self.located.path), self.base)
        except ConfigError as error:
            text = error.message.removeprefix(f"{self.located.path}:1: ")
            raise self.located.error(key, f"{level.name}: {text}", hint=error.hint) from error

    def plan(self) -> Plan:
        """What there is to do, and how long it may take."""
        runs = [run for level in self.levels for seed in self.calibration.seeds if (run := self._stored(level, seed))]
        seconds = sorted(run.outcome.seconds for run in runs)
        return Plan(
            levels=self.levels,
            seeds=self.calibration.seeds,
            finished=len(runs),
            seconds_per_training=seconds[len(seconds) // 2] if seconds else None,
        )

    def budget(self) -> Budget:
        """Everything: mismatch of each level, all trainings, the fit, the budget."""
        measured = [self.mismatch(level) for level in self.levels]
        floor = self._floor(measured[0])
        runs = self.trainings()
        self.progress.stage("fitting the limit")
        fit = self.fit(measured, runs)
        return self._assemble(fit, measured, runs, floor)

    # --- mismatch -----------------------------------------------------------------------------------------------------

    def mismatch(self, level: Level) -> LevelMismatch:
        """The mismatch of a level, as `admit` measures it: kept, or measured now."""
        key = content_key(
            {
                **self._shared_content,
                "mismatch": level.rollout.model_dump(mode="json"),
                "metrics": sorted(get_args(Metric)),
                "prompts_measured": self.calibration.mismatch_prompts,
                "method": [self.calibration.method.model_dump(), BURN_IN] if level.lag else None,
            }
        )
        stored = self.store.load(f"mismatch-{level.slug}", key, LevelMismatch)
        if stored is not None:
            return stored
        self.progress.stage(f"measuring the mismatch of {level.name}")
        result = self._measure(level, key)
        self._keep(f"mismatch-{level.slug}", key, result)
        return result

    def _measure(self, level: Level, key: str) -> LevelMismatch:
        from opdcheck.measure import measure_round, summarize_rounds
        from opdcheck.session import Session, in_rounds

        candidate = as_candidate(self.calibration, level)
        if level.lag:
            candidate = with_steps_taken(
                candidate,
                self.base,
                self.calibration.method,
                verifier=self.calibration.verifier,
                progress=self.progress,
            )
        with Session(candidate, self.base) as session:
            prompts = session.drawn_prompts[: self.calibration.mismatch_prompts]
            rounds = [measure_round(session, group) for group in in_rounds(prompts, 32)]
        summary = summarize_rounds(rounds, cached=False)
        return LevelMismatch(
            key=key,
            level=level.name,
            metrics={name: metric.mean for name, metric in summary.metrics.items()},
            prompts=summary.prompts,
            tokens=summary.tokens,
        )

    def _floor(self, clean: LevelMismatch) -> Floor:
        """The unperturbed level is the kernel floor; the trainer's null is measured on its first prompts."""
        key = content_key({**self._shared_content, "null": FLOOR_PROMPTS, "kernel": clean.key})
        stored = self.store.load("floor", key, KeptFloor)
        if stored is not None:
            return stored.floor
        from opdcheck.measure import measure_round
        from opdcheck.session import Session

        self.progress.stage("measuring the trainer against itself")
        with Session(self.clean, self.base) as session:
            rollouts = measure_round(session, session.drawn_prompts[:FLOOR_PROMPTS]).rollouts
            null = means(trainer_null(session, rollouts))
        floor = Floor(
            kernel={name: clean.metrics[name] for name in null},
            trainer_null=null,
            prompts=clean.prompts,
            tokens=clean.tokens,
        )
        self._keep("floor", key, KeptFloor(key=key, floor=floor))
        return floor

    # --- trainings ----------------------------------------------------------------------------------------------------

    def trainings(self) -> list[Run]:
        """Every level with every seed, seed by seed: kept from before, trained now, or by another process meanwhile."""
        wanted = [(level, seed) for seed in self.calibration.seeds for level in self.levels]
        left = sum(self._stored(level, seed) is None for level, seed in wanted)
        clock = _Clock(len(wanted), len(wanted) - left)
        helping = max(0, min(self.jobs, left) - 1)
        with workers(helping, self.located.path, self.calibration.seeds, self.levels[1:]):
            runs = self._gather(wanted, clock)
        return [runs[level.name, seed] for level, seed in wanted]

    def _gather(self, wanted: Sequence[tuple[Level, int]], clock: _Clock) -> dict[tuple[str, int], Run]:
        runs: dict[tuple[str, int], Run] = {}
        while True:
            missing = [(level, seed) for level, seed in wanted if (level.name, seed) not in runs]
            runs |= {(level.name, seed): run for level, seed in missing if (run := self._stored(level, seed))}
            clock.done = len(runs)
            missing = [(level, seed) for level, seed in missing if (level.name, seed) not in runs]
            if not missing:
                return runs
            if not any(self._train_unless_claimed(level, seed, clock) for level, seed in missing):
                self.progress.stage(f"waiting for another process: {plural(len(missing), 'training')}")
                time.sleep(WAIT_SECONDS)

    def _train_unless_claimed(self, level: Level, seed: int, clock: _Clock) -> bool:
        """Whether this training is now finished and kept; False while another process is at it."""
        with self.store.claimed(self._run_name(level, seed), self._run_key(level, seed)) as mine:
            if mine and self._stored(level, seed) is None:  # another process may have finished it since
                self._train(level, seed, clock)
                if self._stored(level, seed) is None:
                    raise EngineError(f"{self.store.folder}: what was just kept there cannot be read back")
            return mine

    def _train(self, level: Level, seed: int, clock: _Clock) -> None:
        from opdcheck.calibration.training import train

        candidate = as_candidate(self.calibration, level)
        steps = self.calibration.method.steps

        def tell(done: int) -> None:
            self.progress.training(
                f"{level.name}, seed {seed}: step {done}/{steps}", clock.done, clock.total, clock.seconds_left
            )

        outcome = train(self.laboratory.setup, candidate, seed, on_step=tell)
        run = Run(
            key=self._run_key(level, seed),
            level=level.name,
            source=level.source,
            rollout=level.rollout,
            seed=seed,
            outcome=outcome,
        )
        self._keep(self._run_name(level, seed), run.key, run)

    def _stored(self, level: Level, seed: int) -> Run | None:
        run = self.store.load(self._run_name(level, seed), self._run_key(level, seed), Run)
        # Another calibration may have called the same rollouts by another name.
        return run and run.model_copy(update={"level": level.name, "source": level.source})

    def _run_name(self, level: Level, seed: int) -> str:
        return f"{level.slug}-seed{seed}"

    def _run_key(self, level: Level, seed: int) -> str:
        calibration = self.calibration
        return content_key(
            {
                **self._shared_content,
                "method": calibration.method.model_dump(),
                "evaluation": calibration.evaluation.model_dump(exclude={"prompts"}),
                "verifier": calibration.verifier and calibration.verifier.model_dump(),
                "rollout": level.rollout.model_dump(mode="json"),
                "seed": seed,
            }
        )

    @cached_property
    def _shared_content(self) -> dict[str, Any]:
        """What every result depends on, as one hash: the prompts in it are many, and keys are asked for often."""
        content = {
            # The rollout is each level's own, and so are the keys of what it names besides the student.
            **{name: value for name, value in self.subject.key.items() if name not in ("opdcheck", "rollout")},
            "student": self.subject.student.model_dump(exclude={"name"}),
            "teacher": self.subject.teacher and self.subject.teacher.model_dump(exclude={"name"}),
            "environment": self.subject.environment.model_dump(exclude={"python", "cpu_capability"}),
            **self.laboratory.content(),
        }
        return {"shared": content_key(content)}

    def _keep(self, name: str, key: str, result: Any) -> None:
        try:
            self.store.save(name, key, result)
        except OSError as error:
            raise EngineError(
                f"{self.store.folder}: the finished {name} cannot be kept: {error.strerror or error}",
                hint="Make room, or set `runs` to another folder; what is kept already stays, and the same command "
                "goes on from there.",
            ) from error

    # --- budget -------------------------------------------------------------------------------------------------------

    def fit(self, measured: Sequence[LevelMismatch], runs: Sequence[Run]) -> CalibrationFit:
        """The limits that the trainings support."""
        losses = self.losses(runs)
        found = [
            LevelLosses(
                name=level.name,
                source=level.limited_as,
                mismatch=mismatch.metrics[self.calibration.metric],
                losses=losses[level.name],
            )
            for level, mismatch in zip(self.levels[1:], measured[1:], strict=True)
        ]
        gains = self._gains(runs)
        return calibrate_limits(
            found,
            gains,
            margin_share=self.calibration.margin,
            alpha=self.calibration.alpha,
            quality=self.calibration.quality,
        )

    def losses(self, runs: Sequence[Run]) -> dict[str, list[float]]:
        """Quality that each level lost against the unperturbed run of the same seed, in the order of the seeds."""
        reached = {(run.level, run.seed): run.outcome.reached(self.calibration.quality) for run in runs}
        clean, *others = [level.name for level in self.levels]
        return {
            name: [reached[name, seed] - reached[clean, seed] for seed in self.calibration.seeds] for name in others
        }

    def _gains(self, runs: Sequence[Run]) -> list[float]:
        """What each seed's unperturbed training gained."""
        return [
            run.outcome.start(self.calibration.quality) - run.outcome.reached(self.calibration.quality)
            for run in runs
            if run.source == "none"
        ]

    def _assemble(
        self, fit: CalibrationFit, measured: Sequence[LevelMismatch], runs: Sequence[Run], floor: Floor
    ) -> Budget:
        calibration = self.calibration
        return _refused_as_calibration(
            name=resolve(calibration.budget, self.base).stem,
            provenance="calibrated",
            created=None,
            student=self.subject.student,
            teacher=self.subject.teacher,
            environment=self.subject.environment,
            method=BudgetMethod(
                **calibration.method.model_dump(),
                temperature=calibration.rollout.sampling.temperature,
                max_completion_length=calibration.workload.max_completion_length,
            ),
            limits=limits_of(fit, calibration.metric),
            floor=floor,
            calibration=os.path.relpath(self.located.path.absolute(), resolve(calibration.budget, self.base).parent),
            fit=Fitted(
                metric=calibration.metric,
                quality=calibration.quality,
                margin_share=calibration.margin,
                alpha=calibration.alpha,
                **fit.model_dump(),
            ),
            evidence=[self._evidence(level, runs, one) for level, one in zip(self.levels, measured, strict=True)],
        )

    def _evidence(self, level: Level, runs: Sequence[Run], measured: LevelMismatch) -> Evidence:
        outcomes = [run.outcome for run in runs if run.level == level.name]
        accuracies = [outcome.final.accuracy for outcome in outcomes]
        return Evidence(
            level=level.name,
            source=level.source,
            rollout=level.rollout.model_dump(mode="json", exclude_defaults=True),
            mismatch=measured.metrics,
            seeds=self.calibration.seeds,
            final_kl=[outcome.reached("final") for outcome in outcomes],
            auc_kl=[outcome.reached("auc") for outcome in outcomes],
            accuracy=None if None in accuracies else [float(value or 0) for value in accuracies],
            k3_in_training=[outcome.k3_in_training for outcome in outcomes],
        )


def _refused_as_calibration(**fields: Any) -> Budget:
    """A budget of these fields; where it would be refused, it is the trainings that support none."""
    try:
        return Budget.checked(**fields)
    except ConfigError as error:
        raise CannotCalibrateError(f"the trainings support no limit: {error.message}", hint=error.hint) from error


def limits_of(fit: CalibrationFit, metric: str) -> Limits:
    """The budget's limits: one for all sources, or one for each where they differ.

    Then `total`, which holds for what has no limit of its own, is the strictest of all.
    """
    by_source = {source: one.limit for source, one in fit.by_source.items()}
    total = min(limit for limit in (fit.total.limit, *by_source.values()) if limit is not None)
    return Limits(
        total={metric: total},
        total_by_source={source: None if limit is None else {metric: limit} for source, limit in by_source.items()},
    )


def runs_folder(calibration: Calibration, base: Path) -> Path:
    """Where finished trainings are kept: the file's `runs`, else a folder of the cache.

    That one serves all calibrations, so that one which asks another question of the same trainings finds them.
    """
    return cache_dir() / "trainings" if calibration.runs is None else resolve(calibration.runs, base)


class _Clock:
    """How long the remaining trainings will take: at the pace since the start, other processes' work included."""

    def __init__(self, total: int, done: int) -> None:
        self.total = total
        self.done = done
        self._done_before = done
        self._started = time.monotonic()

    @property
    def seconds_left(self) -> float | None:
        finished = self.done - self._done_before
        if not finished:
            return None
        return (self.total - self.done) * (time.monotonic() - self._started) / finished


__all__ = ["Calibrator", "Plan", "calibrate", "limits_of", "plan", "runs_folder"]
