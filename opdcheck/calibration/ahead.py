"""The student some optimizer steps on: what makes a lag measurable without a checkpoint of older weights.

The trainer is the student some real steps on; the rollout policy holds the weights of `lag` steps before.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock

from opdcheck.calibration.file import Method, Verifier
from opdcheck.calibration.laboratory import Laboratory
from opdcheck.calibration.store import content_key
from opdcheck.config import Candidate, Rollout, Staleness
from opdcheck.files import cache_dir
from opdcheck.fingerprint import fingerprint_model
from opdcheck.floor import unperturbed
from opdcheck.progress import Progress

if TYPE_CHECKING:
    from opdcheck.models import CausalLM

KEPT = 4
"""Pairs of checkpoints that stay in the cache, the last used ones: each is twice as large as the student."""

BURN_IN = 10
"""Steps after the method's warm-up, until Adam's moments are those of a training on its way."""

BEHIND, AHEAD = "behind", "ahead"


class StepsTaken(Staleness):
    """Staleness that opdcheck brought about itself."""

    settings: str

    def describe(self) -> str:
        return f"{self.lag} optimizer steps behind, {self.settings}"


def with_steps_taken(
    candidate: Candidate, base: Path, method: Method, *, verifier: Verifier | None = None, progress: Progress
) -> Candidate:
    """The candidate with steps taken: its student is the trained one, its stale checkpoint that of `lag` steps before.

    The steps are the method's, on the workload's prompts, with unperturbed rollouts of the current weights, at its full
    learning rate. They begin when the method's warm-up and `BURN_IN` steps more are over: what is to be known is a lag
    in the middle of a training. In the warm-up steps are small; the first ones of Adam without it are large (seen with
    the addition pair: a lag of 2 from a fresh optimizer has eighteen times the k3 that trainings have at that lag).

    Args:
        candidate: with `staleness.lag` and a teacher, without `staleness.checkpoint`.
        method: loss, learning rate, batch: a lag means nothing without them.
        verifier: the reward of method `rl`.

    Raises:
        ConfigError: the teacher's vocabulary is not the student's.
        EngineError: the steps failed.
    """
    staleness = candidate.rollout.staleness
    if staleness is None or staleness.lag is None or candidate.teacher is None:
        raise ValueError("a lag and a teacher are needed")
    steps = _steps(method, staleness.lag)
    folder = _checkpoints(candidate, base, _in_full_swing(method, steps), verifier, steps, progress)
    settings = f"{steps_taken(method)}, after {steps.before} others"
    behind = StepsTaken(checkpoint=str(folder / BEHIND), lag=staleness.lag, settings=settings)
    return candidate.model_copy(
        update={
            "student": candidate.student.model_copy(update={"path": str(folder / AHEAD), "revision": None}),
            "rollout": candidate.rollout.model_copy(update={"staleness": behind}),
        }
    )


def steps_taken(method: Method) -> str:
    """What a lag means nothing without, for reports."""
    loss = f"beta {method.beta:g}" if method.loss == "full" else "sampled reverse KL"
    return f"taken by opdcheck: learning rate {method.learning_rate:g}, batch {method.batch_size}, {loss}"


@dataclass(frozen=True)
class _Steps:
    before: int
    """Until the training is in full swing."""
    lag: int

    @property
    def total(self) -> int:
        return self.before + self.lag


def _steps(method: Method, lag: int) -> _Steps:
    return _Steps(method.warmup_steps + BURN_IN, lag)


def rollouts_to_know(method: Method, lag: int) -> int:
    """How many rollouts it takes to know a lag: a batch for each step until it has passed; none without a lag."""
    return _steps(method, lag).total * method.batch_size if lag else 0


def _in_full_swing(method: Method, steps: _Steps) -> Method:
    return method.model_copy(update={"schedule": "constant", "steps": steps.total})


def _checkpoints(
    candidate: Candidate, base: Path, method: Method, verifier: Verifier | None, steps: _Steps, progress: Progress
) -> Path:
    """Folder that holds both ends of the lag."""
    clean = unperturbed(candidate)
    # Whoever samples these steps, they are steps of the trainer; the engine under test is opened once, afterwards.
    clean = clean.model_copy(
        update={"rollout": Rollout(engine="transformers", dtype=clean.student.dtype, sampling=clean.rollout.sampling)}
    )
    laboratory = Laboratory(clean, base, method, evaluation=None, verifier=verifier, progress=progress)
    teacher = clean.teacher
    key = content_key(
        {
            "student": fingerprint_model(clean.student, base).weights,
            "dtype": clean.student.dtype,
            "device": clean.student.device,
            "teacher": teacher and fingerprint_model(teacher, base).weights,
            "method": method.model_dump(include=set(Method.model_fields)),
            "sampling": clean.rollout.sampling.model_dump(),
            "max_completion_length": clean.workload.max_completion_length,
            "seed": clean.workload.seed,
            "steps": [steps.before, steps.lag],
            "libraries": [version("torch"), version("transformers")],
            **laboratory.content(),
        }
    )
    folder = cache_dir() / "ahead" / key
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / "lock"):  # one process at a time makes and removes checkpoints here
        if not folder.is_dir():
            _take_steps(laboratory, clean, base, steps, folder, progress)
        folder.touch()
        _prune(folder.parent)
    return folder


def _take_steps(
    laboratory: Laboratory, clean: Candidate, base: Path, steps: _Steps, folder: Path, progress: Progress
) -> None:
    from opdcheck.calibration.training import Training

    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    with Training(laboratory.setup, clean, clean.workload.seed) as training:
        for step in range(steps.total):
            if step == steps.before:
                _save(training.student, clean, base, partial / BEHIND)
            progress.step(f"optimizer step {step + 1} of {steps.total}, to know the lag", first=step == 0)
            training.step()
        _save(training.student, clean, base, partial / AHEAD)
    partial.rename(folder)


def _save(student: CausalLM, clean: Candidate, base: Path, folder: Path) -> None:
    from opdcheck.models import quiet_transformers
    from opdcheck.workload import load_tokenizer

    folder.mkdir(parents=True)
    with quiet_transformers():
        student.model.save_pretrained(folder)
    load_tokenizer(clean.student, base).save_pretrained(folder)


def _prune(parent: Path) -> None:
    folders = sorted((f for f in parent.iterdir() if f.is_dir()), key=lambda f: f.stat().st_mtime, reverse=True)
    for old in folders[KEPT:]:
        shutil.rmtree(old, ignore_errors=True)


__all__ = ["with_steps_taken"]
