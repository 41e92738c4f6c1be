"""A calibrated budget for people: what was found, in one sentence, as a table, and as an HTML page."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from opdcheck.budget import Budget
from opdcheck.calibration.records import Backtest, BudgetMethod, Fit, Fitted
from opdcheck.report import backtest as backtested
from opdcheck.report.curve import draw, draw_backtest, losses
from opdcheck.units import LOST, lost, number, percent, plural, quantity


@dataclass(frozen=True)
class LevelRow:
    """One level as a report shows it."""

    level: str
    source: str
    tv: str
    k3: str
    loss: str
    upper: str
    test: str
    accuracy: str


def finding(budget: Budget) -> str:
    """The limit and where it comes from, as a sentence.

    Raises:
        ValueError: the budget was not calibrated.
    """
    fit = _fit(budget)
    if not fit.by_source:
        return f"Limit {_limit(fit.total, fit.metric)}."
    listed = "; ".join(f"{source} {_limit(one, fit.metric)}" for source, one in fit.by_source.items())
    strictest = quantity(fit.metric, budget.limits.total[fit.metric])
    return (
        f"The sources differ (p {number(fit.agreement_p or 0.0)}), so each has a limit of its own, and a candidate is "
        f"held to the strictest of those it has. {listed[0].upper()}{listed[1:]}. Anything else: {strictest}."
    )


def _limit(fit: Fit, metric: str) -> str:
    """A limit and what it rests on."""
    if fit.limit is None:
        return "none: not even its lowest level could be certified"
    shown = f"{metric} {quantity(metric, fit.limit)}"
    if fit.censored:
        return f"{shown}, censored (no level lost more than the margin, so the true limit is higher)"
    if fit.limit == fit.certified:
        return f"{shown} (the last level that passed its test)"
    return (
        f"{shown} (the lower bound of the mismatch at which the loss reaches the margin; last level passed: "
        f"{number(fit.certified or 0.0)})"
    )


def level_rows(budget: Budget) -> list[LevelRow]:
    """Every level, by rising mismatch; the unperturbed one first.

    Raises:
        ValueError: the budget was not calibrated.
    """
    fit = _fit(budget)
    tests = {test.name: test for test in fit.total.tests}
    by_level = {one.level: values for one, values in losses(budget.evidence, fit.quality)}
    rows = []
    for one in sorted(budget.evidence, key=lambda one: (one.source != "none", one.mismatch[fit.metric])):
        test, values = tests.get(one.level), by_level.get(one.level)
        rows.append(
            LevelRow(
                level=one.level,
                source=one.source.replace("_", " "),
                tv=number(one.mismatch["tv"]),
                k3=number(one.mismatch["k3"]),
                loss="" if values is None else number(sum(values) / len(values)),
                upper="" if test is None else number(test.upper),
                test="" if test is None else "passed" if test.passed else "failed",
                accuracy="" if one.accuracy is None else percent(sum(one.accuracy) / len(one.accuracy)),
            )
        )
    return rows


def facts(budget: Budget) -> Iterator[tuple[str, str]]:
    """What the limit rests on, as (name, value).

    Raises:
        ValueError: the budget was not calibrated.
    """
    fit = _fit(budget)
    total = fit.total
    yield "gain", f"{lost(fit.quality, fit.gain)} without mismatch (at least {number(fit.gain_lower)})"
    yield "margin", f"{lost(fit.quality, total.margin)}: {percent(fit.margin_share)} of that lower bound"
    yield "certified", "no level" if total.certified is None else f"{fit.metric} {number(total.certified)}"
    rise = f"none up to {fit.metric} {number(total.threshold)}, then {number(total.slope)} per unit of {fit.metric}"
    yield "hinge", rise if total.slope > 0 else "no rise"
    dose = "beyond the highest level" if total.benchmark_dose is None else number(total.benchmark_dose)
    yield "benchmark dose", f"{dose}, lower bound {number(total.bmdl)}"
    if fit.agreement_p is not None:
        agree = "one limit serves all sources" if not fit.by_source else "the sources differ"
        yield "sources", f"{agree} (p {number(fit.agreement_p)})"
    for source, one in fit.by_source.items():
        certified = "no level certified" if one.certified is None else f"certified {number(one.certified)}"
        yield f"  {source}", f"{certified}, dose bound {number(one.bmdl)}"


def describe_method(method: BudgetMethod) -> str:
    """How the student was trained, in a line."""
    loss = {
        "rl": f"group size {method.group_size}",
        "opd": f"beta {method.beta:g}" if method.loss == "full" else "sampled reverse KL",
    }[method.kind]
    off_policy = "" if method.lmbda == 1 else f", lmbda {method.lmbda:g}"
    return (
        f"{method.kind}, {loss}{off_policy}, learning rate {method.learning_rate:g} ({method.schedule}), "
        f"{method.steps} steps of {plural(method.batch_size, 'completion')}, temperature {method.temperature:g}, "
        f"at most {plural(method.max_completion_length, 'token')}"
    )


def render_html(budget: Budget) -> str:
    """A page of its own: picture, table, facts; no scripts, nothing loaded from elsewhere.

    Raises:
        ValueError: the budget was not calibrated.
    """
    from jinja2 import Environment, PackageLoader

    fit = _fit(budget)
    rows = level_rows(budget)
    seeds = len(budget.evidence[0].seeds)
    template = Environment(loader=PackageLoader("opdcheck.report"), autoescape=True).get_template("calibration.html")
    return template.render(
        budget=budget,
        trainings=seeds * len(budget.evidence),
        seeds=seeds,
        finding=finding(budget),
        loss=LOST[fit.quality],
        picture=_inline(draw(budget, format="svg")),
        rows=rows,
        accuracies=any(row.accuracy for row in rows),
        confidence=number(100 * (1 - fit.alpha)),
        facts=list(facts(budget)),
        made_for=list(_made_for(budget)),
        backtest=budget.backtest and _backtested(budget.backtest),
    )


def _backtested(backtest: Backtest) -> dict[str, Any]:
    return {
        "summary": backtested.summary(backtest),
        "picture": _inline(draw_backtest(backtest, format="svg")),
        "columns": backtested.COLUMNS,
        "numeric": backtested.NUMERIC,
        "rows": backtested.rows(backtest),
    }


def _inline(svg: bytes) -> str:
    """Without the XML declaration, which has no place inside a page."""
    text = svg.decode()
    return text[text.index("<svg") :]


def _made_for(budget: Budget) -> Iterator[tuple[str, str]]:
    yield "student", f"{budget.student.name}, weights {budget.student.weights}"
    if budget.teacher is not None:
        yield "teacher", f"{budget.teacher.name}, weights {budget.teacher.weights}"
    if budget.method is not None:
        yield "method", describe_method(budget.method)
    environment = budget.environment.model_dump(exclude_none=True)
    yield "environment", ", ".join(f"{key} {value}" for key, value in environment.items())


def _fit(budget: Budget) -> Fitted:
    if budget.fit is None:
        raise ValueError(f"budget {budget.name} was declared, not calibrated")
    return budget.fit


__all__ = ["LevelRow", "describe_method", "facts", "finding", "level_rows", "render_html"]
