"""One training: rollouts from the rollout side, optimizer steps, held-out quality along the way."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from opdcheck.calibration.divergence import group_advantages
from opdcheck.calibration.file import Method, QualityName
from opdcheck.calibration.quality import Evaluator, Quality
from opdcheck.calibration.rollout_side import StaleSide, open_side
from opdcheck.calibration.step import StepStats, Trainer
from opdcheck.calibration.verifier import AnswerChecker
from opdcheck.config import Candidate, Model
from opdcheck.engines.transformers_engine import TransformersEngine
from opdcheck.errors import EngineError
from opdcheck.models import CausalLM
from opdcheck.rollouts import Prompt, Rollout, RolloutRequest
from opdcheck.session import request_seed


class Outcome(Model):
    """What one training came to."""

    evaluations: list[Quality]
    """Before the first step, every `evaluation.every` steps, and after the last."""
    k3_in_training: float
    """Mean mismatch (k3, nats/token) of the student's rollouts, by the sampled tokens; 0 where it sampled none."""
    rollouts: int
    """Completions that were sampled for training."""
    seconds: float

    @property
    def final(self) -> Quality:
        return self.evaluations[-1]

    def start(self, quality: QualityName) -> float:
        """Quality before the first step, on the scale of `reached`."""
        return _shortfall(self.evaluations[0], quality)

    def reached(self, quality: QualityName) -> float:
        """What a calibration compares, lower is better: at the end, or the mean over steps (`auc`)."""
        if quality != "auc":
            return _shortfall(self.final, quality)
        steps = [evaluation.step for evaluation in self.evaluations]
        return float(np.trapezoid([evaluation.kl for evaluation in self.evaluations], steps)) / steps[-1]


def _shortfall(evaluation: Quality, quality: QualityName) -> float:
    """Held-out KL in nats/token, or the share of wrong answers."""
    if quality != "accuracy":
        return evaluation.kl
    if evaluation.accuracy is None:
        raise ValueError("quality `accuracy` needs a verifier")
    return 1 - evaluation.accuracy


@dataclass(frozen=True)
class Setup:
    """All that the trainings of one calibration share.

    `new_student` gives a fresh copy of the student's weights; `teacher` and `evaluator` are used by all runs in turn.
    """

    new_student: Callable[[], CausalLM]
    teacher: CausalLM
    method: Method
    prompts: Sequence[Prompt]
    evaluator: Evaluator | None
    quality_at_start: Callable[[], Quality]
    """Of the fresh student: the same for all runs."""
    evaluate_every: int
    eos_token_ids: set[int]
    base: Path
    calibration_ids: list[list[int]]
    checker: AnswerChecker | None = None


def train(setup: Setup, candidate: Candidate, seed: int, *, on_step: Callable[[int], None] | None = None) -> Outcome:
    """Trains a fresh student with rollouts of the candidate.

    Runs of the same seed see the same prompts in the same order and sample with the same random numbers.

    Args:
        candidate: rollout configuration, staleness included.
        seed: of data order, sampling and weight noise.
        on_step: told after each step how many are done.

    Raises:
        EngineError: the loss or the gradients are not finite, or memory ran out.
    """
    started = time.monotonic()
    steps = setup.method.steps
    evaluator = setup.evaluator
    if evaluator is None:
        raise ValueError("a whole training needs held-out prompts to be judged on")
    with Training(setup, candidate, seed) as training:
        evaluations = [setup.quality_at_start()]
        for done in range(1, steps + 1):
            training.step()
            if done % setup.evaluate_every == 0 or done == steps:
                evaluations.append(evaluator(training.student, done))
            if on_step is not None:
                on_step(done)
        stats = training.stats
    tokens = sum(one.k3_tokens for one in stats)
    return Outcome(
        evaluations=evaluations,
        k3_in_training=math.fsum(one.k3 * one.k3_tokens for one in stats) / max(1, tokens),
        rollouts=setup.method.batch_size * steps,
        seconds=time.monotonic() - started,
    )


