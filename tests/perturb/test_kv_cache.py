"""KV cache formats: numerics against plain casts, decode against prefill, and every model family that we promise."""

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from opdcheck.perturb.kv_cache import (
    SIMULATED,
    _cast_truncating,
    attention_layers,
    check_kv_cache,
    check_skip_layers,
    quantize_kv_cache,
)
from opdcheck.perturb.quantization import calibration_pass

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "mistral": MistralConfig(**SIZES, sliding_window=8),
    "gemma2": Gemma2Config(**SIZES, head_dim=16, sliding_window=8),
    "gemma3": Gemma3TextConfig(**SIZES, head_dim=16, sliding_window=8),
    "phi3": Phi3Config(**SIZES),
}
IDS = (torch.arange(40) * 7 % 61 + 1).reshape(2, 20)


def make(family: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(FAMILIES[family]).eval().to(dtype)


@torch.no_grad()
def prefill(model: Any) -> torch.Tensor:
    return model(input_ids=IDS, use_cache=False).logits


@torch.no_grad()
def decode(model: Any) -> torch.Tensor:
    """Token by token through the cache. [batch, tokens, vocab]"""
    cache, steps = None, []
    for position in range(IDS.shape[1]):
        output = model(input_ids=IDS[:, position : position + 1], past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        steps.append(output.logits)
    return torch.cat(steps, dim=1)


def cached(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of layer 0 as the cache holds them."""
    with torch.no_grad():
        layer = model(input_ids=IDS, use_cache=True).past_key_values.layers[0]
    return layer.keys, layer.values


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "int8_per_token_head"])
def test_decoding_and_scoring_see_the_same_cache(family: str, kv_cache_dtype: str) -> None:
    model = make(family)
    plain = prefill(model)
    torch.testing.assert_close(decode(model), plain, rtol=1e-4, atol=1e-4)
    quantize_kv_cache(model, kv_cache_dtype)
    quantized = prefill(model)
    assert (quantized - plain).abs().max() > 1e-3, "scoring without a cache must see the rounding"
    # Decoding rounds float32 noise now and then to the other grid point, so a few logits may move by a step.
    difference = (decode(model) - quantized).abs()
    assert difference.median() < 1e-5
    assert difference.mean() < 0.02 * (quantized - plain).abs().mean()


@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e4m3", "fp8_e5m2", "bfloat16", "float16"])
def test_casts(kv_cache_dtype: str) -> None:
    model = make("llama")
    key, value = cached(model)
    quantize_kv_cache(model, kv_cache_dtype)
    dtype = {
        "fp8": torch.float8_e4m3fn,
        "fp8_e4m3": torch.float8_e4m3fn,
        "fp8_e5m2": torch.float8_e5m2,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
    }[kv_cache_dtype]
    for after, before in zip(cached(model), (key, value), strict=True):
        assert torch.equal(after, before.to(dtype).float())


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_per_token_head", "int8_per_token_head"])
def test_per_token_head(kv_cache_dtype: str) -> None:
    model = make("llama")
    before = cached(model)
    quantize_kv_cache(model, kv_cache_dtype)
    for states, after in zip(before, cached(model), strict=True):
        for head in states.reshape(-1, states.shape[-1]), after.reshape(-1, states.shape[-1]):
            assert head.shape[-1] == 16
        for row, rounded in zip(states.reshape(-1, 16), after.reshape(-1, 16), strict=True):
            if kv_cache_dtype.startswith("int8"):
                scale = row.abs().max() / 127
                expected = (row / scale).round() * scale
            else:
                scale = row.abs().max() / 448
                expected = (row / scale).to(torch.float8_e4m3fn).float() * scale
            torch.testing.assert_close(rounded, expected, rtol=1e-6, atol=0)


def test_large_values_saturate_instead_of_becoming_nan() -> None:
    model = make("llama")
    model.model.layers[0].self_attn.v_proj.weight.data.mul_(1e4)
    quantize_kv_cache(model, "fp8")
    _, value = cached(model)
    assert value.abs().max() == 448


def test_bfloat16_model_keeps_its_dtype() -> None:
    model = make("llama", torch.bfloat16)
    for kv_cache_dtype in SIMULATED:
        quantize_kv_cache(model, kv_cache_dtype)
    key, value = cached(model)
    assert key.dtype == value.dtype == torch.bfloat16


def test_skipped_layers_stay() -> None:
    model = make("llama")
    before = cached(model)
    quantize_kv_cache(model, "fp8", [0])
    assert all(torch.equal(a, b) for a, b in zip(before, cached(model), strict=True))
    plain = prefill(make("llama"))
    assert not torch.equal(prefill(model), plain)


def test_auto_does_nothing() -> None:
    model = make("llama")
    plain = prefill(model)
    quantize_kv_cache(model, "auto")
    assert torch.equal(prefill(model), plain)


@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
def test_calibrated_scales(strategy: str) -> None:
    model = make("llama")
    key, _ = cached(model)
    scheme = QuantizationArgs(num_bits=8, type="float", strategy=strategy, symmetric=True)
    quantize_kv_cache(model, "auto", scheme=scheme, calibration=calibration_pass(model, IDS.tolist()))
    peak = key.abs().amax(dim=(0, 2, 3), keepdim=True) if strategy == "attn_head" else key.abs().max()
    scale = peak / 448
    expected = (key / scale).to(torch.float8_e4m3fn).float() * scale
    torch.testing.assert_close(cached(model)[0], expected, rtol=1e-4, atol=1e-6)


def test_errors() -> None:
    model = make("llama")
    with pytest.raises(ValueError, match="did you mean fp8_e5m2"):
        check_kv_cache("fp8_e5m")
    with pytest.raises(ValueError, match=r"nvfp4 cannot be simulated.*engine: vllm, or one of auto"):
        check_kv_cache("nvfp4")
    check_kv_cache("nvfp4", engine="vllm")
    with pytest.raises(ValueError, match=r"skipped layer 2 does not exist; the model has layers 0 to 1"):
        check_skip_layers([2], model)
    scheme = QuantizationArgs(num_bits=8, type="float", strategy="tensor", symmetric=True)
    with pytest.raises(ValueError, match="needs calibration prompts"):
        quantize_kv_cache(model, "auto", scheme=scheme)
    with pytest.raises(ValueError, match="fp8_e5m2 cannot use"):
        quantize_kv_cache(model, "fp8_e5m2", scheme=scheme)
    with pytest.raises(ValueError, match="has no attention layers"):
        attention_layers(torch.nn.Linear(2, 2))


def test_real_student_is_hooked_in_every_layer(tiny_student: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_student)
    assert sorted(attention_layers(model)) == [0, 1]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_truncation_gives_the_largest_grid_value_not_beyond(dtype):
    """Against the whole grid: for each value the neighbour toward zero, found by search."""
    grid = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    grid = grid[grid.isfinite()].unique()
    values = torch.cat([torch.randn(2000, generator=torch.Generator().manual_seed(0)) * 3, grid, torch.tensor([1e6])])
    magnitudes = grid[grid >= 0]
    expected = torch.stack([magnitudes[magnitudes <= value.abs()].max() * value.sign() for value in values])
    assert torch.equal(_cast_truncating(values, dtype), expected)
