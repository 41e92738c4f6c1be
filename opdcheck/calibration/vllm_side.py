"""vLLM's own kernels as the rollout side of a training: each new version of the weights is a checkpoint it reloads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from torch import Tensor

from opdcheck.config import Candidate
from opdcheck.engines import ReloadableEngine, open_engine
from opdcheck.errors import EngineError
from opdcheck.files import scratch_folder
from opdcheck.models import CausalLM, quiet_transformers
from opdcheck.perturb.checkpoint import needs_checkpoint, write_checkpoint
from opdcheck.rollouts import Prompt, Rollout, RolloutRequest
from opdcheck.workload import load_tokenizer


class VllmSide:
    """Samples with vLLM. Started with the first weights; later ones are written in the same format and reloaded.

    Args:
        student: gives the architecture; weights come by `load`.
        candidate: engine arguments, sampling and perturbations; its staleness is the caller's business.
        base: folder that the candidate's relative paths start from.
        prompts: all that will be sampled from; the longest sets the engine's context length.
        run_seed: of the training: noise is drawn anew for every run, and stays the same within one.
        calibration_ids: token ids that static scales are set from.

    Raises:
        OSError: the cache, where checkpoints pass through, cannot be written to.
    """

    def __init__(
        self,
        student: CausalLM,
        candidate: Candidate,
        base: Path,
        *,
        prompts: Sequence[Prompt],
        run_seed: int,
        calibration_ids: list[list[int]],
    ) -> None:
        self._student = student
        self._base = base
        self._prompts = prompts
        self._calibration_ids = calibration_ids
        self._tokenizer = load_tokenizer(candidate.student, base)
        self._stack = ExitStack()
        self._folder = self._stack.enter_context(scratch_folder())
        self._candidate = _of_folder(candidate, self._folder / "student", run_seed)
        self._engine: ReloadableEngine | None = None

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Writes the weights as the candidate's checkpoint and lets vLLM read it.

        Raises:
            ConfigError: vLLM cannot run this candidate.
            EngineError: it did not start, or could not reload.
        """
        self._write_student(weights)
        if self._engine is None:
            engine = open_engine(self._candidate, self._base, self._prompts, self._calibration_ids)
            if not isinstance(engine, ReloadableEngine):
                engine.close()
                raise EngineError(f"{engine.name} takes no new weights while it runs")
            self._engine = engine
            return
        folder = self._folder / "student"
        if needs_checkpoint(self._candidate):
            folder = self._folder / "policy"
            write_checkpoint(self._candidate, self._base, folder, calibration_ids=self._calibration_ids)
        self._engine.reload(folder)

    def generate(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        """One rollout per request.

        Raises:
            EngineError: no weights have been loaded, or vLLM failed.
        """
        if self._engine is None:
            raise EngineError("vLLM was asked for rollouts before it had weights")
        return self._engine.generate(requests)

    def close(self) -> None:
        """Stops vLLM and removes the checkpoints."""
        if self._engine is not None:
            self._engine.close()
        self._stack.close()

    def _write_student(self, weights: Mapping[str, Tensor]) -> None:
        folder = self._folder / "student"
        state = {name: value.cpu() for name, value in weights.items()}
        with quiet_transformers():
            self._student.model.save_pretrained(folder, state_dict=state)
        self._tokenizer.save_pretrained(folder)


def _of_folder(candidate: Candidate, folder: Path, run_seed: int) -> Candidate:
    """The candidate with the student in `folder`, without staleness, and with noise of this run."""
    student = candidate.student.model_copy(update={"path": str(folder), "revision": None})
    noise = candidate.rollout.noise
    changes = {"staleness": None, "noise": noise and noise.model_copy(update={"seed": noise.seed + run_seed})}
    return candidate.model_copy(update={"student": student, "rollout": candidate.rollout.model_copy(update=changes)})


__all__ = ["VllmSide"]
