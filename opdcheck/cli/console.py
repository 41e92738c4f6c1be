"""The two consoles (stdout: the result; stderr: progress and logs) and the progress display."""

from __future__ import annotations

import io
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from opdcheck.text import escaped

if TYPE_CHECKING:
    from opdcheck.stats.gate import Gate

BAR_CELLS = 30


def result_console() -> Console:
    """For the result. Colour and width as the terminal has them; `NO_COLOR` is honoured by rich."""
    return _console(sys.stdout)


def log_console() -> Console:
    """For progress and logs."""
    return _console(sys.stderr)


def _console(stream: TextIO | None) -> Console:
    # Rich takes "no file" for stdout; a closed stream (`2>&-`) must not send the progress there, among the result.
    return Console(file=io.StringIO() if stream is None else stream, highlight=False, soft_wrap=False)


def interval_bar(gate: Gate, *, cells: int = BAR_CELLS, ascii_only: bool = False) -> str:
    """The running interval on a line from 0 to twice the limit, the limit in the middle.

    `.` outside the interval, `=` inside, `|` the limit: `..====|=......`.
    """
    inside, outside, mark = ("=", ".", "|") if ascii_only else ("━", "·", "┃")
    lower, upper = gate.interval
    scale = cells / (2 * gate.limit)
    first, last = int(lower * scale), max(int(lower * scale), int(min(upper * scale, cells)) - 1)
    bar = [inside if first <= cell <= last else outside for cell in range(cells)]
    bar.insert(cells // 2, mark)
    end = "›" if upper * scale > cells else " "
    return "".join(bar) + (">" if ascii_only and end != " " else end)


class TerminalProgress:
    """Draws stages and the interval closing on the limit: in place on a terminal, as plain lines elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live: Live | None = None
        self._stage = ""
        self._look = ""
        self._told = -1
        self._started = time.monotonic()

    def __enter__(self) -> TerminalProgress:
        if self.console.is_terminal:
            self._live = Live(get_renderable=self._render, console=self.console, transient=True, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _render(self) -> Text:
        elapsed = int(time.monotonic() - self._started)
        first = f"{elapsed // 60}:{elapsed % 60:02d}  {self._stage}"
        return Text(escaped(first if not self._look else f"{first}\n{self._look}"))

    def stage(self, text: str) -> None:
        if text == self._stage:
            return
        # Without a terminal the two stages that alternate in every round would fill the log; the looks tell enough.
        quiet = self._look and text in ("sampling rollouts", "scoring with the trainer")
        self._stage = text
        if self._live is None and not quiet:
            self._print(text)

    def step(self, text: str, *, first: bool) -> None:
        if self._live is not None or first:
            self.stage(text)

    def look(self, gate: Gate, *, metric: str, max_prompts: int) -> None:
        lower, upper = gate.interval
        ascii_only = not (self.console.encoding or "").lower().startswith("utf")
        self._look = (
            f"prompts {gate.prompts:>3}/{max_prompts}  {metric} {lower:.2g} to {upper:.2g}, limit {gate.limit:.2g}  "
            f"{interval_bar(gate, cells=20, ascii_only=ascii_only)}"
        )
        if self._live is None:
            self._print(self._look)

    def training(self, text: str, done: int, total: int, seconds_left: float | None) -> None:
        left = "" if seconds_left is None else f", about {duration(seconds_left)} left"
        self._stage = f"training {done + 1} of {total}{left}: {text}"
        # Without a terminal: a line per training, not one per step.
        if self._live is None and done != self._told:
            self._told = done
            self._print(f"training {done + 1} of {total}{left}: {text.partition(':')[0]}")

    def _print(self, line: str) -> None:
        self.console.print(escaped(line), markup=False)


def duration(seconds: float) -> str:
    """`40 s`, `12 min`, `2 h 05 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"
