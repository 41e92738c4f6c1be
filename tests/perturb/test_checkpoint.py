"""Checkpoints: whole or absent, the same numbers as the live model, and a config that vLLM reads."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from candidates import CALIBRATION, candidate
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, CompressedTensorsConfig

from opdcheck.config import Quantization
from opdcheck.errors import ConfigError
from opdcheck.perturb.checkpoint import needs_checkpoint, write_checkpoint
from opdcheck.perturb.policy import build_policy, describe

# 128 rows by 128 columns is one block: the library's decoder would take its scales for per-channel ones.
BLOCK_64 = {"scheme": "FP8_BLOCK", "group_size": 64}
SCHEMES = ["W8A8", "W4A16", "W8A16", "FP8", "FP8_DYNAMIC", BLOCK_64, "NVFP4", "NVFP4A16", "MXFP4", "MXFP8"]


def test_simulated_checkpoint_holds_the_live_models_weights(tiny_student: Path, tmp_path: Path) -> None:
    asked = candidate(tiny_student, quantization="W8A8", noise={"weights": 0.05}, dtype="bfloat16", simulate=True)
    write_checkpoint(asked, Path(), tmp_path / "out")
    live = build_policy(asked, Path(), ["noise", "weights", "dtype"])
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert set(saved) == {name for name, _ in live.model.named_parameters()}
    assert all(torch.equal(saved[name], parameter) for name, parameter in live.model.named_parameters())
    assert {tensor.dtype for tensor in saved.values()} == {torch.bfloat16}
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert [(entry.part, entry.how) for entry in describe(asked, engine="vllm")][1:3] == [
        ("weights", "simulated"),
        ("activations", "not applied"),
    ]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_compressed_checkpoint_decodes_to_the_simulated_weights(
    tiny_student: Path, tmp_path: Path, scheme: Any
) -> None:
    asked = candidate(tiny_student, quantization=scheme, dtype="bfloat16")
    write_checkpoint(asked, Path(), tmp_path / "out", calibration_ids=CALIBRATION)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "compressed-tensors"
    assert config["quantization_status"] == "compressed"
    assert config["ignore"] == ["lm_head"]
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", dtype=torch.bfloat16, quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    live = build_policy(asked, Path(), ["weights", "dtype"])
    name = "model.layers.1.mlp.gate_proj"
    decoded, simulated = loaded.get_submodule(name).weight.float(), live.model.get_submodule(name).weight.float()
    # Decoding multiplies in bfloat16, the simulation in float32: the last bit may differ, no grid point may.
    torch.testing.assert_close(decoded, simulated, rtol=2**-7, atol=1e-6)
    assert torch.isfinite(loaded(input_ids=torch.tensor([CALIBRATION[0]])).logits).all()


def test_static_scales_are_written(tiny_student: Path, tmp_path: Path) -> None:
    kv = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    asked = candidate(tiny_student, quantization={"config_groups": {"FP8": ["Linear"]}, "kv_cache_scheme": kv})
    write_checkpoint(asked, Path(), tmp_path / "out", calibration_ids=CALIBRATION)
    saved = load_file(tmp_path / "out" / "model.safetensors")
    for name in ("mlp.down_proj.input_scale", "self_attn.k_scale", "self_attn.v_scale"):
        assert 0 < saved[f"model.layers.0.{name}"].item() < 10
    assert saved["model.layers.0.mlp.down_proj.weight"].dtype == torch.float8_e4m3fn


def test_tokenizer_comes_along(tiny_student: Path, tmp_path: Path) -> None:
    write_checkpoint(candidate(tiny_student, noise={"weights": 0.1}), Path(), tmp_path / "out")
    old, new = AutoTokenizer.from_pretrained(tiny_student), AutoTokenizer.from_pretrained(tmp_path / "out")
    assert new.encode("abc") == old.encode("abc")
    assert new.chat_template == old.chat_template


def test_whole_or_absent(tiny_student: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="need calibration prompts"):
        write_checkpoint(candidate(tiny_student, quantization="FP8"), Path(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_an_older_folder_is_replaced(tiny_student: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "stale.safetensors").write_text("old")
    write_checkpoint(candidate(tiny_student, noise={"weights": 0.1}), Path(), tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert not (tmp_path / "out" / "stale.safetensors").exists()


def test_when_a_checkpoint_is_needed(tiny_student: Path) -> None:
    assert not needs_checkpoint(candidate(tiny_student, kv_cache_dtype="fp8", noise={"logits": 0.1}))
    assert needs_checkpoint(candidate(tiny_student, quantization=Quantization(scheme="W8A8").model_dump()))
    assert needs_checkpoint(candidate(tiny_student, noise={"weights": 0.1}))
    assert needs_checkpoint(candidate(tiny_student, staleness={"checkpoint": str(tiny_student)}))
