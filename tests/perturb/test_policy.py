"""Which parts a candidate has, and that a policy is built of exactly the chosen ones."""

import shutil
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from candidates import CALIBRATION, candidate
from safetensors.torch import load_file, save_file
from tiny import make_tiny_student

from opdcheck.errors import ConfigError
from opdcheck.measurement import SourceName
from opdcheck.perturb.checkpoint import write_checkpoint
from opdcheck.perturb.kv_cache import quantize_kv_cache
from opdcheck.perturb.live import LivePolicy
from opdcheck.perturb.noise import add_weight_noise
from opdcheck.perturb.policy import PARTS, active_parts, build_policy, describe
from opdcheck.perturb.quantization import (
    calibration_pass,
    fake_quantize_activations,
    fake_quantize_weights,
    to_quantization_config,
)

IDS = torch.arange(4, 68).reshape(2, 32)


def logits(policy: Any) -> torch.Tensor:
    hidden = policy.final_hidden(IDS, torch.ones_like(IDS))
    return policy.logits(hidden.reshape(-1, hidden.shape[-1]))


@pytest.fixture(scope="module")
def stale(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_student(tmp_path_factory.mktemp("stale"), seed=1)


@pytest.mark.parametrize(
    ("rollout", "parts"),
    [
        ({}, []),
        ({"quantization": "W4A16"}, ["weights"]),
        ({"quantization": "W8A8"}, ["weights", "activations"]),
        ({"quantization": "UNQUANTIZED"}, []),
        ({"kv_cache_dtype": "fp8"}, ["kv_cache"]),
        ({"kv_cache_dtype": "bfloat16"}, ["kv_cache"]),
        ({"dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}, ["dtype"]),
        ({"noise": {"weights": 0.1}}, ["noise"]),
        ({"noise": {"logits": 0.1}}, ["noise"]),
        ({"noise": {"seed": 1}}, []),
        ({"staleness": {"checkpoint": "old"}, "noise": {"weights": 0.1}}, ["staleness", "noise"]),
    ],
)
def test_active_parts(tiny_student: Path, rollout: dict[str, Any], parts: list[str]) -> None:
    assert active_parts(candidate(tiny_student, **rollout)) == parts


def test_kv_scheme_of_a_full_config_is_a_part(tiny_student: Path) -> None:
    kv = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    spec = {"config_groups": {"W8A16": ["Linear"]}, "kv_cache_scheme": kv}
    asked = candidate(tiny_student, quantization=spec)
    assert active_parts(asked) == ["weights", "kv_cache"]
    policy = build_policy(asked, Path(), ["kv_cache"], calibration_ids=CALIBRATION)
    plain = build_policy(asked, Path(), [])
    assert not torch.equal(logits(policy), logits(plain))


def test_no_parts_is_the_student(tiny_student: Path, stale: Path) -> None:
    asked = candidate(
        tiny_student,
        dtype="bfloat16",
        quantization="W8A8",
        kv_cache_dtype="fp8",
        noise={"weights": 0.1},
        staleness={"checkpoint": str(stale)},
    )
    saved = load_file(tiny_student / "model.safetensors")
    policy = build_policy(asked, Path(), [])
    assert policy.dtype == torch.float32
    assert all(torch.equal(saved[name], parameter) for name, parameter in policy.model.named_parameters())
    assert active_parts(asked) == list(PARTS)


def test_every_source_but_the_kernel_is_a_part() -> None:
    assert set(PARTS) == set(get_args(SourceName)) - {"kernel"}


def test_what_is_no_part_of_new_weights_is_refused(tiny_student: Path, stale: Path) -> None:
    asked = candidate(tiny_student, staleness={"checkpoint": str(stale)})
    student = build_policy(asked, Path(), [])
    with pytest.raises(ValueError, match="staleness is nothing that is done to new weights"):
        LivePolicy(student, asked, active_parts(asked), noise_seed=0, calibration_ids=CALIBRATION)


def test_all_parts_in_order(tiny_student: Path, stale: Path) -> None:
    """Staleness, noise, weights, activations, KV cache, each on top of the one before."""
    asked = candidate(
        tiny_student,
        dtype="bfloat16",
        quantization="FP8",
        kv_cache_dtype="fp8_e5m2",
        noise={"weights": 0.1, "seed": 4},
        staleness={"checkpoint": str(stale)},
    )
    policy = build_policy(asked, Path(), PARTS, calibration_ids=CALIBRATION)
    by_hand = build_policy(candidate(stale, student_dtype="bfloat16"), Path(), [])
    config = to_quantization_config("FP8")
    add_weight_noise(by_hand.model, 0.1, 4)
    # Static scales are set before the weights are rounded.
    fake_quantize_activations(by_hand.model, config, calibration_pass(by_hand.model, CALIBRATION))
    fake_quantize_weights(by_hand.model, config)
    quantize_kv_cache(by_hand.model, "fp8_e5m2")
    assert torch.equal(logits(policy), logits(by_hand))


def test_staleness_of_another_architecture(tiny_student: Path, stale: Path, tmp_path: Path) -> None:
    shutil.copytree(stale, tmp_path / "other")
    config = tmp_path / "other" / "config.json"
    config.write_text(config.read_text().replace('"intermediate_size": 256', '"intermediate_size": 128'))
    weights = load_file(stale / "model.safetensors")
    for name in weights:
        if "gate_proj" in name or "up_proj" in name:
            weights[name] = weights[name][:128].clone()
        if "down_proj" in name:
            weights[name] = weights[name][:, :128].clone()
    save_file(weights, tmp_path / "other" / "model.safetensors", metadata={"format": "pt"})
    asked = candidate(tiny_student, staleness={"checkpoint": str(tmp_path / "other")})
    with pytest.raises(ConfigError, match=r"mlp\.gate_proj\.weight \(128, 128\), the student \(256, 128\)"):
        build_policy(asked, Path(), ["staleness"])


def test_staleness_beside_another_model(tiny_student: Path, stale: Path) -> None:
    asked = candidate(tiny_student, staleness={"checkpoint": str(stale)}, model={"path": str(stale)})
    with pytest.raises(ConfigError, match="not both"):
        build_policy(asked, Path(), active_parts(asked))


def test_static_scales_without_prompts_are_a_config_error(tiny_student: Path) -> None:
    with pytest.raises(ConfigError, match="need calibration prompts"):
        build_policy(candidate(tiny_student, quantization="FP8"), Path(), ["activations"])


def test_another_checkpoint(tiny_student: Path, stale: Path) -> None:
    asked = candidate(tiny_student, model={"path": str(stale)})
    assert active_parts(asked) == ["weights"]
    policy = build_policy(asked, Path(), ["weights"])
    assert torch.equal(logits(policy), logits(build_policy(candidate(stale), Path(), [])))


@pytest.mark.parametrize("scheme", ["W8A8", "W4A16", "FP8_DYNAMIC", "FP8"])
def test_a_compressed_checkpoint_as_rollout_model(tiny_student: Path, tmp_path: Path, scheme: str) -> None:
    """Transformers decompresses it and rounds its activations: the same as building it from the student."""
    made = candidate(tiny_student, quantization=scheme)
    write_checkpoint(made, Path(), tmp_path / "compressed", compressed=True, calibration_ids=CALIBRATION)
    loaded = build_policy(candidate(tiny_student, model={"path": str(tmp_path / "compressed")}), Path(), ["weights"])
    built = build_policy(made, Path(), active_parts(made), calibration_ids=CALIBRATION)
    torch.testing.assert_close(logits(loaded), logits(built), rtol=1e-3, atol=1e-2)
    again = candidate(tiny_student, model={"path": str(tmp_path / "compressed")}, quantization="W8A8")
    with pytest.raises(ConfigError, match="already quantized"):
        build_policy(again, Path(), ["weights"])


def test_describe(tiny_student: Path) -> None:
    def shown(engine: str, **rollout: Any) -> list[tuple[str, str]]:
        asked = candidate(tiny_student, quantization="W8A8", kv_cache_dtype="fp8", **rollout)
        return [(entry.part, entry.how) for entry in describe(asked, engine=engine)]

    assert shown("transformers") == [("weights", "simulated"), ("activations", "simulated"), ("kv_cache", "simulated")]
    assert shown("vllm") == [("weights", "real"), ("activations", "real"), ("kv_cache", "real")]
    assert shown("vllm", simulate=True) == [
        ("weights", "simulated"),
        ("activations", "not applied"),
        ("kv_cache", "real"),
    ]
    assert shown("vllm", simulate=True, noise={"logits": 1.0, "weights": 0.1})[:2] == [
        ("noise", "real"),
        ("noise", "not applied"),
    ]
