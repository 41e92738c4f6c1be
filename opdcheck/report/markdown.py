"""A report for a CI job's summary: GitHub-flavoured Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from opdcheck.report.advice import next_steps
from opdcheck.report.record import Report
from opdcheck.report.terminal import (
    LABELS,
    basis_rows,
    metric_cells,
    metric_notes,
    ordered,
    position_summary,
    source_rows,
)
from opdcheck.text import replaced
from opdcheck.units import number, percent, plural

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~!$&@])")


def to_markdown(report: Report) -> str:
    """The whole report; the verdict is its heading. Names and paths from the user are escaped."""
    return "\n".join(_lines(report)) + "\n"


def escape(text: str) -> str:
    """`text` on one line so that Markdown shows it as it is."""
    return _SPECIAL.sub(r"\\\1", replaced(re.sub(r"\s+", " ", text)))


def code(text: str) -> str:
    """`text` as code on one line; pipes are escaped as tables need it, backticks by longer fences."""
    line = replaced(" ".join(text.split()))
    longest = max((len(run) for run in re.findall("`+", line)), default=0)
    fence = "`" * (longest + 1)
    space = " " if longest else ""
    return f"{fence}{space}{line}{space}{fence}".replace("|", "\\|")


def _sentence(text: str) -> str:
    """Our own sentences: code in backticks stays code, the rest is escaped."""
    parts = re.split(r"`([^`]*)`", text)
    return "".join(code(part) if at % 2 else escape(part) for at, part in enumerate(parts))


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], *, numeric: Sequence[int] = ()) -> Iterator[str]:
    yield "| " + " | ".join(header) + " |"
    yield "|" + "|".join("---:" if at in numeric else "---" for at in range(len(header))) + "|"
    for row in rows:
        yield "| " + " | ".join(row) + " |"
    yield ""


def _lines(report: Report) -> Iterator[str]:
    yield from _verdict(report)
    yield from _next(report)
    yield from _sources(report)
    yield from _metrics(report)
    yield from _basis(report)


def _verdict(report: Report) -> Iterator[str]:
    verdict = report.verdict
    added = ", so not admitted" if verdict.decision == "inconclusive" else ""
    yield f"## opdcheck: {verdict.decision.upper()}{added}"
    yield ""
    yield f"Candidate {code(report.candidate_file)}"
    yield ""
    if verdict.observed:
        yield "**`--observe`: the exit code is 0 all the same; without it this run would not start.**"
        yield ""
    rows = [(f"**{LABELS[reason.effect][0]}**", escape(reason.text)) for reason in ordered(verdict)]
    yield from _table(("", "reason"), rows)


def _next(report: Report) -> Iterator[str]:
    steps = next_steps(report)
    if steps:
        yield "### Next"
        yield ""
        yield from (f"- {_sentence(step)}" for step in steps)
        yield ""


def _sources(report: Report) -> Iterator[str]:
    table, notes = source_rows(report), report.measurement.sources_notes
    if table or notes:
        yield "### Sources, each alone, on the same tokens"
        yield ""
        rows = [
            (escape(name), number(tv), percent(share), how, escape(detail)) for name, tv, share, how, detail in table
        ]
        if rows:
            yield from _table(("source", "tv", "share", "how", ""), rows, numeric=(1, 2))
        yield from (f"- {escape(note)}" for note in notes)
        if notes:
            yield ""


def _metrics(report: Report) -> Iterator[str]:
    measurement, verdict = report.measurement, report.verdict
    yield "### Mismatch"
    yield ""
    cached = ", from the cache" if measurement.from_cache else ""
    yield escape(
        f"{plural(measurement.prompts, 'prompt')}, {plural(measurement.tokens, 'token')}, {measurement.engine}{cached}"
    )
    yield ""
    rows = []
    for name, summary in measurement.metrics.items():
        label = f"**{escape(name)}** \\*" if name == verdict.metric else escape(name)
        rows.append((label, *metric_cells(summary)))
    header = ("metric", "mean", "s.e.", "p99", "p99.9", "max", "estimator")
    yield from _table(header, rows, numeric=range(1, 6))
    yield from (f"- {escape(note)}" for note in metric_notes(measurement, verdict))
    if len(measurement.by_position) > 1:
        yield f"- By position: {escape(position_summary(measurement))}"
    yield ""
    if measurement.provenance:
        parts = [(escape(part.part), f"**{part.how}**", escape(part.detail)) for part in measurement.provenance]
        yield from _table(("part", "how", ""), parts)


def _basis(report: Report) -> Iterator[str]:
    yield "### Basis"
    yield ""
    yield from _table(("", ""), [(name, escape(text)) for name, text in basis_rows(report)])
