"""The sequential verdict: error rates by simulation, and its rules one by one."""

import math

import numpy as np
import pytest
import scipy.stats

from opdcheck.stats.gate import Gate

LIMIT = 0.015
ALPHA = 0.05
PROMPTS = 256


def lognormal(rng, mean, cv, size):
    variance = math.log(1 + cv * cv)
    return mean * np.exp(math.sqrt(variance) * rng.normal(size=size) - variance / 2)


def decide(values, **options):
    """(state, prompts until then) of a gate that looks after every prompt."""
    gate = Gate(LIMIT, ALPHA, **options)
    for value in values:
        if gate.update([value]) != "undecided":
            break
    return gate.state, gate.prompts


def simulate(times_limit, cv, gates, seed=0):
    data = lognormal(np.random.default_rng(seed), times_limit * LIMIT, cv, (gates, PROMPTS))
    return [decide(values) for values in data]


def share(outcomes, state):
    return sum(found == state for found, _ in outcomes) / len(outcomes)


def median_prompts(outcomes, state):
    """Median over all gates; those that did not end in `state` count as never."""
    return float(np.median([prompts if found == state else math.inf for found, prompts in outcomes]))


def test_a_mean_at_the_limit_is_hardly_ever_admitted_or_rejected():
    outcomes = simulate(1.0, 0.5, 2000)
    assert share(outcomes, "admit") <= ALPHA + 0.01  # measured: 0.0005
    assert share(outcomes, "reject") <= ALPHA + 0.01  # measured: 0.0045


def test_half_the_limit_is_admitted_soon():
    outcomes = simulate(0.5, 0.5, 400)
    assert share(outcomes, "admit") == 1
    assert median_prompts(outcomes, "admit") <= 60  # measured: 39


def test_twice_the_limit_is_rejected_sooner():
    outcomes = simulate(2.0, 0.5, 400)
    assert share(outcomes, "reject") >= 0.99  # measured: 1
    assert median_prompts(outcomes, "reject") <= 20  # measured: 8


def test_bias_of_clipping_is_as_the_module_says():
    """Above the default's range of validity: the table in the gate's module docstring, with slack for 300 gates."""
    assert share(simulate(1.0, 1.0, 300), "admit") <= ALPHA + 0.01  # measured with 2,000: 0.0225
    assert 0.03 < share(simulate(1.0, 2.0, 300), "admit") < 0.15  # measured with 2,000: 0.0825: not valid at a CV of 2
    assert share(simulate(1.25, 2.0, 300), "admit") <= 0.01


def test_peeking_at_a_t_interval_fails_the_same_simulation():
    data = lognormal(np.random.default_rng(0), LIMIT, 0.5, (2000, PROMPTS))
    counts = np.arange(1, PROMPTS + 1)
    means = data.cumsum(1) / counts
    spread = np.sqrt(np.maximum((data**2).cumsum(1) / counts - means**2, 0) / np.maximum(counts - 1, 1))
    upper = means + scipy.stats.t.ppf(1 - ALPHA / 2, np.maximum(counts - 1, 1)) * spread
    admitted = (upper <= LIMIT)[:, 7:].any(1).mean()  # even with the default of at least 8 prompts
    assert admitted > 2 * (ALPHA + 0.01)


def test_one_call_looks_after_every_value_like_many_calls():
    values = lognormal(np.random.default_rng(3), 0.5 * LIMIT, 0.5, 100)
    one, many = Gate(LIMIT, ALPHA), Gate(LIMIT, ALPHA)
    one.update(values)
    for value in values:
        many.update([value])
    assert one.state == many.state == "admit"
    assert one.interval == many.interval
    assert (one.prompts, one.clipped, one.mean) == (many.prompts, many.clipped, many.mean)
    assert one.mean == pytest.approx(values.mean())


def test_a_decision_stays():
    gate = Gate(LIMIT, ALPHA)
    assert gate.update([0.1 * LIMIT] * 60) == "admit"
    assert gate.update([50 * LIMIT] * 60) == "admit"
    assert gate.prompts == 120


