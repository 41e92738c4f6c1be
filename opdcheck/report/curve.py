"""The picture of a calibration: quality lost against mismatch, all seeds, the fit, the margin and the limit."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from opdcheck.budget import Budget
from opdcheck.calibration.file import QualityName
from opdcheck.calibration.records import Backtest, Evidence, Fit, Fitted
from opdcheck.units import LOST, number

SIZE_INCHES = (8.0, 4.8)
DOTS_PER_INCH = 150
MARKERS = {"noise": "o", "logit_noise": "v", "staleness": "s", "quantization": "^", "kv_cache": "D"}
COLOURS = {
    "noise": "#1f77b4",
    "logit_noise": "#17becf",
    "staleness": "#2ca02c",
    "quantization": "#d62728",
    "kv_cache": "#9467bd",
}
VERDICTS = {"admit": ("#2ca02c", "o"), "inconclusive": ("#7f7f7f", "D"), "reject": ("#d62728", "s")}


def draw(budget: Budget, *, format: str = "png") -> bytes:
    """A calibrated budget's curve as an image, losses in the quality's own unit.

    Args:
        format: `png` or `svg`.

    Raises:
        ValueError: the budget was not calibrated.
    """
    fit = _fit_of(budget)
    with _figure(1, format) as (panels, image):
        _panel(panels[0], budget, fit, unit=1.0)
        panels[0].set_ylabel(LOST[fit.quality])
    return image.getvalue()


def draw_side_by_side(budgets: Sequence[Budget], *, format: str = "png") -> bytes:
    """Several budgets' curves on the same axes, losses as a share of each budget's own gain.

    What one method loses and what another does have no unit in common; the share of what each has to lose is one.

    Raises:
        ValueError: a budget was not calibrated, or they measure mismatch on different scales.
    """
    fits = [_fit_of(budget) for budget in budgets]
    metrics = sorted({fit.metric for fit in fits})
    if len(metrics) > 1:
        raise ValueError(f"expected budgets on the same scale, found {', '.join(metrics)}")
    with _figure(len(budgets), format) as (panels, image):
        for panel, budget, fit in zip(panels, budgets, fits, strict=True):
            _panel(panel, budget, fit, unit=fit.gain)
        panels[0].set_ylabel("quality lost, as a share of the unperturbed run's gain")
    return image.getvalue()


def draw_backtest(backtest: Backtest, *, format: str = "png") -> bytes:
    """Held-out configurations: loss of full trainings against mismatch over limit, coloured by the gate's verdict.

    A bar reaches from the mean to the bound that has to be within the margin. Configurations that the budget has no
    limit for were not measured and are left out.
    """
    with _figure(1, format) as (panels, image):
        axes = panels[0]
        axes.axhspan(0, backtest.margin, color="#e6a000", alpha=0.08, linewidth=0)
        axes.axhline(0, color="#999999", linewidth=0.6)
        margin = f"margin {number(backtest.margin)}"
        axes.axhline(backtest.margin, color="#e6a000", linewidth=1, linestyle="--", label=margin)
        axes.axvline(1, color="#333333", linewidth=1.3, linestyle=":", label="limit")
        for verdict, (colour, marker) in VERDICTS.items():
            rows = [row for row in backtest.rows if row.verdict == verdict and None not in (row.limit, row.mismatch)]
            if rows:
                xs, means = [1 + row.distance for row in rows], [row.mean for row in rows]
                bounds = [[0.0] * len(rows), [row.upper - row.mean for row in rows]]
                axes.errorbar(xs, means, bounds, fmt="none", ecolor=colour, elinewidth=0.8, alpha=0.6)
                label = f"{verdict} ({len(rows)})"
                axes.scatter(xs, means, s=30, marker=marker, color=colour, label=label, zorder=3)
        axes.set_xlim(left=0)
        axes.set_xlabel("mismatch over limit, as the gate measured it")
        axes.set_ylabel(LOST[backtest.quality])
        title = f"Backtest: held-out configurations, mean of {len(backtest.seeds)} seeds and its upper bound"
        axes.set_title(title, loc="left", fontsize=10)
        axes.legend(frameon=False, loc="upper left", title="the gate's verdict", alignment="left")
        axes.spines[["top", "right"]].set_visible(False)
    return image.getvalue()


@contextmanager
def _figure(panels: int, format: str) -> Iterator[tuple[list[Any], io.BytesIO]]:
    """Axes to draw on; the image is there when the block has ended. The same drawing gives the same bytes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    width, height = SIZE_INCHES
    image = io.BytesIO()
    with pyplot.rc_context({"svg.hashsalt": "opdcheck", "font.size": 9}):
        figure, axes = pyplot.subplots(
            1,
            panels,
            figsize=(width * (1 + 0.6 * (panels - 1)), height),
            sharey=True,
            squeeze=False,
            layout="constrained",
        )
        try:
            yield list(axes[0]), image
            metadata = {"Software": None} if format == "png" else {"Date": None}
            figure.savefig(image, format=format, dpi=DOTS_PER_INCH, metadata=metadata)
        finally:
            pyplot.close(figure)


