"""Aggregation against the reference, bounds and tails, and what NaN, infinite and empty inputs do."""

import itertools
import json
import math
import subprocess
import sys
from typing import get_args

import numpy as np
import pytest
import reference

from opdcheck.config import Metric
from opdcheck.mismatch.aggregate import DECISION_METRICS, prompt_means, summarize
from opdcheck.mismatch.position import position_change
from opdcheck.mismatch.sampled import sampled_mismatch
from opdcheck.mismatch.tokens import TokenMismatch

SAMPLED = ("k1", "k3", "abs_dlogp", "token_mult_prob_error", "probs_diff")


def completion(rng, tokens, estimator="topk"):
    logq = -rng.exponential(1.0, tokens)
    tv, kl = rng.uniform(0, 0.2, tokens), rng.exponential(0.1, tokens)
    return TokenMismatch(
        estimator=estimator,
        logq=logq,
        logp=logq + 0.2 * rng.normal(size=tokens),
        tv=tv,
        tv_lower=tv * 0.9,
        tv_upper=tv * 1.1,
        kl=kl,
        kl_lower=kl * 0.8,
        argmax_flip=(rng.uniform(size=tokens) < 0.1).astype(float),
    )


@pytest.fixture
def by_prompt():
    """Prompts with one to three completions of very different lengths: where a wrong order of means shows."""
    rng = np.random.default_rng(7)
    return [[completion(rng, int(rng.integers(1, 90))) for _ in range(1 + n % 3)] for n in range(12)]


def field(by_prompt, name):
    return [[getattr(sample, name).tolist() for sample in prompt] for prompt in by_prompt]


def per_token(by_prompt, name):
    metric = getattr(reference, name)
    return [
        [[metric(a, b) for a, b in zip(s.logq.tolist(), s.logp.tolist(), strict=True)] for s in prompt]
        for prompt in by_prompt
    ]


def flat(values):
    return [value for prompt in values for sample in prompt for value in sample]


@pytest.mark.parametrize("name", ["tv", "kl", "argmax_flip", *SAMPLED])
def test_means_errors_and_tails_match_reference(by_prompt, name):
    values = per_token(by_prompt, name) if name in SAMPLED else field(by_prompt, name)
    found = summarize(by_prompt).metrics[name]
    assert found.mean == pytest.approx(reference.mean_over_prompts(values), rel=1e-6)
    assert found.standard_error == pytest.approx(reference.standard_error(values), rel=1e-6)
    tokens = flat(values)
    assert found.p99 == pytest.approx(np.quantile(tokens, 0.99), rel=1e-6)
    assert found.p99_9 == pytest.approx(np.quantile(tokens, 0.999), rel=1e-6)
    assert found.max == pytest.approx(max(tokens), rel=1e-6)


def test_importance_weights_and_prompt_values(by_prompt):
    summary = summarize(by_prompt)
    logq, logp = (flat(field(by_prompt, name)) for name in ("logq", "logp"))
    assert summary.chi2_token == pytest.approx(reference.chi2_token(logq, logp), rel=1e-6)
    assert summary.ess == pytest.approx(reference.ess(logq, logp), rel=1e-6)
    assert set(summary.prompt_values) == {"tv", "kl", "k3", "abs_dlogp"}
    for name, values in summary.prompt_values.items():
        tokens = field(by_prompt, name) if name in ("tv", "kl") else per_token(by_prompt, name)
        assert values == pytest.approx([reference.prompt_mean(prompt) for prompt in tokens], rel=1e-6)


def test_bounds_are_aggregated_like_the_mean(by_prompt):
    found = summarize(by_prompt).metrics
    assert found["tv"].lower == pytest.approx(0.9 * found["tv"].mean)
    assert found["tv"].upper == pytest.approx(1.1 * found["tv"].mean)
    assert found["kl"].lower == pytest.approx(0.8 * found["kl"].mean)
    assert found["kl"].upper is None
    assert found["k3"].lower is found["k3"].upper is None


def test_estimators():
    rng = np.random.default_rng(0)
    exact = summarize([[completion(rng, 9, "exact")]]).metrics
    assert [exact[name].estimator for name in ("tv", "k3", "argmax_flip")] == ["exact", "sampled", "exact"]
    assert exact["kl"].upper == exact["kl"].mean
    mixed = [completion(rng, 9, "exact"), sampled_mismatch(np.array([-1.0]), np.array([-1.1]))]
    found = summarize([mixed]).metrics
    assert found["tv"].estimator == "sampled"
    assert "argmax_flip" not in found


