"""Student, teacher, prompts and judge of a calibration, loaded once and shared by all its trainings."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from opdcheck.calibration.file import Evaluation, Method, Verifier
from opdcheck.config import Candidate, Workload
from opdcheck.progress import Progress
from opdcheck.session import Session

if TYPE_CHECKING:
    from opdcheck.calibration.quality import Evaluator, Quality
    from opdcheck.calibration.training import Setup
    from opdcheck.calibration.verifier import AnswerChecker
    from opdcheck.models import CausalLM
    from opdcheck.rollouts import Prompt

SMALL_HIDDEN_SIZE = 256


class Laboratory:
    """Opens what trainings need, when it is first needed.

    Args:
        candidate: unperturbed; names student, teacher, sampling and the prompts to train on.
        base: folder that relative paths start from.
        method: how the student is trained.
        evaluation: None where nothing is evaluated (the steps that `admit` takes for a lag).
        verifier: None: no accuracy, and no method `rl`.

    Raises (when first used):
        ConfigError: student and teacher do not share a vocabulary, or a prompt or answer is missing.
    """

    def __init__(
        self,
        candidate: Candidate,
        base: Path,
        method: Method,
        *,
        evaluation: Evaluation | None,
        verifier: Verifier | None,
        progress: Progress,
    ) -> None:
        self._candidate = candidate
        self._base = base
        self._method = method
        self._evaluation = evaluation
        self._verifier = verifier
        self._session = Session(candidate, base, progress=progress)
        self._progress = progress

    @property
    def prompts(self) -> list[Prompt]:
        """To train on, in file order."""
        return self._session.prompts

    @cached_property
    def held_out(self) -> list[Prompt]:
        """To judge on."""
        from opdcheck.models import context_length
        from opdcheck.workload import load_prompts

        limit = context_length(self._candidate.student, self._base)
        return load_prompts(self._held_out_workload, self._base, self._session.tokenizer, limit)

    @property
    def _held_out_workload(self) -> Workload:
        if self._evaluation is None:
            raise ValueError("no held-out prompts were named")
        changes = {"prompts": self._evaluation.prompts, "num_prompts": self._evaluation.num_prompts}
        return self._candidate.workload.model_copy(update=changes)

    @cached_property
    def teacher(self) -> CausalLM:
        from opdcheck.calibration.teacher import check_same_vocabulary
        from opdcheck.models import load_causal_lm
        from opdcheck.workload import load_tokenizer

        student, ref = self._candidate.student, self._candidate.teacher
        if ref is None:
            raise ValueError("the candidate names no teacher")
        self._progress.stage("loading the teacher")
        teacher = load_causal_lm(ref, self._base, dtype=student.dtype, device=student.device)
        check_same_vocabulary(
            self._session.tokenizer,
            load_tokenizer(ref, self._base),
            self._session.trainer.vocab_size,
            teacher.vocab_size,
        )
        return teacher

    def new_student(self) -> CausalLM:
        """A copy of the student's weights, to be trained."""
        import copy

        from opdcheck.models import CausalLM

        return CausalLM(copy.deepcopy(self._session.trainer.model))

    @cached_property
    def setup(self) -> Setup:
        """What every training is given."""
        _use_few_threads(self._session.trainer)
        from opdcheck.calibration.training import Setup
        from opdcheck.models import end_token_ids

        return Setup(
            new_student=self.new_student,
            teacher=self.teacher,
            method=self._method,
            prompts=self.prompts,
            evaluator=self._evaluator,
            quality_at_start=lambda: self._quality_at_start,
            evaluate_every=0 if self._evaluation is None else self._evaluation.every,
            eos_token_ids=end_token_ids(self._candidate.student, self._base),
            base=self._base,
            calibration_ids=self._session.calibration_ids,
            checker=self._checker(self._candidate.workload),
        )

    @cached_property
    def _quality_at_start(self) -> Quality:
        if self._evaluator is None:
            raise ValueError("no held-out prompts were named")
        return self._evaluator(self._session.trainer, 0)

    @cached_property
    def _evaluator(self) -> Evaluator | None:
        from opdcheck.calibration.quality import Evaluator
        from opdcheck.models import end_token_ids

        if self._evaluation is None:
            return None
        return Evaluator(
            self.teacher,
            self.held_out,
            sampling=self._candidate.rollout.sampling,
            max_completion_length=self._candidate.workload.max_completion_length,
            eos_token_ids=end_token_ids(self._candidate.student, self._base),
            seed=self._evaluation.seed,
            checker=self._checker(self._held_out_workload),
        )

    def _checker(self, workload: Workload) -> AnswerChecker | None:
        from opdcheck.calibration.verifier import AnswerChecker

        if self._verifier is None:
            return None
        return AnswerChecker(self._verifier, self._answers(workload), self._session.tokenizer)

    def content(self) -> Mapping[str, Any]:
        """What a training depends on besides models, method and level: the prompts, as token ids, and their answers."""
        judged = self._evaluation is not None
        return {
            "prompts": [prompt.token_ids for prompt in self.prompts],
            "held_out": [prompt.token_ids for prompt in self.held_out] if judged else [],
            "answers": self._answers(self._candidate.workload),
            "held_out_answers": self._answers(self._held_out_workload) if judged else [],
        }

    def _answers(self, workload: Workload) -> Any:
        from opdcheck.calibration.verifier import load_answers

        if self._verifier is None:
            return []
        return load_answers(workload.prompts, self._verifier.answer, self._base, workload.num_prompts)


def _use_few_threads(student: CausalLM) -> None:
    """One thread for a small student on a CPU: its matrices are too small to share, and on cores that other work uses
    threads wait for each other (seen: twelve times as long with two threads as with one)."""
    import torch

    if student.device.type == "cpu" and student.hidden_size < SMALL_HIDDEN_SIZE:
        torch.set_num_threads(1)


__all__ = ["Laboratory"]
