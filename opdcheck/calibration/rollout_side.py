"""Who samples during a training: the perturbed rollout policy, in sync with the trainer or some steps behind it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, assert_never

from torch import Tensor

from opdcheck.config import Candidate
from opdcheck.engines.transformers_engine import TransformersEngine
from opdcheck.models import CausalLM, end_token_ids
from opdcheck.perturb.live import LivePolicy, snapshot
from opdcheck.perturb.policy import active_parts
from opdcheck.rollouts import Prompt, Rollout, RolloutRequest


class RolloutSide(Protocol):
    """Samples with weights that it has been given."""

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Takes the trainer's parameters, by name, and perturbs them as the candidate says."""

    def generate(self, requests: Sequence[RolloutRequest]) -> list[Rollout]: ...

    def close(self) -> None: ...


class StaleSide:
    """A rollout side that samples with the weights of `lag` optimizer steps ago; at first with the oldest there are.

    Lag is counted in optimizer steps (AsyncOPD, arXiv 2606.24143).
    """

    def __init__(self, side: RolloutSide, lag: int) -> None:
        self._side = side
        self._versions: deque[Mapping[str, Tensor]] = deque(maxlen=lag + 1)
        self._loaded: Mapping[str, Tensor] | None = None

    def push(self, student: CausalLM) -> None:
        """Keeps the trainer's weights as they are now, before the next step."""
        self._versions.append(snapshot(student.model))

    def generate(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        """Samples with the oldest weights that are kept."""
        oldest = self._versions[0]
        if oldest is not self._loaded:
            self._side.load(oldest)
            self._loaded = oldest
        return self._side.generate(requests)

    def close(self) -> None:
        self._versions.clear()
        self._loaded = None
        self._side.close()


class TransformersSide:
    """Simulated perturbations in this process.

    Args:
        student: copied once; later weights come by `load`.
        candidate: engine, dtype, sampling, perturbations, completion length.
        base: folder that the candidate's relative paths start from.
        run_seed: of the training: noise is drawn anew for every run, and stays the same within one.
        calibration_ids: token ids that static scales are set from.
    """

    def __init__(
        self, student: CausalLM, candidate: Candidate, base: Path, *, run_seed: int, calibration_ids: list[list[int]]
    ) -> None:
        rollout = candidate.rollout
        noise = rollout.noise
        seed = run_seed if noise is None else noise.seed + run_seed
        parts = [part for part in active_parts(candidate) if part != "staleness"]
        self._live = LivePolicy(student, candidate, parts, noise_seed=seed, calibration_ids=calibration_ids)
        self._engine = TransformersEngine(
            self._live.policy,
            sampling=rollout.sampling,
            max_completion_length=candidate.workload.max_completion_length,
            eos_token_ids=end_token_ids(candidate.student, base),
            noise_logits=noise.logits if noise else 0.0,
            noise_seed=seed,
        )

    def load(self, weights: Mapping[str, Tensor]) -> None:
        self._live.load(weights)

    def generate(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        return self._engine.generate(requests)

    def close(self) -> None:
        self._engine.close()


def open_side(
    student: CausalLM,
    candidate: Candidate,
    base: Path,
    *,
    prompts: Sequence[Prompt],
    run_seed: int,
    calibration_ids: list[list[int]],
) -> StaleSide:
    """The rollout side of one training: the candidate's engine and perturbations, behind by the candidate's lag."""
    side: RolloutSide
    match candidate.rollout.engine:
        case "vllm":
            from opdcheck.calibration.vllm_side import VllmSide

            side = VllmSide(
                student, candidate, base, prompts=prompts, run_seed=run_seed, calibration_ids=calibration_ids
            )
        case "transformers":
            side = TransformersSide(student, candidate, base, run_seed=run_seed, calibration_ids=calibration_ids)
        case _:
            assert_never(candidate.rollout.engine)
    staleness = candidate.rollout.staleness
    return StaleSide(side, 0 if staleness is None or staleness.lag is None else staleness.lag)


__all__ = ["RolloutSide", "StaleSide", "TransformersSide", "open_side"]
