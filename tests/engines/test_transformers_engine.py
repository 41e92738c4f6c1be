"""Sampling from a transformers model: exactness, the record's consistency, end tokens, coupling, independence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES, VOCAB, save
from scipy import stats

from opdcheck.config import ModelRef, Sampling
from opdcheck.engines.base import ExactEngine, Provenance
from opdcheck.engines.transformers_engine import TransformersEngine
from opdcheck.errors import EngineError
from opdcheck.models import CausalLM, load_causal_lm
from opdcheck.rollouts import Prompt, Rollout, RolloutRequest
from opdcheck.sampling import log_probabilities
from opdcheck.scoring import Scorer

PLAIN = Sampling()
TRUNCATED = Sampling(temperature=0.8, top_k=12, top_p=0.9)


def load(folder: Path, dtype: str = "float32") -> CausalLM:
    return load_causal_lm(ModelRef(path=str(folder)), Path("/"), dtype=dtype, device="cpu")  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def student(tiny_student: Path) -> CausalLM:
    return load(tiny_student)


def engine(policy: CausalLM, sampling: Sampling = PLAIN, *, tokens: int = 12, eos: set[int] = frozenset(), **options):  # type: ignore
    return TransformersEngine(
        policy, sampling=sampling, max_completion_length=tokens, eos_token_ids=set(eos), **options
    )


def requests(count: int = 6, *, samples: int = 1) -> list[RolloutRequest]:
    """Prompts of different lengths."""
    return [
        RolloutRequest(Prompt(index, list(range(3, 5 + 3 * index))), sample, 1000 * index + sample)
        for index in range(count)
        for sample in range(samples)
    ]


def tokens_of(rollouts: list[Rollout]) -> list[list[int]]:
    return [rollout.token_ids.tolist() for rollout in rollouts]


# --- the record is consistent ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [PLAIN, TRUNCATED])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_recorded_logq_is_the_distribution_of_the_recorded_state(name: str, sampling: Sampling, tmp_path: Path) -> None:
    policy = load(save(name, tmp_path))
    sampler = engine(policy, sampling, tokens=8)
    asked = requests(3)
    rollouts = sampler.generate(asked)
    hidden_p = Scorer(policy).final_hidden(rollouts)
    for request, rollout, teacher_forced in zip(asked, rollouts, hidden_p, strict=True):
        assert (rollout.prompt, rollout.sample) == (request.prompt, request.sample)
        assert rollout.final_hidden is not None
        assert rollout.final_hidden.shape == (8, policy.hidden_size)
        logq = log_probabilities(sampler.logits(rollout.final_hidden), sampling)
        np.testing.assert_allclose(rollout.logq, logq[range(8), rollout.token_ids], atol=1e-5)
        assert rollout.logq.dtype == np.float64
        assert rollout.token_ids.dtype == np.int64
        # Decoding with a KV cache and left padding gives the states that teacher forcing gives.
        torch.testing.assert_close(rollout.final_hidden, teacher_forced, atol=2e-3, rtol=2e-3)


def test_the_trainer_against_itself_is_rounding(student: CausalLM) -> None:
    sampler, scorer = engine(student), Scorer(student)
    rollouts = sampler.generate(requests())
    hidden_q = [rollout.final_hidden for rollout in rollouts]
    for mismatch in scorer.compare(rollouts, scorer.final_hidden(rollouts), hidden_q, sampler.logits, PLAIN):
        assert mismatch.tv.max() < 1e-4


def test_engine_describes_itself(student: CausalLM) -> None:
    part = Provenance("weights", "simulated", "FP8")
    sampler = engine(student, provenance=[part])
    assert isinstance(sampler, ExactEngine)
    assert sampler.name.startswith("transformers 5.")
    assert sampler.name.endswith("(cpu)")
    assert sampler.provenance == [part]
    sampler.close()
    with pytest.raises(EngineError, match="closed"):
        sampler.generate(requests())


# --- samples are from q ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [PLAIN, Sampling(temperature=0.5, top_k=20)])
def test_draws_have_the_models_probabilities(tmp_path: Path, sampling: Sampling) -> None:
    """10,000 first tokens against the distribution of plain transformers."""
    policy = load(save("llama", tmp_path))
    prompt = Prompt(0, [3, 4, 5])
    draws = engine(policy, sampling, tokens=1).generate([RolloutRequest(prompt, 0, seed) for seed in range(10_000)])
    counts = np.bincount([int(rollout.token_ids[0]) for rollout in draws], minlength=VOCAB)
    with torch.no_grad():
        logits = policy.model(input_ids=torch.tensor([prompt.token_ids])).logits[0, -1:].float()
    expected = log_probabilities(logits, sampling)[0].double().exp().numpy() * 10_000
    assert not counts[expected == 0].any()
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    kept = wanted > 0
    assert len(observed) > 10
    assert stats.chisquare(observed[kept], wanted[kept] / wanted[kept].sum() * observed[kept].sum()).pvalue > 1e-3


def test_same_seeds_same_tokens(student: CausalLM) -> None:
    first = tokens_of(engine(student).generate(requests()))
    assert tokens_of(engine(student).generate(requests())) == first
    moved = [RolloutRequest(request.prompt, request.sample, request.seed + 1) for request in requests()]
    assert tokens_of(engine(student).generate(moved)) != first


def test_samples_of_one_prompt_differ(student: CausalLM) -> None:
    rollouts = engine(student).generate(requests(1, samples=8))
    assert len({tuple(ids) for ids in tokens_of(rollouts)}) == 8


def test_a_rollout_does_not_depend_on_its_batch_mates(student: CausalLM) -> None:
    asked = requests()
    together = engine(student).generate(asked)
    assert tokens_of(engine(student).generate(asked[::-1])[::-1]) == tokens_of(together)
    alone = [engine(student).generate([request])[0] for request in asked]
    assert tokens_of(alone) == tokens_of(together)
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_allclose(one.logq, other.logq, atol=1e-4)
    assert tokens_of(engine(student, max_batch_tokens=40).generate(asked)) == tokens_of(together)


def test_policies_are_coupled_by_their_seeds(student: CausalLM) -> None:
    """With common random numbers a slightly different policy samples mostly the same tokens."""
    other = student.with_logit_noise(0.05, 0)
    asked = [RolloutRequest(Prompt(0, [5, 6, 7]), 0, seed) for seed in range(300)]
    same = np.mean(
        [
            a.token_ids[0] == b.token_ids[0]
            for a, b in zip(
                engine(student, tokens=1).generate(asked), engine(other, tokens=1).generate(asked), strict=True
            )
        ]
    )
    unlike = [RolloutRequest(request.prompt, 0, request.seed + 10_000) for request in asked]
    by_chance = np.mean(
        [
            a.token_ids[0] == b.token_ids[0]
            for a, b in zip(
                engine(student, tokens=1).generate(asked), engine(other, tokens=1).generate(unlike), strict=True
            )
        ]
    )
    assert same > 0.9 > by_chance


# --- logit noise ----------------------------------------------------------------------------------------------------


def test_noisy_logits_are_reproduced_from_the_recorded_states(student: CausalLM) -> None:
    sampler = engine(student, noise_logits=0.7, noise_seed=3)
    clean = engine(student)
    rollouts = sampler.generate(requests())
    for rollout in rollouts:
        noisy_logits, logits = (one.logits(rollout.final_hidden) for one in (sampler, clean))
        np.testing.assert_allclose(
            rollout.logq, noisy_logits.log_softmax(-1)[range(len(rollout)), rollout.token_ids], atol=1e-5
        )
        assert abs((noisy_logits - logits).std() - 0.7) < 0.05
    scorer = Scorer(student)
    measured = scorer.compare(
        rollouts, scorer.final_hidden(rollouts), [one.final_hidden for one in rollouts], sampler.logits, PLAIN
    )
    assert np.mean([mismatch.tv.mean() for mismatch in measured]) > 0.05
    assert engine(student, noise_logits=0.7, noise_seed=4).generate(requests())[0].logq[0] != rollouts[0].logq[0]


# --- where completions end ------------------------------------------------------------------------------------------


def test_the_end_token_is_part_of_the_completion_and_nothing_follows(student: CausalLM) -> None:
    eos = set(range(0, 260, 9))
    asked = requests(4, samples=10)
    rollouts = engine(student, tokens=20, eos=eos).generate(asked)
    reasons = {rollout.finish_reason for rollout in rollouts}
    assert reasons == {"stop", "length"}
    endless = engine(student, tokens=20).generate(asked)
    for rollout, whole in zip(rollouts, endless, strict=True):
        ends = np.isin(rollout.token_ids, list(eos))
        assert not ends[:-1].any()
        assert ends[-1] == (rollout.finish_reason == "stop")
        assert len(rollout) == 20 or rollout.finish_reason == "stop"
        assert len(rollout.logq) == len(rollout.token_ids) == len(rollout.final_hidden)
        # An end token cuts a completion short and changes nothing else.
        assert rollout.token_ids.tolist() == whole.token_ids[: len(rollout)].tolist()
        np.testing.assert_allclose(rollout.logq, whole.logq[: len(rollout)], atol=1e-4)


def test_an_end_token_on_the_last_place_stops(student: CausalLM) -> None:
    first = engine(student, tokens=1).generate(requests(1))[0]
    (rollout,) = engine(student, tokens=1, eos={int(first.token_ids[0])}).generate(requests(1))
    assert (len(rollout), rollout.finish_reason) == (1, "stop")


def test_the_pad_token_may_be_sampled(student: CausalLM) -> None:
    """It is masked on the left of a prompt, and a token like any other after it."""
    expected = engine(student).generate(requests())
    pad = int(expected[0].token_ids[3])
    assert tokens_of(engine(student, pad_token_id=pad).generate(requests())) == tokens_of(expected)


def test_the_checkpoints_generation_config_has_no_say(tiny_student: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_student, tmp_path / "opinionated")
    opinions = {
        "repetition_penalty": 5.0,
        "suppress_tokens": list(range(4, 200)),
        "temperature": 0.1,
        "top_k": 1,
        "do_sample": True,
        "max_new_tokens": 2,
        "eos_token_id": list(range(100)),
        "no_repeat_ngram_size": 1,
        "forced_eos_token_id": 3,
        "num_beams": 3,
    }
    (folder / "generation_config.json").write_text(json.dumps(opinions))
    policy = load(folder)
    plain = tokens_of(engine(load(tiny_student)).generate(requests()))
    assert tokens_of(engine(policy).generate(requests())) == plain
    assert policy.model.generation_config.repetition_penalty == 5.0


# --- limits ---------------------------------------------------------------------------------------------------------


def test_prompts_that_leave_no_room(student: CausalLM) -> None:
    sampler = engine(student, tokens=500)
    with pytest.raises(EngineError, match=r"prompt 7 has 13 tokens: with 500 of completion .* context of 512"):
        sampler.generate([RolloutRequest(Prompt(7, [5] * 13), 0, 0)])
    with pytest.raises(EngineError, match="prompt 8 has no tokens"):
        sampler.generate([RolloutRequest(Prompt(8, []), 0, 0)])


def test_nothing_to_do(student: CausalLM) -> None:
    assert engine(student).generate([]) == []


def test_batches_stay_within_their_tokens(student: CausalLM) -> None:
    sampler = engine(student, max_batch_tokens=60)
    asked = requests()
    batches = list(sampler._batches(asked))
    assert sorted(index for batch in batches for index in batch) == list(range(6))
    for batch in batches:
        longest = max(len(asked[index].prompt.token_ids) for index in batch) + 12
        assert len(batch) == 1 or len(batch) * longest <= 60


def test_out_of_memory_is_explained(student: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(**_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(student.model, "generate", exhausted)
    with pytest.raises(EngineError, match="out of memory while sampling 6 rollouts at once") as caught:
        engine(student).generate(requests())
    assert "round_prompts" in (caught.value.hint or "")


def test_nothing_is_printed(student: CausalLM, capfd: pytest.CaptureFixture[str]) -> None:
    engine(student, eos={0}).generate(requests())
    assert capfd.readouterr() == ("", "")


def test_hooks_and_states_are_gone_afterwards(student: CausalLM) -> None:
    rollouts = engine(student).generate(requests())
    assert not student.head._forward_pre_hooks
    for rollout in rollouts:
        assert rollout.final_hidden.untyped_storage().nbytes() == rollout.final_hidden.numel() * 4


@pytest.mark.smollm2
def test_the_real_student(smollm2: Path) -> None:
    """bfloat16: decoding against teacher forcing differs by rounding, and by no more."""
    policy = load(smollm2, "bfloat16")
    sampler, scorer = engine(policy, tokens=16, eos={2}), Scorer(policy)
    rollouts = sampler.generate(
        [RolloutRequest(Prompt(index, [1, 520, 9531, 198 + index]), 0, index) for index in range(4)]
    )
    hidden_q = [rollout.final_hidden for rollout in rollouts]
    measured = scorer.compare(rollouts, scorer.final_hidden(rollouts), hidden_q, sampler.logits, PLAIN)
    assert 0 < np.mean(np.concatenate([mismatch.tv for mismatch in measured])) < 0.05
    for rollout, mismatch in zip(rollouts, measured, strict=True):
        np.testing.assert_allclose(rollout.logq, mismatch.logq, atol=0.05)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu(tiny_student: Path) -> None:
    on_gpu = load_causal_lm(ModelRef(path=str(tiny_student)), Path("/"), dtype="float32", device="cuda")
    rollouts = engine(on_gpu).generate(requests())
    assert rollouts[0].final_hidden.device.type == "cpu"
    same = np.mean(
        [
            (a.token_ids == b.token_ids).mean()
            for a, b in zip(rollouts, engine(load(tiny_student)).generate(requests()), strict=True)
        ]
    )
    assert same > 0.8  # the noise is the same on both devices; TF32 and summation order are not
