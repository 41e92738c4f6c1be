"""Splits on disk: what is stored comes back, and the folder stays small."""

import os

import pytest
from samples import sources

from opdcheck import splits
from opdcheck.splits import load_split, save_split, split_file

SHARES = sources()["sources"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OPDCHECK_CACHE", str(tmp_path))


def test_a_split_comes_back_as_it_was():
    file = split_file({"seed": 0}, [], "k3")
    assert load_split(file) is None
    save_split(file, SHARES)
    assert load_split(file) == SHARES


def test_the_key_covers_whatever_changes():
    assert len({split_file({"seed": seed}, [], metric) for seed in (0, 1) for metric in ("k3", "tv")}) == 4


def test_old_splits_go_when_the_cache_is_full(monkeypatch):
    old, used, new = (split_file({"seed": seed}, [], "k3") for seed in range(3))
    for file in (old, used):
        save_split(file, SHARES)
        os.utime(file, (1, 1))
    assert load_split(used)
    monkeypatch.setattr(splits, "MAX_CACHE_BYTES", 2 * old.stat().st_size)
    save_split(new, SHARES)
    assert [file.exists() for file in (old, used, new)] == [False, True, True]
