"""What long work tells whoever waits for it. The command line draws it; the library default says nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from opdcheck.stats.gate import Gate


class Progress(Protocol):
    """Receives what is being done. All methods return at once."""

    def stage(self, text: str) -> None:
        """A new step has begun, such as `starting vLLM`."""

    def step(self, text: str, *, first: bool) -> None:
        """One of many like it. Where lines are printed instead of drawn, the first one is enough."""

    def look(self, gate: Gate, *, metric: str, max_prompts: int) -> None:
        """The running interval after a round of prompts."""

    def training(self, text: str, done: int, total: int, seconds_left: float | None) -> None:
        """How far a calibration is: what is being trained, and how many trainings are done."""


class Silent:
    """Says nothing."""

    def stage(self, text: str) -> None:
        pass

    def step(self, text: str, *, first: bool) -> None:
        pass

    def look(self, gate: Gate, *, metric: str, max_prompts: int) -> None:
        pass

    def training(self, text: str, done: int, total: int, seconds_left: float | None) -> None:
        pass
