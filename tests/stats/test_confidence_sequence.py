"""Time-uniform coverage, agreement with the formula, and cost."""

import math

import numpy as np
import pytest
import scipy.stats

from opdcheck.stats.confidence_sequence import GRID_POINTS, SHARES, WEIGHTS, BettingSequence

ALPHA = 0.1
SEQUENCES = 1000
LENGTH = 150


def most_misses(share, trials):
    """Misses that a true miss rate of `share` exceeds once in 10,000 times."""
    return scipy.stats.binom.ppf(1 - 1e-4, trials, share)


def ever_misses(values, mean, interval_after):
    """Whether the interval excludes the mean after any of the values."""
    for value in values:
        lower, upper = interval_after(value)
        if not lower <= mean <= upper:
            return True
    return False


def follow(bound):
    sequence = BettingSequence(bound, ALPHA)

    def interval_after(value):
        sequence.update(value)
        return sequence.interval

    return interval_after


DRAWS = {
    "bernoulli 0.1": (0.1, lambda rng, size: (rng.uniform(size=size) < 0.1).astype(float)),
    "bernoulli 0.5": (0.5, lambda rng, size: (rng.uniform(size=size) < 0.5).astype(float)),
    "beta 1 9": (0.1, lambda rng, size: rng.beta(1, 9, size)),
    "beta 0.2 0.2": (0.5, lambda rng, size: rng.beta(0.2, 0.2, size)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_the_mean_is_hardly_ever_excluded_at_any_time(name):
    mean, draw = DRAWS[name]
    bound = 3.0
    data = bound * draw(np.random.default_rng(1), (SEQUENCES, LENGTH))
    misses = sum(ever_misses(values, bound * mean, follow(bound)) for values in data)
    assert misses <= most_misses(ALPHA, SEQUENCES), f"{misses / SEQUENCES:.3f} miss"


def test_intervals_for_one_look_fail_the_same_test_when_peeked_at():
    mean, draw = DRAWS["beta 1 9"]
    data = draw(np.random.default_rng(1), (SEQUENCES, LENGTH))
    counts = np.arange(1, LENGTH + 1)
    means = data.cumsum(1) / counts
    variances = ((data**2).cumsum(1) / counts - means**2) * counts / np.maximum(counts - 1, 1)
    half_widths = scipy.stats.t.ppf(1 - ALPHA / 2, np.maximum(counts - 1, 1)) * np.sqrt(variances / counts)
    missed = (np.abs(means - mean) > half_widths)[:, 9:].any(1)  # even if nobody looks before the tenth value
    assert missed.sum() > most_misses(ALPHA, SEQUENCES)


def test_ends_are_those_of_the_formula_rounded_outwards():
    rng = np.random.default_rng(5)
    values = rng.beta(2, 6, 120)
    sequence = BettingSequence(1.0, ALPHA)
    for value in values:
        sequence.update(value)

    def ever_rejected(candidate, data):
        capital = [
            math.fsum(
                weight * math.prod(1 + share / candidate * (x - candidate) for x in data[:n])
                for share, weight in zip(SHARES, WEIGHTS, strict=True)
            )
            for n in range(1, len(data) + 1)
        ]
        return max(capital) >= 2 / ALPHA

    lower, upper = sequence.interval
    step = 1 / GRID_POINTS
    assert ever_rejected(lower, values)
    assert not ever_rejected(lower + step, values)
    assert ever_rejected(1 - upper, 1 - values)
    assert not ever_rejected(1 - upper + step, 1 - values)


def test_weights_are_a_mixture():
    assert WEIGHTS.sum() == pytest.approx(1)
    assert ((SHARES > 0) & (SHARES < 1)).all()


def test_starts_with_everything_and_only_shrinks():
    sequence = BettingSequence(2.0, 0.05)
    assert sequence.interval == (0.0, 2.0)
    previous = sequence.interval
    for value in np.random.default_rng(0).uniform(0.5, 1.0, 200):
        sequence.update(value)
        assert sequence.interval[0] >= previous[0]
        assert sequence.interval[1] <= previous[1]
        previous = sequence.interval
    assert previous[0] < 0.75 < previous[1]
    assert previous[1] - previous[0] < 0.5


@pytest.mark.parametrize("constant", [0.0, 2.0])
def test_values_at_the_ends_of_the_range(constant):
    sequence = BettingSequence(2.0, 0.05)
    for _ in range(3000):
        sequence.update(constant)
    lower, upper = sequence.interval
    assert lower <= constant <= upper
    assert upper - lower <= 2 * 2.0 / GRID_POINTS


def test_a_mark_is_a_possible_end():
    mark = 0.123456
    sequence = BettingSequence(1.0, 0.05, marks=[mark])
    ends = set()
    for value in np.random.default_rng(0).uniform(0, 0.05, 400):
        sequence.update(value)
        ends.add(sequence.interval[1])
    assert any(end == mark for end in ends) or sequence.interval[1] < mark


def test_wrong_arguments():
    for bound in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="bound"):
            BettingSequence(bound, 0.05)
    for alpha in (0.0, 1.0, math.nan):
        with pytest.raises(ValueError, match="alpha"):
            BettingSequence(1.0, alpha)
    with pytest.raises(ValueError, match="marks"):
        BettingSequence(1.0, 0.05, marks=[1.0])
    for value in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="outside"):
            BettingSequence(1.0, 0.05).update(value)
