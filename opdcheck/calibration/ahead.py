"""The student some optimizer steps on: what makes a lag measurable without a checkpoint of older weights.

The trainer is the student after `lag` real steps; the rollout policy is the student as it is, and so `lag` steps old.
"""

from __future__ import annotations

import shutil
from importlib.metadata import version
from pathlib import Path

from filelock import FileLock

from opdcheck.calibration.file import Method, Verifier
from opdcheck.calibration.laboratory import Laboratory
from opdcheck.calibration.store import content_key
from opdcheck.config import Candidate, Rollout, Staleness
from opdcheck.files import cache_dir
from opdcheck.fingerprint import fingerprint_model
from opdcheck.floor import unperturbed
from opdcheck.progress import Progress

KEPT = 4
"""Checkpoints that stay in the cache, the last used ones: each is as large as the student."""


class StepsTaken(Staleness):
    """Staleness that opdcheck brought about itself."""

    settings: str

    def describe(self) -> str:
        return f"{self.lag} optimizer steps behind, {self.settings}"


def with_steps_taken(
    candidate: Candidate, base: Path, method: Method, *, verifier: Verifier | None = None, progress: Progress
) -> Candidate:
    """The candidate with `lag` steps taken: its student is the trained one, its stale checkpoint the student of before.

    The steps are the method's, on the workload's prompts, with unperturbed rollouts of the current weights, and at its
    full learning rate: a lag in the middle of a training, not in its warm-up, is what is to be known.

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
    folder = _checkpoint(candidate, base, _in_full_swing(method, staleness.lag), verifier, staleness.lag, progress)
    student = candidate.student
    behind = StepsTaken(
        checkpoint=student.path, revision=student.revision, lag=staleness.lag, settings=steps_taken(method)
    )
    return candidate.model_copy(
        update={
            "student": student.model_copy(update={"path": str(folder), "revision": None}),
            "rollout": candidate.rollout.model_copy(update={"staleness": behind}),
        }
    )


def steps_taken(method: Method) -> str:
    """What a lag means nothing without, for reports."""
    loss = f"beta {method.beta:g}" if method.loss == "full" else "sampled reverse KL"
    return f"taken by opdcheck: learning rate {method.learning_rate:g}, batch {method.batch_size}, {loss}"


def _in_full_swing(method: Method, lag: int) -> Method:
    return method.model_copy(update={"warmup_steps": 0, "schedule": "constant", "steps": lag})


def _checkpoint(
    candidate: Candidate, base: Path, method: Method, verifier: Verifier | None, lag: int, progress: Progress
) -> Path:
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
            "lag": lag,
            "libraries": [version("torch"), version("transformers")],
            **laboratory.content(),
        }
    )
    folder = cache_dir() / "ahead" / key
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / "lock"):  # one process at a time makes and removes checkpoints here
        if not (folder / "config.json").is_file():
            _take_steps(laboratory, clean, base, lag, folder, progress)
        folder.touch()
        _prune(folder.parent)
    return folder


def _take_steps(
    laboratory: Laboratory, clean: Candidate, base: Path, lag: int, folder: Path, progress: Progress
) -> None:
    from opdcheck.calibration.training import Training
    from opdcheck.models import quiet_transformers
    from opdcheck.workload import load_tokenizer

    with Training(laboratory.setup, clean, clean.workload.seed) as training:
        for step in range(lag):
            progress.step(f"optimizer step {step + 1} of {lag}, to be ahead of the rollout weights", first=step == 0)
            training.step()
        model = training.student.model
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with quiet_transformers():
        model.save_pretrained(partial)
    load_tokenizer(clean.student, base).save_pretrained(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


def _prune(parent: Path) -> None:
    folders = sorted((f for f in parent.iterdir() if f.is_dir()), key=lambda f: f.stat().st_mtime, reverse=True)
    for old in folders[KEPT:]:
        shutil.rmtree(old, ignore_errors=True)


__all__ = ["with_steps_taken"]
