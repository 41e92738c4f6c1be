"""What does not fit is said before a model is loaded, with what would fit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from inline_snapshot import snapshot
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MixtralConfig

from opdcheck.config import Quantization
from opdcheck.perturb.fit import check_fits, dividing_group_size
from opdcheck.perturb.quantization import to_quantization_config


@pytest.fixture(scope="module")
def smollm_shapes() -> Any:
    """SmolLM2-135M's shapes with 2 layers, on the meta device."""
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def message(spec: Any, model: Any, **kwargs: Any) -> str:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        check_fits(to_quantization_config(spec), model, **kwargs)
    return str(error.value)


def test_group_128_does_not_divide_576(smollm_shapes: Any) -> None:
    assert message("W4A16", smollm_shapes) == snapshot(
        "groups of 128 columns do not divide 12 of 14 layers: model.layers.0.self_attn.q_proj (576x576), "
        "model.layers.0.self_attn.k_proj (192x576), model.layers.0.self_attn.v_proj (192x576), ...; "
        "group_size: 64 divides all of them (`{scheme: ..., group_size: 64}`)"
    )
    check_fits(to_quantization_config(Quantization(scheme="W4A16", group_size=64)), smollm_shapes, fused=True)


def test_block_128_does_not_divide_576(smollm_shapes: Any) -> None:
    assert "blocks of 128 columns" in message("FP8_BLOCK", smollm_shapes)
    assert "group_size: 64" in message("FP8_BLOCK", smollm_shapes)
    check_fits(to_quantization_config(Quantization(scheme="FP8_BLOCK", group_size=64)), smollm_shapes, fused=True)


def test_block_rows_matter_where_vllm_fuses() -> None:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=256,
        intermediate_size=192,
        num_hidden_layers=1,
        num_attention_heads=2,
        head_dim=128,
        num_key_value_heads=2,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    spec = Quantization(scheme="FP8_BLOCK", ignore=["lm_head", "re:.*down_proj"])
    check_fits(to_quantization_config(spec), model)
    assert message(spec, model, fused=True) == snapshot(
        "blocks of 128 rows do not divide model.layers.0.mlp.gate_proj (192 rows), which vLLM fuses with "
        "model.layers.0.mlp.up_proj; group_size: 64 does"
    )


def test_formats_with_a_fixed_group(smollm_shapes: Any) -> None:
    check_fits(to_quantization_config("NVFP4"), smollm_shapes)
    with pytest.raises(ValueError, match="NVFP4 fixes its groups at 16"):
        to_quantization_config(Quantization(scheme="NVFP4", group_size=32))
    with pytest.raises(ValueError, match="W8A8 has no groups"):
        to_quantization_config(Quantization(scheme="W8A8", group_size=32))


def test_patterns_that_match_nothing(smollm_shapes: Any) -> None:
    assert message(Quantization(scheme="W8A8", targets=["Linaer"]), smollm_shapes) == snapshot(
        "target pattern 'Linaer' matches no module; expected a module name, a class such as `Linear`, or a "
        "`re:` pattern. This model has, for instance, model.layers.0.self_attn.q_proj, "
        "model.layers.1.mlp.down_proj, lm_head"
    )
    assert "ignore pattern 're:.*donw_proj' matches no module" in message(
        Quantization(scheme="W8A8", ignore=["lm_head", "re:.*donw_proj"]), smollm_shapes
    )
    assert "leave no layer" in message(Quantization(scheme="W8A8", ignore=["Linear"]), smollm_shapes)


def test_what_cannot_be_quantized(smollm_shapes: Any) -> None:
    assert "e.g. model.layers.0.mlp (LlamaMLP)" in message(
        Quantization(scheme="W8A8", targets=["re:.*mlp$"]), smollm_shapes
    )
    assert "lm_head shares its weights" in message(Quantization(scheme="W8A8", ignore=[]), smollm_shapes)


def test_stacked_experts_are_refused() -> None:
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=2,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert "stacked expert weights" in message("W8A8", model)


def test_fused_shards_must_agree(smollm_shapes: Any) -> None:
    spec = Quantization(scheme="W8A8", ignore=["lm_head", "re:.*k_proj"])
    check_fits(to_quantization_config(spec), smollm_shapes)
    assert message(spec, smollm_shapes, fused=True) == snapshot(
        "vLLM fuses model.layers.0.self_attn.q_proj, model.layers.0.self_attn.k_proj, "
        "model.layers.0.self_attn.v_proj into one matrix, so they must be quantized alike "
        "(model.layers.0.self_attn.k_proj left out); target or ignore all of them"
    )


def test_unknown_and_malformed_schemes() -> None:
    with pytest.raises(ValueError, match="did you mean FP8_DYNAMIC"):
        to_quantization_config("fp8_dynamc")
    with pytest.raises(ValueError, match="needs `config_groups`"):
        to_quantization_config({"ignore": ["lm_head"]})
    with pytest.raises(ValueError, match=r"config_groups\.g"):
        to_quantization_config({"config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": "x"}}}})
    with pytest.raises(ValueError, match="gptq"):
        to_quantization_config({"quant_method": "gptq", "config_groups": {"W8A8": ["Linear"]}})


@pytest.mark.parametrize("role", ["targets", "ignore"])
def test_an_invalid_regular_expression_is_named(smollm_shapes: Any, role: str) -> None:
    spec = Quantization.model_validate({"scheme": "W8A8", role: ["re:("]})
    assert "pattern 're:(' is not a regular expression" in message(spec, smollm_shapes)


@pytest.mark.parametrize(
    ("group", "problem"),
    [
        ({"weights": {"num_bits": 1}}, r"config_groups\.g\.weights\.num_bits: expected at least 2, found 1"),
        ({"input_activations": {"num_bits": 0}}, r"input_activations\.num_bits: expected at least 2, found 0"),
        ({}, r"config_groups\.g quantizes nothing"),
    ],
)
def test_groups_that_cannot_be_meant(group: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        to_quantization_config({"config_groups": {"g": {"targets": ["Linear"], **group}}})


def test_full_config_with_a_preset_group_and_kv_scheme(smollm_shapes: Any) -> None:
    kv = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
    config = to_quantization_config({"config_groups": {"W8A8": ["Linear"]}, "kv_cache_scheme": kv})
    assert config.ignore == ["lm_head"]
    check_fits(config, smollm_shapes)
    kv["num_bits"] = 4
    bad = {"config_groups": {"W8A8": ["Linear"]}, "kv_cache_scheme": kv}
    assert "kv_cache_scheme: vLLM takes num_bits: 8" in message(bad, smollm_shapes)


@pytest.mark.parametrize(("columns", "size"), [([576, 1536], 64), ([4096], 128), ([100], 4), ([7], 1)])
def test_dividing_group_size(columns: list[int], size: int) -> None:
    assert dividing_group_size(columns) == size


def test_real_config(tiny_student: Path) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tiny_student))
    check_fits(to_quantization_config("W4A16"), model, fused=True)
