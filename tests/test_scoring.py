"""The trainer's side against plain `model(...).logits` and float64 numpy; memory; invariances."""

from __future__ import annotations

import dataclasses
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from architectures import ARCHITECTURES, VOCAB, save
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from opdcheck.config import ModelRef, Sampling
from opdcheck.errors import EngineError
from opdcheck.models import CausalLM, load_causal_lm
from opdcheck.rollouts import Prompt, Rollout
from opdcheck.scoring import Scorer

PLAIN = Sampling()
TRUNCATED = Sampling(temperature=0.8, top_k=12, top_p=0.9)


def load(folder: Path, dtype: str = "float32") -> CausalLM:
    return load_causal_lm(ModelRef(path=str(folder)), Path("/"), dtype=dtype, device="cpu")  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def student(tiny_student: Path) -> CausalLM:
    return load(tiny_student)


def rollout(prompt: list[int], completion: list[int], *, index: int = 0, **top: np.ndarray) -> Rollout:
    ids = np.array(completion, dtype=np.int64)
    return Rollout(Prompt(index, prompt), 0, ids, np.zeros(len(ids)), "length", **top)


def random_rollouts(vocab: int = VOCAB, seed: int = 0) -> list[Rollout]:
    """Prompts and completions of many lengths, one token included."""
    rng = np.random.default_rng(seed)
    shapes = [(5, 9), (1, 1), (17, 1), (3, 30), (40, 12), (5, 9), (2, 3)]
    return [
        rollout(rng.integers(0, vocab, p).tolist(), rng.integers(0, vocab, c).tolist(), index=index)
        for index, (p, c) in enumerate(shapes)
    ]


def reference_logits(model: CausalLM, one: Rollout) -> np.ndarray:
    """float64 [tokens, vocab]: the model's own logits of the whole sequence, at the positions that predict."""
    ids = torch.tensor([[*one.prompt.token_ids, *one.token_ids.tolist()]])
    with torch.no_grad():
        logits = model.model(input_ids=ids).logits[0].double().numpy()
    return logits[len(one.prompt.token_ids) - 1 : -1]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def with_top(one: Rollout, logq: np.ndarray, k: int) -> Rollout:
    """The rollout as an engine with top-k log-probabilities would give it, from log-probabilities [tokens, vocab]."""
    top_ids = np.argsort(-logq, axis=1, kind="stable")[:, :k]
    rows = np.arange(len(one))
    return Rollout(
        one.prompt, 0, one.token_ids, logq[rows, one.token_ids], "length", top_ids, np.take_along_axis(logq, top_ids, 1)
    )


# --- against plain transformers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_scores_are_the_models_own(name: str, tmp_path: Path) -> None:
    model = load(save(name, tmp_path))
    rollouts = random_rollouts()
    for one, scores in zip(
        rollouts, Scorer(model, batch_tokens=64).score(rollouts, Sampling(temperature=1.5)), strict=True
    ):
        logp = log_softmax(reference_logits(model, one) / 1.5)
        np.testing.assert_allclose(scores.logp, logp[np.arange(len(one)), one.token_ids], atol=1e-4)
        assert scores.logp.dtype == np.float64
        assert scores.top_logp is None
        np.testing.assert_array_equal(scores.argmax_p, logp.argmax(-1))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_the_models_own_alone_in_its_batch(tiny_student: Path, dtype: str) -> None:
    model = load(tiny_student, dtype)
    one = random_rollouts()[3]
    scores = Scorer(model).score([one], PLAIN)[0]
    logp = log_softmax(reference_logits(model, one))
    np.testing.assert_allclose(scores.logp, logp[np.arange(len(one)), one.token_ids], atol=0.15)
    hidden = Scorer(model).final_hidden([one])[0]
    assert hidden.dtype == getattr(torch, dtype)
    assert hidden.device.type == "cpu"


def test_top_tokens(student: CausalLM) -> None:
    rollouts = [with_top(one, log_softmax(reference_logits(student, one)), 7) for one in random_rollouts()]
    for one, scores in zip(rollouts, Scorer(student).score(rollouts, PLAIN), strict=True):
        assert scores.top_logp is not None
        np.testing.assert_allclose(scores.top_logp, one.top_logq, atol=1e-5)
        np.testing.assert_allclose(scores.logp, one.logq, atol=1e-5)
        assert scores.argmax_p.tolist() == one.top_ids[:, 0].tolist()


