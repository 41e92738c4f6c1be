"""What `opdcheck budget show` and `opdcheck budget verify` print."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from opdcheck.budget import Budget, Change, Environment, comparisons, limit_list
from opdcheck.calibration.records import Backtest
from opdcheck.errors import ExitCode
from opdcheck.fingerprint import ModelFingerprint, shorten
from opdcheck.report import backtest as backtested
from opdcheck.report.calibration import describe_method, facts, finding, level_rows
from opdcheck.report.layout import Page
from opdcheck.units import LOST, lost, number, plural, quantity

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.text import Text


def show(budget: Budget, console: Console) -> None:
    """Prints a budget for a person."""
    console.print(_Shown(budget))


def verify(
    budget: Budget,
    student: ModelFingerprint,
    teacher: ModelFingerprint | None,
    environment: Environment,
    console: Console,
) -> ExitCode:
    """Prints every fingerprinted field with `ok` or `changed`.

    Returns:
        ADMITTED (0) when all agree, NO_VERDICT (3) when the budget is not valid here.
    """
    fields = comparisons(budget, student, teacher, environment)
    console.print(_Verified(budget, fields))
    return ExitCode.NO_VERDICT if any(field.differs for field in fields) else ExitCode.ADMITTED


@dataclass(frozen=True)
class _Shown:
    budget: Budget

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        page, budget = Page.of(options), self.budget
        of = f" of {budget.created[:10]}" if budget.created else ""
        yield from page.heading(budget.name, f"{budget.provenance} budget{of}")
        yield from page.rows(_origin(budget))
        yield ""
        yield from page.heading("Limits", "of the mean over tokens and prompts" if budget.limits.total else "")
        yield from page.rows(_limits(budget))
        yield from _calibration(page, budget)
        yield from _floor(page, budget)
        yield ""
        yield from page.heading("Made for")
        yield from page.rows(_made_for(budget))
        yield from _warnings(page, budget)


@dataclass(frozen=True)
class _Verified:
    budget: Budget
    fields: list[Change]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        page, changed = Page.of(options), [field for field in self.fields if field.differs]
        word = page.text("NOT VALID here", "bold red") if changed else page.text("VALID here", "bold green")
        yield from page.heading(self.budget.name, word)
        yield from page.rows(
            (
                page.text("changed", "red") if field.differs else page.text("ok", "green"),
                field.field,
                f"{shorten(field.stored)} -> {shorten(field.found)}" if field.differs else shorten(field.found),
            )
            for field in self.fields
        )
        if changed:
            yield from page.paragraph(_what_to_do(changed))
        yield from _warnings(page, self.budget)


def show_backtest(result: Backtest, console: Console) -> None:
    """Prints every held-out configuration, by mismatch, and the summary."""
    console.print(_Backtested(result))


@dataclass(frozen=True)
class _Backtested:
    result: Backtest

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        page, result = Page.of(options), self.result
        about = [f"margin {lost(result.quality, result.margin)}", plural(len(result.seeds), "seed")]
        rows = backtested.rows(result)
        limits = {row["limit"] for row in rows}
        if len(limits) == 1:
            about.insert(0, f"limit {limits.pop()}")
        yield from page.heading("Backtest", ", ".join(about))
        columns = [title for title in backtested.COLUMNS if title != "limit" or limits]
        if not page.fits([columns, *([row[title] for title in columns] for row in rows)], range(len(columns))):
            columns.remove("prompts")
        header = [page.text(title, "dim") for title in columns]
        numeric = [at for at, title in enumerate(columns) if title in backtested.NUMERIC]
        yield from page.rows(
            [header, *([_marked(page, title, row[title]) for title in columns] for row in rows)], numeric=numeric
        )
        yield ""
        yield from page.paragraph(backtested.summary(result))


def _marked(page: Page, title: str, cell: str) -> Text:
    return page.text(cell, "bold red" if title == "agree" and cell == "NO" else "")


def _what_to_do(changed: list[Change]) -> str:
    declare = "Make a budget for what is there now: `opdcheck budget declare`."
    if len(changed) > 1:
        return declare
    return f"{declare} Or forgive this one field with `opdcheck admit --accept-stale {changed[0].field}`."


def _origin(budget: Budget) -> Iterator[tuple[str, str]]:
    if budget.declared_by:
        yield "declared by", budget.declared_by
    if budget.reason:
        yield "reason", budget.reason
    if budget.method:
        yield "method", describe_method(budget.method)


def _limits(budget: Budget) -> Iterator[tuple[str, str]]:
    limits = budget.limits
    yield from ((where, quantity(metric, value)) for where, metric, value in limit_list(limits))
    if limits.prefix_shift is not None:
        yield "prefix_shift", f"{number(limits.prefix_shift)} nats/token"
    for metric, tail in limits.tails.items():
        for name, value in tail.model_dump(exclude_none=True).items():
            yield f"tails.{metric}.{name}", number(value)


def _calibration(page: Page, budget: Budget) -> Iterator[str | Text]:
    """What a calibrated limit rests on: the levels, and the fit."""
    if budget.fit is None:
        return
    yield ""
    yield from page.heading("Calibration", LOST[budget.fit.quality])
    yield from page.paragraph(finding(budget))
    header = [page.text(title, "dim") for title in ("level", "tv", "k3", "loss", "at most", "test")]
    rows = [[row.level, row.tv, row.k3, row.loss, row.upper, row.test] for row in level_rows(budget)]
    yield from page.rows([header, *rows], numeric=(1, 2, 3, 4))
    yield ""
    yield from page.rows(facts(budget))
    if budget.backtest is not None:
        yield from page.paragraph(backtested.summary(budget.backtest))


def _floor(page: Page, budget: Budget) -> Iterator[str | Text]:
    floor = budget.floor
    if floor is None:
        return
    yield ""
    yield from page.heading("Floor", f"{plural(floor.prompts, 'prompt')}, {plural(floor.tokens, 'token')}")
    metrics = list(floor.kernel)
    header = [page.text(title, "dim") for title in ("", "kernel", "trainer_null")]
    rows = [
        [
            metric,
            number(floor.kernel[metric]),
            number(floor.trainer_null[metric]) if metric in floor.trainer_null else "-",
        ]
        for metric in metrics
    ]
    yield from page.rows([header, *rows], numeric=(1, 2))


def _made_for(budget: Budget) -> Iterator[tuple[str, str]]:
    for side, model in (("student", budget.student), ("teacher", budget.teacher)):
        if model is None:
            continue
        yield side, model.name
        for name in ("weights", "tokenizer", "chat_template"):
            yield f"{side}.{name}", shorten(getattr(model, name))
    for name, value in budget.environment.model_dump(exclude_none=True).items():
        yield f"environment.{name}", str(value)


def _warnings(page: Page, budget: Budget) -> Iterator[str | Text]:
    found = budget.warnings()
    if found:
        yield ""
        yield from page.heading("Warnings")
        yield from page.rows((page.text("!", "yellow"), warning) for warning in found)
