"""What every rollout engine offers. Engines sample; they know nothing of trainers, budgets or verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, assert_never, runtime_checkable

from opdcheck.config import EngineName
from opdcheck.rollouts import Rollout, RolloutRequest

if TYPE_CHECKING:
    import torch

How = Literal["real", "simulated", "not applied"]


def has_own_kernels(engine: EngineName) -> bool:
    """Whether the engine computes in a candidate's formats with kernels of its own; else they are simulated."""
    match engine:
        case "vllm":
            return True
        case "transformers":
            return False
        case _:
            assert_never(engine)


@dataclass(frozen=True)
class Provenance:
    """How one part of the candidate (weights, activations, kv_cache, noise, staleness) was brought about.

    `real`: the engine's own kernels. `simulated`: rounded to the format's grid, computed in the rollout dtype.
    `not applied`: asked for, and left out of this measurement.
    """

    part: str
    how: How
    detail: str


class RolloutEngine(Protocol):
    """Samples completions from the rollout policy q."""

    @property
    def name(self) -> str:
        """Engine and version, e.g. `vllm 0.32.0 (cpu)`."""

    @property
    def provenance(self) -> list[Provenance]: ...

    def generate(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        """Samples one rollout per request, in the order of the requests.

        Raises:
            EngineError: the engine failed; the message says what to try.
        """

    def close(self) -> None: ...


@runtime_checkable
class ReloadableEngine(RolloutEngine, Protocol):
    """An engine that takes new weights while it runs, as a training's rollouts need."""

    def reload(self, folder: Path) -> None:
        """Takes the weights of another checkpoint of the same model in the same format.

        Raises:
            EngineError: the engine could not read them.
        """


@runtime_checkable
class ExactEngine(Protocol):
    """An engine whose whole next-token distribution can be had: estimator `exact`."""

    def logits(self, final_hidden: torch.Tensor) -> torch.Tensor:
        """The engine's own logits, before sampling transforms. [tokens, hidden] -> float32 [tokens, vocab]."""