@pytest.mark.parametrize("sampling", [PLAIN, Sampling(top_k=5)])
def test_padding_among_the_top_tokens_is_no_token(student: CausalLM, sampling: Sampling) -> None:
    for plain in random_rollouts():
        one = with_top(plain, truncated_logq(student, plain, 5), 5)
        ids = np.concatenate([one.top_ids, np.full((len(one), 2), -1)], axis=1)
        logq = np.concatenate([one.top_logq, np.full((len(one), 2), -np.inf)], axis=1)
        padded = dataclasses.replace(one, top_ids=ids, top_logq=logq)
        want, found = Scorer(student).score([one], sampling)[0], Scorer(student).score([padded], sampling)[0]
        np.testing.assert_array_equal(found.top_logp[:, :5], want.top_logp)
        assert (found.top_logp[:, 5:] == -np.inf).all()
        np.testing.assert_array_equal(found.logp, want.logp)


# --- truncating sampling: the same support on both sides ------------------------------------------------------------


def truncated_logq(model: CausalLM, one: Rollout, k: int) -> np.ndarray:
    """Top-k sampling of a policy that differs from the trainer, float64 [tokens, vocab], -inf outside the support."""
    logits = reference_logits(model, one) + np.random.default_rng(5).normal(size=(len(one), model.vocab_size))
    logits[np.arange(len(one)), one.token_ids] += 20  # what was sampled is in the support
    kth = np.sort(logits, axis=1)[:, -k][:, None]
    return log_softmax(np.where(logits >= kth, logits, -np.inf))


def test_trainer_is_renormalised_over_the_engines_support(student: CausalLM) -> None:
    for plain in random_rollouts():
        logq = truncated_logq(student, plain, 5)
        one = with_top(plain, logq, 20)
        scores = Scorer(student).score([one], Sampling(top_k=5))[0]
        logp = log_softmax(np.where(np.isfinite(logq), reference_logits(student, one), -np.inf))
        assert np.isfinite(logp).sum(1).tolist() == [5] * len(one)
        np.testing.assert_allclose(scores.top_logp, np.take_along_axis(logp, one.top_ids, 1), atol=1e-5)
        np.testing.assert_allclose(scores.logp, logp[np.arange(len(one)), one.token_ids], atol=1e-5)
        np.testing.assert_array_equal(scores.argmax_p, logp.argmax(1))


def test_unknown_support_is_an_error(student: CausalLM) -> None:
    one = random_rollouts()[3]
    with pytest.raises(EngineError, match="gave no top log-probabilities"):
        Scorer(student).score([one], TRUNCATED)
    wide = with_top(one, log_softmax(reference_logits(student, one)), 7)
    with pytest.raises(EngineError, match="7 top tokens carry only 0") as caught:
        Scorer(student).score([wide], TRUNCATED)
    assert "Raise `rollout.logprobs`" in (caught.value.hint or "")


@pytest.mark.parametrize("sampling", [PLAIN, Sampling(temperature=0.7), TRUNCATED, Sampling(min_p=0.1)])
def test_compare_against_numpy(student: CausalLM, sampling: Sampling) -> None:
    rollouts = random_rollouts(student.vocab_size)
    scorer = Scorer(student)
    hidden_p = scorer.final_hidden(rollouts)
    hidden_q = [hidden + 0.05 * torch.randn_like(hidden) for hidden in hidden_p]
    measured = scorer.compare(rollouts, hidden_p, hidden_q, student.logits, sampling)
    for one, of_p, of_q, mismatch in zip(rollouts, hidden_p, hidden_q, measured, strict=True):
        logits_p, logits_q = (student.logits(hidden).double().numpy() / sampling.temperature for hidden in (of_p, of_q))
        logq = log_softmax(np.where(support(logits_q, sampling), logits_q, -np.inf))
        logp = log_softmax(np.where(support(logits_q, sampling), logits_p, -np.inf))
        q, p = np.exp(logq), np.exp(logp)
        rows = np.arange(len(one))
        np.testing.assert_allclose(mismatch.tv, 0.5 * np.abs(q - p).sum(1), rtol=1e-4, atol=1e-6)
        log_ratio = np.subtract(logq, logp, where=q > 0, out=np.zeros_like(q))
        np.testing.assert_allclose(mismatch.kl, (q * log_ratio).sum(1), rtol=1e-3, atol=1e-6)
        np.testing.assert_allclose(mismatch.logq, logq[rows, one.token_ids], atol=1e-5)
        np.testing.assert_allclose(mismatch.logp, logp[rows, one.token_ids], atol=1e-5)
        np.testing.assert_array_equal(mismatch.argmax_flip, (logq.argmax(1) != logp.argmax(1)).astype(float))
        assert mismatch.estimator == "exact"
        assert mismatch.tv is mismatch.tv_lower is mismatch.tv_upper
        assert mismatch.tv.mean() > 1e-3