def test_no_verdict_before_the_minimum():
    gate = Gate(LIMIT, ALPHA, min_prompts=50)
    assert gate.update([4 * LIMIT] * 49) == "undecided"
    assert gate.update([4 * LIMIT]) == "reject"
    gate = Gate(LIMIT, ALPHA, min_prompts=90)
    assert gate.update([0.0] * 89) == "undecided"
    assert gate.update([0.0]) == "admit"


def test_nothing_yet():
    gate = Gate(LIMIT, ALPHA)
    assert gate.update([]) == gate.state == "undecided"
    assert gate.interval == (0.0, 5 * LIMIT)
    assert math.isnan(gate.mean)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_forbids_admission_for_good(bad):
    gate = Gate(LIMIT, ALPHA)
    assert gate.update([0.01 * LIMIT] * 3 + [bad] + [0.01 * LIMIT] * 500) == "undecided"
    assert gate.clipped == 1
    assert not math.isfinite(gate.mean)
    assert gate.interval[1] <= LIMIT  # the clipped mean is known to be low; it is the plain mean that is not


def test_values_that_are_not_finite_can_reject():
    assert Gate(LIMIT, ALPHA).update([math.nan] * 50) == "reject"


def test_what_clipping_hides_forbids_admission():
    gate = Gate(LIMIT, ALPHA)
    # One prompt in 50 is at 100 limits: the clipped mean is far below the limit, the plain mean is twice as high.
    assert gate.update(([100 * LIMIT] + [0.01 * LIMIT] * 49) * 10) == "undecided"
    assert gate.interval[1] < LIMIT < gate.mean
    assert gate.clipped == 10


def test_negative_estimates_count_as_zero_and_cannot_cause_a_rejection():
    gate = Gate(LIMIT, ALPHA)
    assert gate.update([-0.1 * LIMIT] * 60) == "admit"
    assert gate.interval[0] == 0
    assert gate.clipped == 0
    gate = Gate(LIMIT, ALPHA)
    assert gate.update([4 * LIMIT, -4 * LIMIT] * 200) == "undecided"
    assert gate.interval[0] > LIMIT > gate.mean


def test_a_bounded_metric_is_clipped_at_its_bound():
    assert Gate(0.3, ALPHA, bound=1.0).interval == (0.0, 1.0)
    assert Gate(0.1, ALPHA, bound=1.0).interval == (0.0, 0.5)


def test_a_mean_exactly_at_the_limit_is_neither():
    assert Gate(LIMIT, ALPHA).update([LIMIT] * 3000) == "undecided"


@pytest.mark.parametrize("limit", [0.0, -1.0, math.nan, math.inf])
def test_impossible_limits(limit):
    with pytest.raises(ValueError, match="limit"):
        Gate(limit, ALPHA)


def test_other_impossible_arguments():
    with pytest.raises(ValueError, match="admits everything"):
        Gate(1.0, ALPHA, bound=1.0)
    with pytest.raises(ValueError, match="clip_multiple"):
        Gate(LIMIT, ALPHA, clip_multiple=1.0)
    with pytest.raises(ValueError, match="min_prompts"):
        Gate(LIMIT, ALPHA, min_prompts=0)
    with pytest.raises(ValueError, match="alpha"):
        Gate(LIMIT, 1.5)


def test_more_than_one_clipped_prompt_in_a_hundred_forbids_admission():
    gate = Gate(LIMIT, ALPHA)
    assert gate.update([0.1 * LIMIT] * 60 + [6 * LIMIT]) == "admit"  # decided before the outlier
    gate = Gate(LIMIT, ALPHA)
    gate.update([6 * LIMIT])
    assert gate.update([0.1 * LIMIT] * 98) == "undecided"
    assert (gate.interval[1] <= LIMIT, gate.mean <= LIMIT, gate.heavy_tailed) == (True, True, True)
    assert gate.update([0.1 * LIMIT]) == "admit"  # one in a hundred
