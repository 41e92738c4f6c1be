"""A report for a person at a terminal: the verdict first, then why, then everything that was measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

from opdcheck.measurement import Measurement, MetricSummary, PositionBin
from opdcheck.report.advice import next_steps
from opdcheck.report.layout import Page
from opdcheck.report.record import Report
from opdcheck.units import number, percent, plural
from opdcheck.verdict import Effect, Reason, Verdict, floor_share

STYLES = {"admit": "bold green", "reject": "bold red", "inconclusive": "bold yellow"}
LABELS: dict[Effect, tuple[str, str]] = {
    "reject": ("reject", "red"),
    "inconclusive": ("open", "yellow"),
    "pass": ("ok", "green"),
    "note": ("note", "dim"),
}
BAR_CELLS = 12
TREND_P = 0.05
"""Below it tv is said to grow or shrink along the sequence."""
METRIC_COLUMNS = ([0, 1, 2, 3, 4, 5, 6], [0, 1, 3, 4, 5, 6], [0, 1, 4, 5, 6], [0, 1, 4, 5])
"""Columns of the metrics' table, widest choice first; the first that fits is shown."""


def render(report: Report) -> RenderableType:
    """Something that `rich.console.Console.print` prints, in as many columns and characters as the console has."""
    return _Rendered(report)


@dataclass(frozen=True)
class _Rendered:
    report: Report

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        page, report = Page.of(options), self.report
        yield from _verdict(page, report)
        yield from _metrics(page, report)
        yield from _positions(page, report.measurement)
        yield from _sources(page, report)
        yield from _provenance(page, report.measurement)
        yield from _basis(page, report)
        yield from _next(page, report)


def ordered(verdict: Verdict) -> list[Reason]:
    """The reasons as they are read: what stands against the candidate, what holds, what should be known."""
    order = list(LABELS)
    return sorted(verdict.reasons, key=lambda reason: order.index(reason.effect))


def _verdict(page: Page, report: Report) -> Iterator[RenderableType]:
    verdict = report.verdict
    word = page.text(verdict.decision.upper(), STYLES[verdict.decision])
    added = ", so not admitted" if verdict.decision == "inconclusive" else ""
    yield from page.titled(Text.assemble(word, added), page.text(report.candidate_file, "bold"))
    if verdict.observed:
        yield from page.paragraph("--observe: exit code 0 all the same; without it this run would not start.")
    yield Text("")
    yield from page.rows(
        (page.text(label, style), reason.text)
        for reason in ordered(verdict)
        for label, style in [LABELS[reason.effect]]
    )
    lower, upper = verdict.interval
    yield Text("")
    # Of the clipped mean; the mean itself can lie above it, and has no upper end then.
    upper = max(upper, verdict.mean) if verdict.clipped else upper
    yield from page.interval(mean=verdict.mean, lower=lower, upper=upper, limit=verdict.limit)


def _metrics(page: Page, report: Report) -> Iterator[RenderableType]:
    measurement, verdict = report.measurement, report.verdict
    cached = ", from the cache" if measurement.from_cache else ""
    yield Text("")
    yield from page.heading(
        "Mismatch",
        f"{plural(measurement.prompts, 'prompt')}, {plural(measurement.tokens, 'token')}, {measurement.engine}{cached}",
    )
    header = ["", "mean", "s.e.", "p99", "p99.9", "max", "estimator"]
    table = [header]
    for name, summary in measurement.metrics.items():
        table.append([f"{name} *" if name == verdict.metric else name, *metric_cells(summary)])
    columns = next((columns for columns in METRIC_COLUMNS if page.fits(table, columns)), METRIC_COLUMNS[-1])
    styles = ["dim", *("bold" if name == verdict.metric else "" for name in measurement.metrics)]
    rows = [[page.text(row[at], style) for at in columns] for row, style in zip(table, styles, strict=True)]
    yield from page.rows(rows, numeric=[at for at, column in enumerate(columns) if 1 <= column <= 5])
    for text in metric_notes(measurement, verdict):
        yield from page.paragraph(text)


def metric_cells(summary: MetricSummary) -> list[str]:
    """Mean, standard error, p99, p99.9, maximum, estimator."""
    error = "-" if summary.standard_error is None else number(summary.standard_error, 2)
    tails = [number(value) for value in (summary.p99, summary.p99_9, summary.max)]
    return [number(summary.mean), error, *tails, summary.estimator]


def metric_notes(measurement: Measurement, verdict: Verdict) -> Iterator[str]:
    """What the table of metrics does not say by itself."""
    yield "* decides. kl, k1, k3, abs_dlogp in nats/token."
    if bounds := list(_bounds(measurement)):
        yield f"Certain, whatever the engine hides: {', '.join(bounds)}."
    ess = percent(measurement.ess)
    yield f"chi2_token {number(measurement.chi2_token)}, effective sample size {ess} of the tokens (no truncation)."
    if floor := floor_share(verdict):
        yield floor
    if measurement.truncated:
        yield f"{measurement.truncated:,} of {plural(measurement.completions, 'completion')} cut at the length limit."


