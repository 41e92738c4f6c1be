"""The picture of a calibration: quality lost against mismatch, all seeds, the fit, the margin and the limit."""

from __future__ import annotations

import io
from typing import Any

from opdcheck.budget import Budget
from opdcheck.calibration.file import QualityName
from opdcheck.calibration.records import Evidence, Fit, Fitted
from opdcheck.units import LOST, number

SIZE_INCHES = (8.0, 4.8)
MARKERS = {"noise": "o", "logit_noise": "v", "staleness": "s", "quantization": "^", "kv_cache": "D"}
COLOURS = {
    "noise": "#1f77b4",
    "logit_noise": "#17becf",
    "staleness": "#2ca02c",
    "quantization": "#d62728",
    "kv_cache": "#9467bd",
}


def draw(budget: Budget, *, format: str = "png", dots_per_inch: int = 150) -> bytes:
    """A calibrated budget's curve as an image.

    Args:
        format: `png` or `svg`.

    Raises:
        ValueError: the budget was not calibrated.
    """
    if budget.fit is None or not budget.evidence:
        raise ValueError(f"budget {budget.name} has no calibration to draw")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context({"svg.hashsalt": "opdcheck", "font.size": 9}):
        figure, axes = pyplot.subplots(figsize=SIZE_INCHES, layout="constrained")
        _points(axes, budget.evidence, budget.fit)
        axes.autoscale(False)
        _fit(axes, budget.fit)
        axes.set_xlabel(f"mismatch as admit measures it: {budget.fit.metric}")
        axes.set_ylabel(LOST[budget.fit.quality])
        axes.set_title(_title(budget), loc="left", fontsize=10)
        axes.legend(frameon=False, loc="upper left")
        axes.spines[["top", "right"]].set_visible(False)
        image = io.BytesIO()
        metadata = {"Software": None} if format == "png" else {"Date": None}
        figure.savefig(image, format=format, dpi=dots_per_inch, metadata=metadata)
        pyplot.close(figure)
    return image.getvalue()


def losses(evidence: list[Evidence], quality: QualityName) -> list[tuple[Evidence, list[float]]]:
    """Each level's loss per seed against the unperturbed level: positive is worse."""
    clean = next(one for one in evidence if one.source == "none")
    start = clean.reached(quality)
    return [
        (one, [value - base for value, base in zip(one.reached(quality), start, strict=True)])
        for one in evidence
        if one.source != "none"
    ]


def _points(axes: Any, evidence: list[Evidence], fit: Fitted) -> None:
    labelled = set()
    for one, lost in losses(evidence, fit.quality):
        mismatch, colour = one.mismatch[fit.metric], COLOURS.get(one.source, "#555555")
        axes.scatter([mismatch] * len(lost), lost, s=9, color=colour, alpha=0.35, linewidths=0)
        label = None if one.source in labelled else one.source.replace("_", " ")
        labelled.add(one.source)
        mean = sum(lost) / len(lost)
        axes.scatter([mismatch], [mean], s=36, marker=MARKERS.get(one.source, "o"), color=colour, label=label)


def _fit(axes: Any, fit: Fitted) -> None:
    """Hinge and limit: one for all, or one for each source in its colour."""
    axes.axhline(0, color="#999999", linewidth=0.6)
    axes.axhline(
        fit.total.margin, color="#e6a000", linewidth=1, linestyle="--", label=f"margin {number(fit.total.margin)}"
    )
    for source, one in fit.by_source.items() or {"": fit.total}.items():
        _hinge_and_limit(axes, source, one)


def _hinge_and_limit(axes: Any, source: str, fit: Fit) -> None:
    colour = COLOURS.get(source, "#333333")
    of = f", {source}" if source else ""
    xs = sorted({0.0, fit.threshold, axes.get_xlim()[1]})
    axes.plot(
        xs, [fit.slope * max(0.0, x - fit.threshold) for x in xs], color=colour, linewidth=1.1, label=f"hinge{of}"
    )
    if fit.limit is not None:
        label = f"limit {number(fit.limit)}{of}{' (censored)' if fit.censored else ''}"
        axes.axvline(fit.limit, color=colour, linewidth=1.3, linestyle=":", label=label)


def _title(budget: Budget) -> str:
    method = "" if budget.method is None else f", {budget.method.kind}"
    seeds = len(budget.evidence[0].seeds)
    return f"{budget.name}{method}: small dots are seeds ({seeds}), large ones their means"


__all__ = ["draw", "losses"]