def support(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    kept = np.exp(log_softmax(logits)) >= sampling.min_p * np.exp(log_softmax(logits)).max(1, keepdims=True)
    if sampling.top_k > 0:
        kept &= logits >= np.sort(logits, axis=1)[:, -sampling.top_k][:, None]
    for row in range(len(logits)):
        probabilities = np.exp(log_softmax(np.where(kept[row], logits[row], -np.inf)))
        order = np.argsort(probabilities)
        tail = np.cumsum(probabilities[order]) <= 1 - sampling.top_p
        tail[-1] = False
        if sampling.top_p < 1:
            kept[row, order[tail]] = False
    return kept


# --- controls and invariances ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sampling", [PLAIN, TRUNCATED])
def test_a_policy_against_itself_is_exactly_zero(tiny_student: Path, dtype: str, sampling: Sampling) -> None:
    model = load(tiny_student, dtype)
    scorer = Scorer(model)
    rollouts = random_rollouts()
    first, again = scorer.final_hidden(rollouts), scorer.final_hidden(rollouts)
    for mismatch in scorer.compare(rollouts, first, again, model.logits, sampling):
        assert (mismatch.tv == 0).all()
        assert (mismatch.kl == 0).all()
        assert (mismatch.argmax_flip == 0).all()
        np.testing.assert_array_equal(mismatch.logp, mismatch.logq)


def test_the_null_is_rounding(tiny_student: Path) -> None:
    """Nothing in float32, something in bfloat16: the batch shape alone moves the trainer."""
    rollouts = random_rollouts()
    means = {}
    for dtype in ("float32", "bfloat16"):
        model = load(tiny_student, dtype)
        scorer = Scorer(model)
        null = scorer.compare(
            rollouts, scorer.final_hidden(rollouts), scorer.null_hidden(rollouts), model.logits, PLAIN
        )
        means[dtype] = np.mean(np.concatenate([mismatch.tv for mismatch in null]))
    assert means["float32"] < 1e-5 < means["bfloat16"] < 0.2


def test_null_of_sequences_alone_in_their_batch_has_another_shape(student: CausalLM) -> None:
    rollouts = random_rollouts()
    shapes: list[tuple[int, int]] = []
    original = student.final_hidden
    watched = Scorer(student, batch_tokens=1)
    student.final_hidden = lambda ids, mask: shapes.append(tuple(ids.shape)) or original(ids, mask)  # type: ignore
    try:
        plain = watched.final_hidden(rollouts)
        null = watched.null_hidden(rollouts)
    finally:
        del student.final_hidden
    assert [rows for rows, _ in shapes] == [1] * 7 + [2] * 7
    for one, other in zip(plain, null, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_chunk_size_and_batches_do_not_matter(student: CausalLM) -> None:
    rollouts = random_rollouts(student.vocab_size)
    wide = Scorer(student)
    expected = wide.score(rollouts, PLAIN)
    hidden_p = wide.final_hidden(rollouts)
    hidden_q = [hidden + 0.05 * torch.randn_like(hidden) for hidden in hidden_p]
    compared = wide.compare(rollouts, hidden_p, hidden_q, student.logits, PLAIN)
    for chunk_bytes, batch_tokens in ((1, 1), (30_000, 50), (100_000, 10**9)):
        scorer = Scorer(student, chunk_bytes=chunk_bytes, batch_tokens=batch_tokens)
        for got, want in zip(scorer.score(rollouts, PLAIN), expected, strict=True):
            np.testing.assert_allclose(got.logp, want.logp, atol=1e-5)
        again = scorer.compare(rollouts, hidden_p, hidden_q, student.logits, PLAIN)
        for got, want in zip(again, compared, strict=True):
            np.testing.assert_allclose(got.tv, want.tv, atol=1e-5)


def test_order_of_the_rollouts_does_not_matter(student: CausalLM) -> None:
    rollouts = random_rollouts()
    forwards = Scorer(student, batch_tokens=60).score(rollouts, PLAIN)
    backwards = Scorer(student, batch_tokens=60).score(rollouts[::-1], PLAIN)[::-1]
    for one, other in zip(forwards, backwards, strict=True):
        np.testing.assert_allclose(one.logp, other.logp, atol=1e-5)


def test_batches_stay_within_their_tokens(student: CausalLM) -> None:
    rollouts = random_rollouts()
    for batch in Scorer(student, batch_tokens=80)._batches(rollouts):
        lengths = [len(rollouts[index].prompt.token_ids) + len(rollouts[index]) - 1 for index in batch]
        assert len(batch) == 1 or len(batch) * max(lengths) <= 80


def test_hidden_states_do_not_keep_the_batch_alive(student: CausalLM) -> None:
    for hidden in Scorer(student).final_hidden(random_rollouts()):
        assert hidden.untyped_storage().nbytes() == hidden.numel() * hidden.element_size()


# --- what can be wrong ----------------------------------------------------------------------------------------------


def test_an_engine_without_hidden_states(student: CausalLM) -> None:
    one = random_rollouts()[0]
    hidden = Scorer(student).final_hidden([one])
    with pytest.raises(EngineError, match="no final hidden states"):
        Scorer(student).compare([one], hidden, [None], student.logits, PLAIN)


def test_another_vocabulary(student: CausalLM) -> None:
    one = random_rollouts()[0]
    hidden = Scorer(student).final_hidden([one])
    with pytest.raises(EngineError, match="has 259 logits, the trainer 260"):
        Scorer(student).compare([one], hidden, hidden, lambda rows: student.logits(rows)[:, 1:], PLAIN)


def test_nan_of_the_rollout_policy_stays_visible(student: CausalLM) -> None:
    one = random_rollouts()[0]
    hidden = Scorer(student).final_hidden([one])
    broken = [hidden[0].clone()]
    broken[0][2] = torch.nan
    for sampling in (PLAIN, TRUNCATED):
        (mismatch,) = Scorer(student).compare([one], hidden, broken, student.logits, sampling)
        assert np.isnan(mismatch.tv).tolist() == [row == 2 for row in range(len(one))]


def test_no_rollouts(student: CausalLM) -> None:
    assert Scorer(student).score([], PLAIN) == []
    assert Scorer(student).compare([], [], [], student.logits, PLAIN) == []


def test_out_of_memory_is_explained(student: CausalLM) -> None:
    def exhausted(_: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4 GiB")

    one = random_rollouts()[0]
    hidden = Scorer(student).final_hidden([one])
    with pytest.raises(EngineError, match="out of memory while comparing"):
        Scorer(student).compare([one], hidden, hidden, exhausted, PLAIN)


# --- memory ---------------------------------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all storages that torch operations make and that are still alive. Deterministic."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        given = {t.untyped_storage()._cdata for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage(), given)
        return result

    def _count(self, storage: torch.UntypedStorage, given: set[int]) -> None:
        key = storage._cdata
        if key in given or key in self._seen:
            return
        self._seen.add(key)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._drop, key, storage.nbytes())

    def _drop(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size


def wide_student(dtype: torch.dtype, vocab: int = 262_144) -> CausalLM:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    return CausalLM(LlamaForCausalLM(config).to(dtype).eval().requires_grad_(False))


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0.9), Sampling(temperature=0.9, top_k=50, top_p=0.9, min_p=1e-5)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_chunk_stays_within_its_bytes(dtype: torch.dtype, sampling: Sampling, noise: float) -> None:
    model = wide_student(dtype)
    policy = model.with_logit_noise(noise, 0)
    tokens = 20
    one = rollout([1, 2], list(range(tokens)))
    hidden = Scorer(model).final_hidden([one])
    scorer = Scorer(model)
    with LiveBytes() as memory:
        scorer.compare([one], hidden, hidden, policy.logits, sampling)
    assert scorer.chunk_bytes / 3 < memory.peak <= scorer.chunk_bytes
    top = with_top(one, np.log(np.full((tokens, 50), 1 / 50)), 50)
    with LiveBytes() as memory:
        scorer.score([top], sampling)
    assert scorer.chunk_bytes / 3 < memory.peak <= scorer.chunk_bytes