def _panel(axes: Any, budget: Budget, fit: Fitted, *, unit: float) -> None:
    _points(axes, budget.evidence, fit, unit)
    _fits(axes, fit, unit)
    axes.set_xlabel(f"mismatch as admit measures it: {fit.metric}")
    axes.set_title(_title(budget), loc="left", fontsize=10)
    axes.legend(frameon=False, loc="upper left")
    axes.spines[["top", "right"]].set_visible(False)


def _fit_of(budget: Budget) -> Fitted:
    if budget.fit is None or not budget.evidence:
        raise ValueError(f"budget {budget.name} has no calibration to draw")
    return budget.fit


def losses(evidence: list[Evidence], quality: QualityName) -> list[tuple[Evidence, list[float]]]:
    """Each level's loss per seed against the unperturbed level: positive is worse."""
    clean = next(one for one in evidence if one.source == "none")
    start = clean.reached(quality)
    return [
        (one, [value - base for value, base in zip(one.reached(quality), start, strict=True)])
        for one in evidence
        if one.source != "none"
    ]


def _points(axes: Any, evidence: list[Evidence], fit: Fitted, unit: float) -> None:
    labelled = set()
    for one, lost in losses(evidence, fit.quality):
        mismatch, colour = one.mismatch[fit.metric], COLOURS.get(one.source, "#555555")
        axes.scatter(
            [mismatch] * len(lost), [value / unit for value in lost], s=9, color=colour, alpha=0.35, linewidths=0
        )
        label = None if one.source in labelled else one.source.replace("_", " ")
        labelled.add(one.source)
        mean = sum(lost) / len(lost) / unit
        axes.scatter([mismatch], [mean], s=36, marker=MARKERS.get(one.source, "o"), color=colour, label=label)


def _fits(axes: Any, fit: Fitted, unit: float) -> None:
    """Margin, hinge and limit: one for all, or one for each source in its colour."""
    margin = fit.total.margin / unit
    axes.axhline(0, color="#999999", linewidth=0.6)
    axes.axhline(margin, color="#e6a000", linewidth=1, linestyle="--", label=f"margin {number(margin)}")
    highest = axes.get_xlim()[1]
    for source, one in fit.by_source.items() or {"": fit.total}.items():
        _hinge_and_limit(axes, source, one, unit, highest)
    axes.set_xlim(0, highest)


def _hinge_and_limit(axes: Any, source: str, fit: Fit, unit: float, highest: float) -> None:
    colour = COLOURS.get(source, "#333333")
    of = f", {source}" if source else ""
    xs = [0.0, fit.threshold, highest]
    rise = [fit.slope * max(0.0, x - fit.threshold) / unit for x in xs]
    axes.plot(xs, rise, color=colour, linewidth=1.1, label=f"hinge{of}")
    if fit.limit is not None:
        label = f"limit {number(fit.limit)}{of}{' (censored)' if fit.censored else ''}"
        axes.axvline(fit.limit, color=colour, linewidth=1.3, linestyle=":", label=label)


def _title(budget: Budget) -> str:
    method = "" if budget.method is None else f", {budget.method.kind}"
    seeds = len(budget.evidence[0].seeds)
    return f"{budget.name}{method}: small dots are seeds ({seeds}), large ones their means"


__all__ = ["draw", "draw_backtest", "draw_side_by_side", "losses"]