def test_one_prompt_has_no_standard_error():
    assert summarize([[completion(np.random.default_rng(0), 5)]]).metrics["tv"].standard_error is None


def test_positions(by_prompt):
    summary = summarize(by_prompt)
    longest = max(len(sample) for prompt in by_prompt for sample in prompt)
    bins = summary.by_position
    assert len(bins) == 8
    assert (bins[0].start, bins[-1].stop) == (0, longest)
    assert all(left.stop == right.start for left, right in itertools.pairwise(bins))
    tokens = [(i, v) for p in field(by_prompt, "tv") for s in p for i, v in enumerate(s)]
    second = [value for position, value in tokens if bins[1].start <= position < bins[1].stop]
    assert bins[1].tokens == len(second)
    assert bins[1].tv == pytest.approx(math.fsum(second) / len(second))
    assert summary.position_change == position_change(by_prompt)


def test_short_completions_have_fewer_bins_and_no_change():
    pair = np.array([-1.0, -1.0]), np.array([-1.0, -1.2])
    summary = summarize([[sampled_mismatch(*pair)]])
    assert [(one.start, one.stop) for one in summary.by_position] == [(0, 1), (1, 2)]
    assert summary.position_change is None


@pytest.mark.parametrize(("bad", "mean"), [(math.nan, math.nan), (-math.inf, math.inf)])
def test_non_finite_tokens_are_counted_and_not_dropped(bad, mean):
    logq = np.full((2, 6), -1.0)
    logp = logq - 0.1
    logp[1, 2] = bad
    summary = summarize([[sampled_mismatch(*pair)] for pair in zip(logq, logp, strict=True)])
    assert summary.non_finite_tokens == 1
    assert summary.metrics["k3"].mean == pytest.approx(mean, nan_ok=True)
    assert math.isfinite(summary.prompt_values["k3"][0])
    assert summary.prompt_values["k3"][1] == pytest.approx(mean, nan_ok=True)
    assert summary.metrics["k3"].max == pytest.approx(mean, nan_ok=True)


def test_a_nan_estimate_counts_as_non_finite_too():
    rng = np.random.default_rng(0)
    one = completion(rng, 4)
    one.kl[1] = math.nan
    assert summarize([[one]]).non_finite_tokens == 1


def test_self_mismatch_is_exactly_zero():
    logq = -np.random.default_rng(0).exponential(1.0, 50)
    summary = summarize([[sampled_mismatch(logq, logq)], [sampled_mismatch(logq[:7], logq[:7])]])
    for name, found in summary.metrics.items():
        assert found.mean == found.max == (1 if name == "token_mult_prob_error" else 0)
    assert summary.ess == 1
    assert summary.chi2_token == 0


def test_json(by_prompt):
    for found in summarize(by_prompt).metrics.values():
        assert type(found).model_validate(json.loads(json.dumps(found.model_dump()))) == found


def test_empty_inputs_are_errors():
    rng = np.random.default_rng(0)
    with pytest.raises(ValueError, match="no prompts"):
        summarize([])
    with pytest.raises(ValueError, match="prompt 1 of 2 has no completions"):
        summarize([[completion(rng, 3)], []])
    with pytest.raises(ValueError, match="completion 1 of prompt 0 has no tokens"):
        summarize([[completion(rng, 3), completion(rng, 0)]])
    with pytest.raises(ValueError, match="position_bins"):
        summarize([[completion(rng, 3)]], position_bins=0)


def test_no_torch_without_the_exact_estimator():
    modules = ("mismatch.aggregate", "mismatch.topk", "mismatch.sampled", "mismatch.metrics", "stats.gate")
    code = f"import sys, {', '.join('opdcheck.' + name for name in modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("metric", DECISION_METRICS)
def test_the_means_of_one_metric_are_those_of_the_summary(by_prompt, metric):
    assert prompt_means(by_prompt, metric) == summarize(by_prompt).prompt_values[metric]


def test_what_can_decide_is_what_a_file_can_name():
    assert get_args(Metric) == DECISION_METRICS
