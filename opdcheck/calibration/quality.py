"""How good a student is: by its teacher and by the verifier, on prompts that it is not trained on."""

from __future__ import annotations

import math
from collections.abc import Sequence

from opdcheck.calibration.verifier import AnswerChecker
from opdcheck.config import Model, Sampling
from opdcheck.engines.transformers_engine import TransformersEngine
from opdcheck.models import CausalLM
from opdcheck.rollouts import Prompt, RolloutRequest
from opdcheck.scoring import Scorer
from opdcheck.session import request_seed


class Quality(Model):
    """Held-out quality after some optimizer steps."""

    step: int
    kl: float
    """KL(student || teacher), nats/token: token mean within a prompt, then mean over prompts. Lower is better."""
    accuracy: float | None = None
    """Share of the completions whose answer the verifier accepts."""


class Evaluator:
    """Samples from the student itself, unperturbed, always with the same seeds, and lets teacher and verifier judge.

    Args:
        teacher: the fixed judge.
        prompts: held out.
        sampling: as in training.
        max_completion_length: in tokens.
        eos_token_ids: where completions end.
        seed: of the sampling.
        checker: None: no accuracy.
    """

    def __init__(
        self,
        teacher: CausalLM,
        prompts: Sequence[Prompt],
        *,
        sampling: Sampling,
        max_completion_length: int,
        eos_token_ids: set[int],
        seed: int,
        checker: AnswerChecker | None = None,
    ) -> None:
        self._scorer = Scorer(teacher)
        self._requests = [RolloutRequest(prompt, 0, request_seed(seed, prompt.index, 0)) for prompt in prompts]
        self._sampling = sampling
        self._max_completion_length = max_completion_length
        self._eos_token_ids = eos_token_ids
        self._checker = checker

    def __call__(self, student: CausalLM, step: int) -> Quality:
        """The student's quality as it is now.

        Raises:
            EngineError: out of memory.
        """
        engine = TransformersEngine(
            student,
            sampling=self._sampling,
            max_completion_length=self._max_completion_length,
            eos_token_ids=self._eos_token_ids,
        )
        rollouts = engine.generate(self._requests)
        mismatch = self._scorer.compare(
            rollouts,
            self._scorer.final_hidden(rollouts),
            [rollout.final_hidden for rollout in rollouts],
            student.logits,
            self._sampling,
        )
        kl = math.fsum(float(one.kl.mean()) for one in mismatch) / len(mismatch)
        accuracy = None
        if self._checker is not None:
            scores = self._checker.scores(rollouts)
            accuracy = math.fsum(scores) / len(scores)
        return Quality(step=step, kl=kl, accuracy=accuracy)


__all__ = ["Evaluator", "Quality"]
