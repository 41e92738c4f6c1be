"""Rounds on disk: what is stored comes back, and a damaged or foreign file is never read."""

import numpy as np
import pytest

from opdcheck.measurement import Part
from opdcheck.mismatch.sampled import sampled_mismatch
from opdcheck.rollouts import Prompt, Rollout
from opdcheck.rounds import Round, RoundStore, round_key

PROMPTS = [Prompt(0, [1, 2]), Prompt(1, [3])]


def a_round() -> Round:
    rng = np.random.default_rng(0)
    rollouts, mismatch = [], []
    for prompt, length in ((PROMPTS[0], 3), (PROMPTS[0], 1), (PROMPTS[1], 4)):
        logq = -rng.exponential(size=length)
        rollouts.append(Rollout(prompt, len(rollouts), rng.integers(0, 9, length), logq, "stop"))
        mismatch.append(sampled_mismatch(logq, logq - 0.1))
    return Round(rollouts, mismatch, "vllm 0.32.0 (cpu)", (Part(part="kv_cache", how="real", detail="fp8"),))


def test_a_round_comes_back_as_it_was(tmp_path):
    store, stored = RoundStore(tmp_path), a_round()
    store.save("key", stored)
    loaded = store.load("key", PROMPTS)
    assert loaded is not None
    assert (loaded.engine, loaded.provenance) == (stored.engine, stored.provenance)
    for before, after in zip(stored.rollouts, loaded.rollouts, strict=True):
        assert (before.prompt, before.sample, before.finish_reason) == (after.prompt, after.sample, after.finish_reason)
        np.testing.assert_array_equal(before.token_ids, after.token_ids)
        np.testing.assert_array_equal(before.logq, after.logq)
    for before, after in zip(stored.mismatch, loaded.mismatch, strict=True):
        assert before.estimator == after.estimator
        for name in ("logq", "logp", "tv", "tv_lower", "tv_upper", "kl", "kl_lower", "argmax_flip"):
            np.testing.assert_array_equal(getattr(before, name), getattr(after, name))


def test_by_prompt_pools_the_samples_of_a_prompt():
    assert [len(samples) for samples in a_round().by_prompt()] == [2, 1]


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04 cut short", b"not a zip at all"])
def test_a_damaged_file_is_measured_again(tmp_path, damage):
    store = RoundStore(tmp_path)
    store.save("key", a_round())
    (tmp_path / "key.npz").write_bytes(damage)
    assert store.load("key", PROMPTS) is None


def test_a_truncated_file_is_measured_again(tmp_path):
    store = RoundStore(tmp_path)
    store.save("key", a_round())
    whole = (tmp_path / "key.npz").read_bytes()
    for cut in range(0, len(whole), 97):
        (tmp_path / "key.npz").write_bytes(whole[:cut])
        assert store.load("key", PROMPTS) is None


def test_a_pickle_in_the_cache_is_not_executed(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (tmp_path.joinpath("executed").touch, ())

    np.savez(tmp_path / "key.npz", lengths=np.array([Bomb()], dtype=object))
    assert RoundStore(tmp_path).load("key", PROMPTS) is None
    assert not (tmp_path / "executed").exists()


def test_an_unwritable_cache_loses_nothing_but_the_cache(tmp_path):
    (tmp_path / "file").write_text("in the way")
    RoundStore(tmp_path / "file" / "rounds").save("key", a_round())


@pytest.mark.parametrize(
    "other",
    [
        ({"seed": 1}, PROMPTS),
        ({"seed": 0}, PROMPTS[:1]),
        ({"seed": 0}, [Prompt(0, [1, 2]), Prompt(1, [4])]),
        ({"seed": 0}, [Prompt(0, [1, 2]), Prompt(2, [3])]),
        ({"seed": 0, "more": None}, PROMPTS),
    ],
)
def test_the_key_covers_whatever_changes(other):
    assert round_key({"seed": 0}, PROMPTS) != round_key(*other)


def test_old_rounds_go_when_the_cache_is_full(tmp_path, monkeypatch):
    import os

    store = RoundStore(tmp_path)
    store.save("old", a_round())
    os.utime(tmp_path / "old.npz", (1, 1))
    monkeypatch.setattr("opdcheck.rounds.MAX_CACHE_BYTES", (tmp_path / "old.npz").stat().st_size + 10)
    store.save("new", a_round())
    assert [file.name for file in tmp_path.glob("*.npz")] == ["new.npz"]


def test_a_file_under_another_name_is_not_taken(tmp_path):
    store = RoundStore(tmp_path)
    store.save("one", a_round())
    (tmp_path / "one.npz").rename(tmp_path / "other.npz")
    assert store.load("other", PROMPTS) is None


@pytest.mark.parametrize("name", ["tv", "lengths", "prompt_index", "estimator", "provenance"])
def test_well_formed_but_changed_contents_are_not_taken(tmp_path, name):
    store = RoundStore(tmp_path)
    store.save("key", a_round())
    with np.load(tmp_path / "key.npz") as stored:
        arrays = dict(stored.items())
    arrays[name] = np.array("x") if arrays[name].ndim == 0 else np.roll(arrays[name], 1) + 1
    np.savez_compressed(tmp_path / "key.npz", allow_pickle=False, **arrays)
    assert store.load("key", PROMPTS) is None
