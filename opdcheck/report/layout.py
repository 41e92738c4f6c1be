"""Pieces that terminal reports are built from: they fit 80 columns, and work without colour and without Unicode."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import ConsoleOptions
from rich.text import Text

from opdcheck.units import number

INDENT = 2
GAP = 2
MIN_COLUMN = 16
"""A last column narrower than this is moved below its row."""
MAX_WIDTH = 100
"""Lines longer than this are hard to read, however wide the terminal is."""


@dataclass(frozen=True)
class Glyphs:
    """Characters of bars and sparklines."""

    outside: str
    inside: str
    limit: str
    mean: str
    block: str
    levels: str
    """Of a sparkline, lowest first."""


UNICODE = Glyphs(outside="─", inside="━", limit="┃", mean="●", block="█", levels="▁▂▃▄▅▆▇█")
ASCII = Glyphs(outside="-", inside="=", limit="|", mean="o", block="#", levels="_.:-=+*#")


@dataclass(frozen=True)
class Page:
    """How wide a report is and which characters it may use."""

    width: int
    ascii_only: bool

    @classmethod
    def of(cls, options: ConsoleOptions) -> Page:
        return cls(width=min(options.max_width, MAX_WIDTH), ascii_only=options.ascii_only)

    @property
    def glyphs(self) -> Glyphs:
        return ASCII if self.ascii_only else UNICODE

    def text(self, content: str, style: str = "") -> Text:
        """`content` on one logical line, with nothing in it that the terminal would obey or cannot show."""
        line = " ".join(content.split())
        shown = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in line)
        if self.ascii_only:
            shown = shown.encode("ascii", "backslashreplace").decode()
        return Text(shown, style=style)

    def heading(self, title: str, detail: str | Text = "") -> Iterator[Text]:
        """A section's title, and in plain weight what it is about."""
        return self.titled(self.text(title, "bold"), detail)

    def titled(self, title: Text, detail: str | Text) -> Iterator[Text]:
        """`title`, and beside it `detail`, wrapped."""
        tail = detail if isinstance(detail, Text) else self.text(detail)
        return self._hanging(Text.assemble(title, " " * GAP), tail)

    def rows(self, rows: Iterable[Sequence[str | Text]], *, numeric: Sequence[int] = ()) -> Iterator[Text]:
        """Indented columns, two spaces apart. All but the last keep their width; the last wraps inside itself.

        Args:
            numeric: columns that are aligned to the right.
        """
        table = [[cell if isinstance(cell, Text) else self.text(cell) for cell in row] for row in rows]
        columns = max((len(row) for row in table), default=0)
        widths = [max(cell_len(row[at].plain) for row in table if at < len(row)) for at in range(columns)]
        for row in table:
            head = Text(" " * INDENT)
            for at, cell in enumerate(row[:-1]):
                gap = " " * (widths[at] - cell_len(cell.plain))
                head.append(gap if at in numeric else "").append_text(cell)
                head.append("" if at in numeric else gap).append(" " * GAP)
            if len(row) - 1 in numeric:
                head.append(" " * (widths[len(row) - 1] - cell_len(row[-1].plain)))
            yield from self._hanging(head, row[-1])

    def fits(self, rows: Iterable[Sequence[str]], columns: Sequence[int]) -> bool:
        """Whether these columns of the rows can stand side by side."""
        table = list(rows)
        return sum(max(cell_len(row[at]) for row in table) + GAP for at in columns) <= self.width

    def _hanging(self, head: Text, tail: Text) -> Iterator[Text]:
        """`head`, then `tail` wrapped beside it; below it, further left, where too little room would remain."""
        room = self.width - cell_len(head.plain)
        if room < min(MIN_COLUMN, cell_len(tail.plain)):
            yield _line(head)
            head = Text(" " * INDENT * 2)
            room = self.width - len(head)
        wrapped = textwrap.wrap(tail.plain, max(room, 1), break_on_hyphens=False) or [""]
        margin = " " * cell_len(head.plain)
        for at, part in enumerate(wrapped):
            line = head.copy() if at == 0 else Text(margin)
            yield _line(line.append(part, tail.style))

    def paragraph(self, content: str) -> Iterator[Text]:
        """Indented text, wrapped."""
        return self.rows([[content]])

    def cells(self, share: float, width: int) -> str:
        """A bar of `share` (of 1) of `width` cells."""
        return self.glyphs.block * round(min(max(share, 0), 1) * width) if math.isfinite(share) else ""

    def sparkline(self, values: Sequence[float]) -> str:
        """One character per value, from 0 to the largest."""
        finite = [value for value in values if math.isfinite(value)]
        top = max(finite, default=0.0)
        levels = self.glyphs.levels
        if top <= 0:
            return levels[0] * len(values)
        return "".join(
            levels[min(int(max(value, 0) / top * len(levels)), len(levels) - 1)] if math.isfinite(value) else "?"
            for value in values
        )

    def interval(self, *, mean: float, lower: float, upper: float, limit: float) -> list[Text]:
        """Two lines: the interval around the mean on an axis from 0, and below it where the limit is.

        ```
        0 ----------|---------=====o======------------ 0.0657
                    ^ limit 0.015
        ```
        """
        glyphs = self.glyphs
        known = [value for value in (mean, limit) if math.isfinite(value)]
        # An interval that is still wide would squeeze what matters into the first cells; it runs out of the picture.
        top = min(max(max(known), upper) * 1.15, max(known) * 2.5)
        top = top if math.isfinite(top) else limit * 2.5
        right = f"{'>' if upper > top else ''} {number(top)}"
        width = max(self.width - 2 * INDENT - 2 - len(right), 10)

        def cell(value: float) -> int:
            return min(max(int(value / top * width), 0), width - 1) if math.isfinite(value) else width - 1

        axis = [glyphs.outside] * width
        axis[cell(lower) : cell(upper) + 1] = [glyphs.inside] * (cell(upper) + 1 - cell(lower))
        axis[cell(limit)] = glyphs.limit
        axis[cell(mean)] = glyphs.mean
        at, label = cell(limit), f"limit {number(limit)}"
        fits = at + 2 + len(label) <= width + len(right)
        below = " " * at + f"^ {label}" if fits else " " * (at - len(label) - 1) + f"{label} ^"
        margin = " " * INDENT
        return [_line(Text(f"{margin}0 {''.join(axis)}{right}")), _line(Text(f"{margin}  {below}"))]


def _line(text: Text) -> Text:
    """Without trailing spaces, and never wrapped again."""
    text.rstrip()
    text.no_wrap, text.overflow = True, "fold"
    return text
