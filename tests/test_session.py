"""Prompts: drawn in a random order that depends on seed and number alone, calibrated and seeded by their row."""

from opdcheck.rollouts import Prompt
from opdcheck.session import in_random_order, request_seed


def rows(prompts):
    return [prompt.index for prompt in prompts]


def prompts(number, text=0):
    return [Prompt(row, [text, row]) for row in range(number)]


def test_every_prompt_once_in_another_order_than_the_file():
    drawn = in_random_order(prompts(64), seed=0)
    assert sorted(rows(drawn)) == list(range(64))
    assert rows(drawn) != list(range(64))
    # A file sorted by length or topic must not show its first half first.
    assert 8 < sum(row < 32 for row in rows(drawn)[:32]) < 24


def test_the_order_depends_on_seed_and_number_alone():
    first = rows(in_random_order(prompts(64), seed=0))
    assert rows(in_random_order(prompts(64, text=9), seed=0)) == first
    assert rows(in_random_order(prompts(64), seed=1)) != first
    assert rows(in_random_order(prompts(64), seed=-1)) != first
    assert [row for row in rows(in_random_order(prompts(65), seed=0)) if row < 64] != first


def test_each_prompt_keeps_its_row_and_its_seed():
    drawn = in_random_order(prompts(8), seed=0)
    assert all(prompt.token_ids == [0, prompt.index] for prompt in drawn)
    assert {prompt.index: request_seed(0, prompt.index, 0) for prompt in drawn} == {
        row: request_seed(0, row, 0) for row in range(8)
    }
