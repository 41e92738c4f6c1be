"""Controls on the real student: what must be zero is zero, what must be ordered is ordered."""

from __future__ import annotations

from pathlib import Path

import pytest

from opdcheck.config import Candidate
from opdcheck.engines.vllm_support import has_amx, has_avx512
from opdcheck.floor import trainer_null
from opdcheck.measure import measure_round
from opdcheck.mismatch.aggregate import Summary, summarize
from opdcheck.session import Session

EXAMPLES = Path(__file__).parents[1] / "examples" / "smollm2"
PROMPTS = 8

needs_fp8_kv_cache = pytest.mark.skipif(
    not (has_avx512() or has_amx()), reason="vLLM's FP8 KV cache on a CPU needs AVX-512 or AMX"
)


def candidate(smollm2: Path, *, tokens: int = 64, **rollout: object) -> Candidate:
    engine_args = {"max_model_len": 512, "enforce_eager": True} if rollout["engine"] == "vllm" else {}
    return Candidate.model_validate(
        {
            "student": {"path": str(smollm2), "device": "cpu"},
            "rollout": {"engine_args": engine_args, **rollout},
            "workload": {"prompts": "prompts.jsonl", "num_prompts": PROMPTS, "max_completion_length": tokens},
        }
    )


def measured(smollm2: Path, *, tokens: int = 64, **rollout: object) -> Summary:
    with Session(candidate(smollm2, tokens=tokens, **rollout), EXAMPLES) as session:
        return summarize(measure_round(session, session.prompts).by_prompt())


def test_the_student_against_itself_in_the_same_shapes_is_exactly_zero(smollm2):
    """The engine decodes the same requests twice: the same tokens, and not a bit of difference in the states."""
    with Session(candidate(smollm2, engine="transformers"), EXAMPLES) as session:
        requests = session.requests(session.prompts[:4])
        one, other = session.engine.generate(requests), session.engine.generate(requests)
        assert [first.token_ids.tolist() for first in one] == [second.token_ids.tolist() for second in other]
        hidden = [[rollout.final_hidden for rollout in run] for run in (one, other)]
        sampling = session.candidate.rollout.sampling
        for mismatch in session.scorer.compare(one, *hidden, session.engine.logits, sampling):
            assert mismatch.tv.max() == 0
            assert mismatch.kl.max() == 0
        # Another batch shape is another order of additions in BF16: above zero, and what a floor is for.
        null = trainer_null(session, one)
        assert 0 < null.metrics["tv"].mean < 0.1


@pytest.mark.vllm
@pytest.mark.slow
def test_the_kernels_alone(smollm2):
    """Issue target: BF16 through vLLM against Transformers has a k3 of the order 0.002."""
    pytest.importorskip("vllm")
    bf16 = measured(smollm2, engine="vllm").metrics
    assert 0.0005 < bf16["k3"].mean < 0.008


@pytest.mark.vllm
@pytest.mark.slow
@needs_fp8_kv_cache
def test_kernels_then_fp8_e4m3_then_fp8_e5m2(smollm2):
    """Issue targets: FP8 e4m3 keys and values at least 5 times the kernels' k3; e5m2 above e4m3 (CPU kernels)."""
    pytest.importorskip("vllm")
    bf16, e4m3, e5m2 = (
        measured(smollm2, engine="vllm", kv_cache_dtype=name).metrics for name in ("auto", "fp8_e4m3", "fp8_e5m2")
    )
    assert e4m3["k3"].mean > 5 * bf16["k3"].mean
    assert e5m2["k3"].mean > e4m3["k3"].mean
    # The Rao-Blackwellised KL estimates the same thing with less noise.
    assert e4m3["kl"].mean > 5 * bf16["kl"].mean
    assert e5m2["kl"].mean > e4m3["kl"].mean


@pytest.mark.slow
def test_simulated_fp8_keys_and_values(smollm2):
    """The same order without vLLM, on any CPU: the format alone, rounded to nearest."""
    e4m3, e5m2 = (
        measured(smollm2, engine="transformers", kv_cache_dtype=name, tokens=16).metrics
        for name in ("fp8_e4m3", "fp8_e5m2")
    )
    assert 0.003 < e4m3["kl"].mean < e5m2["kl"].mean