def _bounds(measurement: Measurement) -> Iterator[str]:
    for name, summary in measurement.metrics.items():
        if summary.estimator == "topk" and summary.lower is not None:
            lower, upper = number(summary.lower), summary.upper
            yield f"{name} at least {lower}" if upper is None else f"{name} {lower} to {number(upper)}"


def _positions(page: Page, measurement: Measurement) -> Iterator[RenderableType]:
    bins = measurement.by_position
    if len(bins) < 2:
        return
    yield Text("")
    yield from page.heading("By position", position_summary(measurement))
    rows = [("tv", page.sparkline([one.tv for one in bins])), ("kl", page.sparkline([one.kl for one in bins]))]
    yield from page.rows(rows)


def position_summary(measurement: Measurement) -> str:
    """tv of the first and the last tokens, and its trend: `tv 0.02 (tokens 0-15) to 0.03 (112-127), grows (p 0.003)`.

    p is of a test over prompts: second halves of the completions against first halves; see `mismatch.position`.
    """
    bins, change, p = measurement.by_position, measurement.position_change, measurement.position_p
    first, last = bins[0], bins[-1]
    ends = f"tv {number(first.tv)} (tokens {_span(first)}) to {number(last.tv)} ({_span(last)})"
    if change is None or p is None:
        return ends
    word = "no clear trend" if p >= TREND_P else "grows" if change > 0 else "shrinks"
    return f"{ends}, {word} ({'p < 0.001' if p < 0.001 else f'p {number(p, 2)}'})"


def _span(one: PositionBin) -> str:
    return f"{one.start}-{one.stop - 1}"


def _sources(page: Page, report: Report) -> Iterator[RenderableType]:
    table, notes = source_rows(report), report.measurement.sources_notes
    if not table and not notes:
        return
    yield Text("")
    yield from page.heading("Sources", "each alone, on the same tokens, in tv")
    rows = [
        (name, number(tv), percent(share), page.cells(share, BAR_CELLS), f"{how}: {detail}" if how else detail)
        for name, tv, share, how, detail in table
    ]
    yield from page.rows(rows, numeric=(1, 2))
    for note in notes:
        yield from page.paragraph(note)


def source_rows(report: Report) -> list[tuple[str, float, float, str, str]]:
    """(source, tv, share of the total tv, real or simulated, detail): the floor, each source, the rest, the total.

    All of them over the same prompts, which are the first of those measured where memory did not hold all.
    """
    measurement, floor = report.measurement, report.budget.floor
    if not measurement.sources:
        return []
    total = measurement.sources_total
    rows = [(share.source, share.tv, share.how, share.detail) for share in measurement.sources]
    named = [row[0] for row in rows]
    if floor is not None and "tv" in floor.kernel and "kernel" not in named:
        rows.insert(0, ("kernel", floor.kernel["tv"], "real", "floor, from the budget"))
    ordered_rows: list[tuple[str, float, str, str]] = [*rows]
    if measurement.left_over is not None:
        # Total variations need not add up: errors of two sources can cancel, and they can be the same errors.
        why = "the sources overlap" if measurement.left_over < 0 else "interaction, or not reproduced alone"
        ordered_rows.append(("left over", measurement.left_over, "", why))
    ordered_rows.append(("total", total, "", _split_on(measurement)))
    return [(name, tv, tv / total if total > 0 else 0.0, how, detail) for name, tv, how, detail in ordered_rows]


def _split_on(measurement: Measurement) -> str:
    """What the shares and their total are of, where memory did not hold all prompts."""
    split, prompts = measurement.sources_prompts, measurement.prompts
    if split is None or split >= prompts:
        return ""
    whole = number(measurement.metrics["tv"].mean)
    return f"of the first {plural(split, 'prompt')} measured, as the sources; {whole} of all {prompts}"


def _provenance(page: Page, measurement: Measurement) -> Iterator[RenderableType]:
    if not measurement.provenance:
        return
    styles = {"real": "", "simulated": "yellow", "not applied": "red"}
    yield Text("")
    yield from page.heading("Candidate as measured")
    yield from page.rows(
        (part.part, page.text(part.how, styles[part.how]), part.detail) for part in measurement.provenance
    )


def _basis(page: Page, report: Report) -> Iterator[RenderableType]:
    yield Text("")
    yield from page.heading("Basis")
    yield from page.rows(basis_rows(report))


def basis_rows(report: Report) -> list[tuple[str, str]]:
    """What the verdict rests on: budget, student, environment, time."""
    budget, environment = report.budget, report.environment
    versions = [f"torch {environment.torch}", f"transformers {environment.transformers}"]
    versions += [f"vllm {environment.vllm}"] if environment.vllm else []
    return [
        ("budget", f"{budget.name}, {budget.provenance} {(budget.created or 'undated')[:10]} ({budget.file})"),
        ("student", f"{report.student.name}, trainer in {environment.trainer_dtype}"),
        ("environment", f"{environment.device}, {', '.join(versions)}"),
        ("measured", f"{report.created} by opdcheck {report.opdcheck_version} in {number(report.seconds)} s"),
    ]


def _next(page: Page, report: Report) -> Iterator[RenderableType]:
    steps = next_steps(report)
    if not steps:
        return
    yield Text("")
    yield from page.heading("Next")
    yield from page.rows(("-", step) for step in steps)
