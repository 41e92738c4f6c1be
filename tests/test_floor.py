"""The floor is about the kernels: nothing of the candidate that changes numbers is left in it."""

import pytest
from samples import candidate

from opdcheck.config import FIXED_ARGS, OWN_KEYS
from opdcheck.engines.vllm_support import ENGINE_SETS
from opdcheck.floor import NEUTRAL_ENGINE_ARGS, unperturbed


def test_only_neutral_engine_arguments_stay():
    neutral = {"max_model_len": 512, "enforce_eager": True, "tensor_parallel_size": 2, "gpu_memory_utilization": 0.5}
    changing = {
        "quantization": "fp8",
        "quantization_config": {},
        "hf_overrides": {"rope_theta": 1},
        "load_format": "dummy",
        "additional_config": {},
        "speculative_config": {"num_speculative_tokens": 2},
        "attention_backend": "FLASHINFER",
    }
    found = unperturbed(candidate(engine_args={**changing, **neutral})).rollout.engine_args
    assert found == neutral


def test_the_neutral_arguments_are_vllms_and_the_users_to_set():
    arguments = pytest.importorskip("vllm.engine.arg_utils", reason="vLLM is not installed")
    assert set(NEUTRAL_ENGINE_ARGS) <= set(arguments.EngineArgs.__dataclass_fields__)
    assert not set(NEUTRAL_ENGINE_ARGS) & {*OWN_KEYS, *FIXED_ARGS, *ENGINE_SETS}
