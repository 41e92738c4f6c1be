"""From tokens to the numbers of a report. The prompt is the independent unit of every mean and error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np

from opdcheck.config import Metric
from opdcheck.measurement import Estimator, MetricSummary, PositionBin
from opdcheck.mismatch import metrics
from opdcheck.mismatch.position import PositionChange, position_change
from opdcheck.mismatch.tokens import Floats, TokenMismatch

DECISION_METRICS: tuple[Metric, ...] = get_args(Metric)
"""Metrics that can decide; their per-prompt means are kept."""

_FROM_BEST_TO_WORST: tuple[Estimator, ...] = ("exact", "topk", "sampled")

_OF_SAMPLED_TOKENS = {
    "k1": metrics.k1,
    "k3": metrics.k3,
    "abs_dlogp": metrics.abs_dlogp,
    "token_mult_prob_error": metrics.token_mult_prob_error,
    "probs_diff": metrics.probs_diff,
}


@dataclass(frozen=True)
class Summary:
    """The mismatch of some prompts' completions.

    NaN and infinite tokens are left in: they make the means that they touch NaN or infinite, and `non_finite_tokens`
    says how many there are.
    """

    metrics: dict[str, MetricSummary]
    """tv, kl, k1, k3, abs_dlogp, token_mult_prob_error, probs_diff; argmax_flip where the engine tells its argmax."""
    chi2_token: float
    """Over all tokens together, as verl does; ratios not truncated."""
    ess: float
    """Effective sample size as a share of all tokens; ratios not truncated."""
    prompt_values: dict[str, list[float]]
    """Per-prompt means of `DECISION_METRICS`, in the order given."""
    by_position: list[PositionBin]
    position_change: PositionChange | None
    non_finite_tokens: int


def summarize(by_prompt: Sequence[Sequence[TokenMismatch]], position_bins: int = 8) -> Summary:
    """Aggregates per-token mismatch: mean over all tokens of all samples of a prompt, then mean over prompts.

    Args:
        by_prompt: for each prompt the mismatch of each of its completions.
        position_bins: how many bins of about equal width the completion positions are divided into.

    Raises:
        ValueError: no prompts, a prompt without completions, or a completion without tokens.
    """
    _check(by_prompt, position_bins)
    completions = [completion for prompt in by_prompt for completion in prompt]
    table = _token_table(completions)
    means = {name: _over_prompts(values, by_prompt) for name, values in table.items()}
    positions = np.concatenate([np.arange(len(completion)) for completion in completions])
    return Summary(
        metrics=_metric_summaries(table, means, _worst_estimator(completions)),
        chi2_token=metrics.chi2_token(table["logq"], table["logp"]),
        ess=metrics.ess(table["logq"], table["logp"]),
        prompt_values={name: means[name].tolist() for name in DECISION_METRICS},
        by_position=_by_position(positions, table["tv"], table["kl"], position_bins),
        position_change=position_change(by_prompt),
        non_finite_tokens=_count_non_finite(table),
    )


def prompt_means(by_prompt: Sequence[Sequence[TokenMismatch]], metric: Metric) -> list[float]:
    """`summarize(by_prompt).prompt_values[metric]` to the last digit, without all the rest.

    Raises:
        ValueError: as `summarize`.
    """
    _check(by_prompt, position_bins=1)
    completions = [completion for prompt in by_prompt for completion in prompt]
    means: list[float] = _over_prompts(_token_values(completions, metric), by_prompt).tolist()
    return means


def _over_prompts(values: Floats, by_prompt: Sequence[Sequence[TokenMismatch]]) -> Floats:
    """Means over all tokens of each prompt. [all tokens] -> [prompts]"""
    tokens = [sum(map(len, prompt)) for prompt in by_prompt]
    means: Floats = np.add.reduceat(values, np.cumsum([0, *tokens[:-1]])) / tokens
    return means


def _check(by_prompt: Sequence[Sequence[TokenMismatch]], position_bins: int) -> None:
    if position_bins < 1:
        raise ValueError(f"position_bins must be at least 1, not {position_bins}")
    if not by_prompt:
        raise ValueError("no prompts to summarize")
    for index, prompt in enumerate(by_prompt):
        if not prompt:
            raise ValueError(f"prompt {index} of {len(by_prompt)} has no completions")
        for sample, completion in enumerate(prompt):
            if len(completion) == 0:
                raise ValueError(f"completion {sample} of prompt {index} has no tokens: its mean mismatch is undefined")


def _worst_estimator(completions: Sequence[TokenMismatch]) -> Estimator:
    return max((completion.estimator for completion in completions), key=_FROM_BEST_TO_WORST.index)


def _token_table(completions: Sequence[TokenMismatch]) -> dict[str, Floats]:
    """Every per-token quantity, completions one after another: name -> float64 [all tokens]."""
    fields = ("logq", "logp", "tv", "tv_lower", "tv_upper", "kl", "kl_lower", "argmax_flip")
    return {name: _token_values(completions, name) for name in (*fields, *_OF_SAMPLED_TOKENS)}


def _token_values(completions: Sequence[TokenMismatch], name: str) -> Floats:
    """One per-token quantity, completions one after another: float64 [all tokens]."""
    if name in _OF_SAMPLED_TOKENS:
        return _OF_SAMPLED_TOKENS[name](_token_values(completions, "logq"), _token_values(completions, "logp"))
    return np.concatenate([np.asarray(getattr(completion, name), np.float64) for completion in completions])


def _metric_summaries(
    table: dict[str, Floats], prompt_means: dict[str, Floats], estimator: Estimator
) -> dict[str, MetricSummary]:
    def one(name: str, rests_on: Estimator, lower: float | None = None, upper: float | None = None) -> MetricSummary:
        return _metric_summary(table[name], prompt_means[name], rests_on, lower, upper)

    def mean(name: str) -> float:
        return float(np.mean(prompt_means[name]))

    exact = estimator == "exact"
    summaries = {
        "tv": one("tv", estimator, mean("tv_lower"), mean("tv_upper")),
        "kl": one("kl", estimator, mean("kl_lower"), mean("kl") if exact else None),
    }
    summaries |= {name: one(name, "sampled") for name in _OF_SAMPLED_TOKENS}
    if not np.isnan(table["argmax_flip"]).any():
        summaries["argmax_flip"] = one("argmax_flip", "exact")  # a top-k list, too, starts with the argmax
    return summaries


def _metric_summary(
    values: Floats, prompt_means: Floats, estimator: Estimator, lower: float | None, upper: float | None
) -> MetricSummary:
    prompts = len(prompt_means)
    with np.errstate(invalid="ignore"):  # infinite values: inf - inf
        error = float(np.std(prompt_means, ddof=1)) / math.sqrt(prompts) if prompts > 1 else None
        p99, p99_9 = np.quantile(values, [0.99, 0.999])
    return MetricSummary(
        mean=float(np.mean(prompt_means)),
        standard_error=error,
        lower=lower,
        upper=upper,
        p99=float(p99),
        p99_9=float(p99_9),
        max=float(np.max(values)),
        estimator=estimator,
    )


def _by_position(positions: np.ndarray, tv: Floats, kl: Floats, bins: int) -> list[PositionBin]:
    """Plain token means; no bin is empty, since the longest completion has a token at every position."""
    longest = int(positions.max()) + 1
    edges = np.unique(np.linspace(0, longest, bins + 1).round().astype(int))
    found = []
    for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        inside = (positions >= start) & (positions < stop)
        found.append(
            PositionBin(
                start=start,
                stop=stop,
                tokens=int(inside.sum()),
                tv=float(tv[inside].mean()),
                kl=float(kl[inside].mean()),
            )
        )
    return found


def _count_non_finite(table: dict[str, Floats]) -> int:
    """Tokens with a NaN or infinite log-probability on either side, or whose tv or kl is NaN because of the top-k's."""
    bad = ~(np.isfinite(table["logq"]) & np.isfinite(table["logp"]))
    return int((bad | np.isnan(table["tv"]) | np.isnan(table["kl"])).sum())
