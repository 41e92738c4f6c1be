"""The change along completions against plain loops and scipy's t-test, and that chance is rarely taken for a trend."""

import math

import numpy as np
import pytest
import scipy.stats

from opdcheck.mismatch.position import half_differences, position_change
from opdcheck.mismatch.tokens import TokenMismatch


def completion(tv):
    tv = np.asarray(tv, np.float64)
    zero = np.zeros(len(tv))
    return TokenMismatch(
        estimator="exact",
        logq=zero,
        logp=zero,
        tv=tv,
        tv_lower=tv,
        tv_upper=tv,
        kl=zero,
        kl_lower=zero,
        argmax_flip=zero,
    )


def reference(by_prompt):
    """Token by token."""
    found = []
    for prompt in by_prompt:
        first, second = [], []
        for one in prompt:
            for position, value in enumerate(one.tv.tolist()):
                if position + 1 <= len(one) / 2:
                    first.append(value)
                if position >= len(one) / 2:
                    second.append(value)
        if first:
            found.append(math.fsum(second) / len(second) - math.fsum(first) / len(first))
    return found


def random_prompts(rng, prompts, growth=0.0):
    """Tokens of a prompt share a level and follow each other, as real ones do."""

    def one(level):
        tokens = int(rng.integers(1, 60))
        walk = np.cumsum(rng.normal(scale=0.2, size=tokens))
        return completion(level * np.exp(walk) * (1 + growth * np.arange(tokens) / 60))

    return [[one(rng.exponential(0.05)) for _ in range(int(rng.integers(1, 4)))] for _ in range(prompts)]


@pytest.mark.parametrize("seed", range(5))
def test_matches_the_reference(seed):
    prompts = random_prompts(np.random.default_rng(seed), 24)
    expected = reference(prompts)
    assert half_differences(prompts) == pytest.approx(expected, rel=1e-9)
    found = position_change(prompts)
    assert found.mean == pytest.approx(np.mean(expected))
    assert found.p == pytest.approx(scipy.stats.ttest_1samp(expected, 0.0).pvalue, rel=1e-6)


def test_the_token_in_the_middle_belongs_to_neither_half():
    assert half_differences(
        [[completion([1.0, 99.0, 4.0])], [completion([7.0])], [completion([7.0]), completion([0, 1])]]
    ) == [3, 1]


def test_growth_is_found_in_both_directions():
    grown = [[completion([level, 2 * level])] for level in (0.1, 0.11, 0.12, 0.13)]
    shrunk = [[completion([2 * level, level])] for level in (0.1, 0.11, 0.12, 0.13)]
    assert position_change(grown).mean == pytest.approx(-position_change(shrunk).mean)
    assert position_change(grown).p == pytest.approx(position_change(shrunk).p)
    assert position_change(grown).p < 0.001


def test_tokens_that_follow_each_other_are_no_trend():
    """Where there is none, about 5 % of tests find one at p < 0.05, however much a prompt's tokens hang together."""
    rng = np.random.default_rng(1)

    def prompt():
        tokens = 40
        walk = np.cumsum(rng.normal(scale=0.3, size=tokens))
        walk = walk if rng.uniform() < 0.5 else walk[::-1]  # in time reversed: no direction on average
        return [completion(0.05 * np.exp(walk - walk.mean()))]

    found = [position_change([prompt() for _ in range(32)]).p < 0.05 for _ in range(400)]
    assert 0.01 < np.mean(found) < 0.08


@pytest.mark.parametrize(
    "prompts",
    [
        [],
        [[completion([0.1, 0.2])]] * 2,
        [[completion([0.1, 0.2])]] * 9,
        [[completion([0.0, 0.0])]] * 9,
        [[completion([0.1])]] * 9,
        [[completion([0.1, 0.2])], [completion([0.1, math.nan])], [completion([0.1, 0.3])], [completion([0.1, 0.4])]],
        [[completion([0.1, 0.2])], [completion([math.inf, 0.1])], [completion([0.1, 0.3])], [completion([0.1, 0.4])]],
    ],
)
def test_what_cannot_be_tested_has_no_p(prompts):
    assert position_change(prompts) is None