class Training:
    """A student on its way: each `step` samples and updates once. Use as a context manager.

    Args:
        setup: what it shares with other trainings.
        candidate: rollout configuration, staleness included.
        seed: of data order, sampling and weight noise.
    """

    def __init__(self, setup: Setup, candidate: Candidate, seed: int) -> None:
        self.student = setup.new_student()
        self.stats: list[StepStats] = []
        self._trainer = Trainer(
            self.student,
            setup.teacher if setup.method.kind == "opd" else None,
            setup.method,
            temperature=candidate.rollout.sampling.temperature,
        )
        self._side = open_side(
            self.student,
            candidate,
            setup.base,
            prompts=setup.prompts,
            run_seed=seed,
            calibration_ids=setup.calibration_ids,
        )
        self._sampler = Sampler(setup, candidate, self._side, seed)

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        self._side.close()

    def step(self) -> None:
        """Samples with the rollout side's weights, and updates the student.

        Raises:
            EngineError: the loss or the gradients are not finite, or memory ran out.
        """
        self._side.push(self.student)
        batch = self._sampler.batch(len(self.stats))
        stats = self._trainer.step(batch.rollouts, batch.advantages, of_student=batch.of_student)
        _check_finite(stats, len(self.stats))
        self.stats.append(stats)


@dataclass(frozen=True)
class Batch:
    """What one step trains on."""

    rollouts: list[Rollout]
    of_student: list[bool]
    """Of each, whether the student's rollout side sampled it; the others are the teacher's."""
    advantages: list[float] | None = None
    """Of each, where the method is `rl`."""


class Sampler:
    """The completions of each step: which prompts, from whom, and with which advantages."""

    def __init__(self, setup: Setup, candidate: Candidate, side: StaleSide, seed: int) -> None:
        self._setup = setup
        self._side = side
        self._seed = seed
        method = setup.method
        self._samples = method.group_size if method.kind == "rl" else 1
        self._order = prompt_order(len(setup.prompts), method.steps * method.batch_size // self._samples, seed)
        self._on_policy = np.random.default_rng([seed, 1]).random(method.steps * method.batch_size) < method.lmbda
        self._teacher_engine = TransformersEngine(
            setup.teacher,
            sampling=candidate.rollout.sampling,
            max_completion_length=candidate.workload.max_completion_length,
            eos_token_ids=setup.eos_token_ids,
        )

    def batch(self, step: int) -> Batch:
        """The completions of a step."""
        requests = self._requests(step)
        if self._setup.method.kind == "rl":
            rollouts = self._side.generate(requests)
            return Batch(rollouts, [True] * len(rollouts), self._advantages(rollouts))
        size = self._setup.method.batch_size
        on_policy = self._on_policy[step * size : (step + 1) * size]
        rollouts = self._side.generate([request for request, on in zip(requests, on_policy, strict=True) if on])
        of_teacher = [request for request, on in zip(requests, on_policy, strict=True) if not on]
        return Batch([*rollouts, *self._teacher_engine.generate(of_teacher)], sorted(on_policy.tolist(), reverse=True))

    def _requests(self, step: int) -> list[RolloutRequest]:
        count = self._setup.method.batch_size // self._samples
        chosen = [self._setup.prompts[index] for index in self._order[step * count : (step + 1) * count]]
        return [
            RolloutRequest(prompt, sample, request_seed(self._seed, step * count + place, sample))
            for place, prompt in enumerate(chosen)
            for sample in range(self._samples)
        ]

    def _advantages(self, rollouts: Sequence[Rollout]) -> list[float]:
        import torch

        if self._setup.checker is None:
            raise ValueError("method `rl` needs a verifier")
        rewards = torch.tensor(self._setup.checker.scores(rollouts)).reshape(-1, self._samples)
        return [float(value) for value in group_advantages(rewards).reshape(-1)]


def prompt_order(prompts: int, needed: int, seed: int) -> list[int]:
    """Indices of the prompts in training order: one random pass over all of them after another."""
    rng = np.random.default_rng([seed, 0])
    passes = [rng.permutation(prompts) for _ in range(-(-needed // prompts))]
    return [int(index) for index in np.concatenate(passes)[:needed]]


def _check_finite(stats: StepStats, step: int) -> None:
    if not (math.isfinite(stats.loss) and math.isfinite(stats.grad_norm)):
        raise EngineError(
            f"training failed at step {step + 1}: loss {stats.loss:g}, gradient norm {stats.grad_norm:g}",
            hint="Lower method.learning_rate, add method.warmup_steps, or use a wider student.dtype.",
        )


__all__ = ["Outcome", "Sampler", "Setup", "prompt_order", "train"]
