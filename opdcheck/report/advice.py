"""What to do next: concrete things to try, from the record alone."""

from __future__ import annotations

import math

from opdcheck.config import Quantization
from opdcheck.measurement import SourceShare
from opdcheck.report.record import Report
from opdcheck.units import number, percent, plural


def next_steps(report: Report) -> list[str]:
    """Sentences in the order in which to try them; empty for a plain admission."""
    decision = report.verdict.decision
    if decision == "reject":
        return _after_reject(report)
    return _after_inconclusive(report) if decision == "inconclusive" else []


def _after_reject(report: Report) -> list[str]:
    codes = {reason.code for reason in report.verdict.against if reason.effect == "reject"}
    steps = []
    if "non_finite" in codes:
        steps.append(
            "Find out where NaN or infinite values come from before anything else: weights reloaded into a quantized "
            "engine, a scale of 0, or an overflow in float16 are the usual causes."
        )
    largest = largest_source(report)
    if largest is None:
        return [*steps, _without_sources(report)]
    total = report.measurement.sources_total
    share = f" ({percent(largest.tv / total)} of the total tv)" if total > 0 else ""
    steps.append(f"The largest source is {largest.source}{share}. {_remedy(largest, report)}")
    return steps


def _without_sources(report: Report) -> str:
    measurement = report.measurement
    if measurement.sources_prompts is None:
        return "`opdcheck admit --sources` says which part of the configuration is to blame."
    if measurement.sources_notes:
        return "What remains of the configuration cannot be split: try it without, one part after the other."
    return (
        "The unperturbed student is already this far off in this engine: compare attention backends and versions, and "
        "`opdcheck budget verify`."
    )


def largest_source(report: Report) -> SourceShare | None:
    """The source with the largest tv; None where there is no split, or the candidate has no sources."""
    return max(report.measurement.sources, key=lambda share: share.tv, default=None)


def _remedy(share: SourceShare, report: Report) -> str:
    rollout = report.candidate.rollout
    match share.source:
        case "kv_cache":
            finer = "`kv_cache_dtype: fp8_e4m3` (one more mantissa bit), " if "e5m2" in rollout.kv_cache_dtype else ""
            return f"Try {finer}`kv_cache_dtype_skip_layers` for the most sensitive layers, or `kv_cache_dtype: auto`."
        case "weights":
            grouped = isinstance(rollout.quantization, Quantization) and rollout.quantization.group_size is not None
            finer = "a smaller `quantization.group_size`" if grouped else "a scheme with finer scales"
            return f"Try {finer}, or leave sensitive layers out with `quantization.ignore`."
        case "activations":
            return (
                "Leave the activations alone (W8A16 keeps 8-bit weights), or leave sensitive layers out with "
                "`quantization.ignore`."
            )
        case "staleness":
            lag = rollout.staleness.lag if rollout.staleness else None
            now = f" (now {plural(lag, 'optimizer step')})" if lag is not None else ""
            return f"Hand new weights to the engine more often{now}, or lower the learning rate."
        case "noise":
            return "Lower `noise.weights` or `noise.logits`."
        case "dtype":
            return f"Sample in the trainer's dtype: `rollout.dtype: {report.candidate.student.dtype}`."
        case "kernel":
            raise ValueError("the kernel is no source that a split measures")


def _after_inconclusive(report: Report) -> list[str]:
    steps = []
    codes = {reason.code for reason in report.verdict.against}
    if "total" in codes:
        steps.append(_more_prompts(report))
    if "not_applied" in codes:
        steps.append(
            "Measure the candidate as it would run: a GPU engine that has these kernels, or `engine: transformers`, "
            "which simulates every part."
        )
    if codes & {"clipped", "heavy_tailed"}:
        steps.append(
            "Look at the prompts with the largest mean: a few of them are far off. The JSON report has them in "
            "`prompt_values`, and their rows in the prompt file in `prompt_rows`."
        )
    if "lower_bound" in codes:
        steps.append("Ask the engine for more log-probabilities per token: `rollout.logprobs`.")
    if "source_unmeasured" in codes:
        steps.append("Run again with `--sources`; per-source limits must be on the decision metric.")
    if codes & {"layer_unmeasured", "prefix_shift_unmeasured"}:
        steps.append("Use a budget without limits that cannot be measured yet.")
    if "heavy_tailed" in codes:
        steps.append(
            "More prompts (`workload.num_prompts` and `decision.max_prompts`) admit if prompts like these are rarer "
            "than 1 %; `limits.tails` in the budget says how far off single tokens may be."
        )
    if "other_total" in codes and "total" not in codes:
        steps.append(
            "Measure more prompts (`workload.num_prompts` and `decision.max_prompts`): every limited metric must be "
            "admitted by its own interval. `decision.metric` chooses the one that is drawn and advised on."
        )
    if "source" in codes:
        steps.append("More prompts decide about the source whose interval still contains its limit.")
    return steps


def _more_prompts(report: Report) -> str:
    """How many prompts might decide: the interval narrows about like one over the square root of their number."""
    verdict = report.verdict
    lower, upper = verdict.interval
    gap = abs(verdict.limit - verdict.mean)
    half = max(verdict.mean - lower, upper - verdict.mean)
    keys = "`workload.num_prompts` and `decision.max_prompts`"
    if not (gap > 0 and math.isfinite(half)):
        return f"Measure more prompts ({keys})."
    wanted = verdict.prompts * (half / gap) ** 2
    if wanted > 20 * max(verdict.prompts, 1):
        return (
            f"The mean is so near the limit {number(verdict.limit)} that more prompts will hardly decide; "
            "a configuration with less mismatch will."
        )
    rounded = int(math.ceil(max(wanted, verdict.prompts + 1) / 8) * 8)
    return f"Measure more prompts ({keys}): about {rounded} might decide."
