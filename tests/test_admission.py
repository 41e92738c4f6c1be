"""What a cache key covers, when gathering ends, and that errors of loading models point into the file."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from candidates import candidate as a_candidate

from opdcheck import admission, gathering
from opdcheck.admission import identify, measurement_key
from opdcheck.config import Candidate, Decision
from opdcheck.engines import vllm_support
from opdcheck.gathering import Gathering
from opdcheck.mismatch.sampled import sampled_mismatch
from opdcheck.progress import Silent
from opdcheck.rollouts import Prompt, Rollout
from opdcheck.rounds import Round, round_key
from opdcheck.session import Session
from opdcheck.splits import split_file
from opdcheck.verdict import Target


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OPDCHECK_CACHE", str(tmp_path / "cache"))


class TestKey:
    """Whatever changes a number changes the key of its round and of its split."""

    @pytest.fixture
    def student(self, tiny_student, tmp_path):
        return shutil.copytree(tiny_student, tmp_path / "student")

    @pytest.fixture
    def keys(self, student, tmp_path, monkeypatch):
        """Names of the cache files of the second prompt, for a candidate as things are now."""
        monkeypatch.setattr(vllm_support, "require", lambda: None)

        def now(first: str = "first", **rollout):
            rows = [{"prompt": text} for text in (first, "second")]
            (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            candidate = a_candidate(student, **rollout)
            with Session(candidate, tmp_path) as session:
                key = measurement_key(identify(candidate, tmp_path), session)
                prompt = session.prompts[1]
            rollouts = [Rollout(prompt, 0, np.array([1]), np.array([0.0]), "stop")]
            return round_key(key, [prompt]), split_file(key, rollouts, "k3").name

        return now

    def test_the_same_is_the_same(self, keys):
        assert keys() == keys()

    def test_end_tokens_of_the_generation_config(self, keys, student):
        """They say where rollouts stop, and no fingerprint covers their file."""
        before = keys()
        file = student / "generation_config.json"
        config = json.loads(file.read_text())
        file.write_text(json.dumps({**config, "eos_token_id": [0, 7]}))
        assert all(old != new for old, new in zip(before, keys(), strict=True))
        file.write_text(json.dumps({**config, "top_k": 3}))
        assert keys() == before

    def test_calibration_prompts_under_static_scales(self, keys):
        """FP8 has static activation scales: the first prompts change the numbers of all others."""
        before, after = keys("one", quantization="FP8"), keys("two", quantization="FP8")
        assert all(old != new for old, new in zip(before, after, strict=True))
        assert keys("one") == keys("two")

    def test_variables_that_change_vllms_numbers(self, keys, monkeypatch):
        before = keys(engine="vllm")
        monkeypatch.setenv("VLLM_CPU_INT4_W4A8", "0")  # as opdcheck sets it anyway
        monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
        assert keys(engine="vllm") == before
        monkeypatch.setenv("VLLM_CPU_INT4_W4A8", "1")
        changed = keys(engine="vllm")
        monkeypatch.setenv("VLLM_ATTENTION_SOMETHING", "1")
        assert all(len(set(three)) == 3 for three in zip(before, changed, keys(engine="vllm"), strict=True))

    def test_they_are_nothing_to_transformers(self, keys, monkeypatch):
        before = keys()
        monkeypatch.setenv("VLLM_CPU_INT4_W4A8", "1")
        assert keys() == before


class TestGathering:
    """Rounds of four made-up prompts, each with the same k3 and tv."""

    def gather(self, monkeypatch, aims, *, dlogp: float, prompts: int = 64, **decision):
        """A gathering over prompts whose only token is that much less probable to the trainer."""
        candidate = Candidate.model_validate(
            {
                "student": {"path": "s"},
                "rollout": {},
                "workload": {"prompts": "p.jsonl"},
                "decision": Decision(**decision).model_dump(),
            }
        )
        all_prompts = [Prompt(row, [row]) for row in range(prompts)]

        def rounds(session, *, max_prompts, **_):
            for start in range(0, max_prompts, 4):
                rollouts = [
                    Rollout(prompt, 0, np.array([1]), np.array([-1.0]), "stop")
                    for prompt in session.prompts[start : min(start + 4, max_prompts)]
                ]
                yield Round(rollouts, [sampled_mismatch(one.logq, one.logq - dlogp) for one in rollouts])

        monkeypatch.setattr(gathering, "rounds", rounds)
        session = SimpleNamespace(candidate=candidate, prompts=all_prompts)
        looks: list[tuple[str, int]] = []
        progress = Silent()
        progress.look = lambda gate, *, metric, **_: looks.append((metric, gate.prompts))  # type: ignore[method-assign]
        return Gathering(session, aims, {}, fresh=False, progress=progress), looks

    # k3 of 0.1 nats less is 0.0048, tv 0.095.
    EASY = Target("k3", 0.5)
    HARD = Target("tv", 0.2)

    def test_goes_on_until_every_limit_is_decided(self, monkeypatch):
        needed = {}
        for name, aims in {"easy": [self.EASY], "hard": [self.HARD], "both": [self.EASY, self.HARD]}.items():
            gathered, looks = self.gather(monkeypatch, aims, dlogp=0.1, prompts=256)
            gathered.until_decided()
            assert gathered.decided
            assert {metric for metric, _ in looks} == {aims[0].metric}
            needed[name] = gathered.prompts
        assert needed["easy"] < needed["hard"] == needed["both"] < 256

    def test_one_reject_is_enough(self, monkeypatch):
        gathered, _ = self.gather(monkeypatch, [Target("k3", 0.0052), Target("tv", 0.01)], dlogp=0.1)
        gathered.until_decided()
        assert gathered.decided
        assert gathered.prompts < 64

    def test_ends_with_the_prompts(self, monkeypatch):
        gathered, _ = self.gather(monkeypatch, [self.EASY, Target("tv", 0.096)], dlogp=0.1, max_prompts=18)
        gathered.until_decided()
        assert (gathered.decided, gathered.prompts, gathered.double()) == (False, 18, False)

    def test_doubling(self, monkeypatch):
        gathered, _ = self.gather(monkeypatch, [self.EASY], dlogp=0.1, prompts=30, min_prompts=8)
        gathered.until_decided()
        counts = [gathered.prompts]
        while gathered.double():
            counts.append(gathered.prompts)
        assert counts[-1] == 30
        assert all(after == min(2 * before, 30) for before, after in pairwise(counts))
        assert gathered.summary().prompt_rows == list(range(30))


def test_a_split_takes_whole_prompts_that_fit_into_memory(monkeypatch):
    """Per token 4 bytes here, and room for 40: two prompts of two samples fit, 8 and 24 bytes; a third does not."""
    monkeypatch.setattr("opdcheck.models.hidden_bytes", lambda *_: 4)
    monkeypatch.setattr(admission, "SPLIT_BYTES", 40)
    lengths = [(0, 1), (0, 1), (1, 1), (1, 5), (2, 1), (2, 9), (3, 1)]
    rollouts = [
        Rollout(Prompt(index, [1]), sample, np.arange(length), np.zeros(length), "stop")
        for sample, (index, length) in enumerate(lengths)
    ]
    session = SimpleNamespace(candidate=SimpleNamespace(student=None), base=None)
    assert admission._within_memory(session, rollouts) == rollouts[:4]
    monkeypatch.setattr(admission, "SPLIT_BYTES", 4)
    assert admission._within_memory(session, rollouts) == rollouts[:2], "the first one whatever its size"
