"""Fake quantization of keys and values as they enter the KV cache, with vLLM's meaning of each `kv_cache_dtype`.

Attention sees rounded keys (after RoPE) and values of all tokens, both when decoding with a cache and when scoring a
whole sequence without one. Rounds to nearest, as GPUs do. vLLM's CPU backend truncates toward zero instead, which gives
about three times the mismatch. Some GPU backends also quantize the query; this is not simulated.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from compressed_tensors.modeling.kvcache import initialize_hooked_kv_cache, register_key_hook, register_value_hook
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from compressed_tensors.quantization.lifecycle.initialize import is_attention_module
from compressed_tensors.quantization.utils import calculate_qparams

from opdcheck.config import EngineName
from opdcheck.engines.base import has_own_kernels
from opdcheck.perturb.qparams import QParams, round_to_grid

Round = Callable[[torch.Tensor], torch.Tensor]
"""Keys or values [batch, heads, tokens, head_dim] -> the same, on the cache format's grid."""

UNQUANTIZED = ("auto", "bfloat16", "float16")
SIMULATED = ("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_per_token_head", "int8_per_token_head")
_REAL_ONLY = {
    "int4_per_token_head": "vLLM rotates before it rounds",
    "fp8_inc": "Gaudi only",
    "fp8_ds_mla": "multi-head latent attention only",
    "nvfp4_ds_mla": "multi-head latent attention only",
    "nvfp4": "its kernel's rounding is not reproduced here",
    "nvfp4_4over6": "its kernel's rounding is not reproduced here",
    "turboquant_k8v4": "its codebooks are not reproduced here",
    "turboquant_4bit_nc": "its codebooks are not reproduced here",
    "turboquant_k3v4_nc": "its codebooks are not reproduced here",
    "turboquant_3bit_nc": "its codebooks are not reproduced here",
    "ultraquant_4bit": "its codebooks are not reproduced here",
}
_SMALLEST_SCALE = 1e-6  # vLLM's floor for per-token-head scales


def check_kv_cache(kv_cache_dtype: str, *, engine: EngineName = "transformers") -> None:
    """Checks the name of a KV cache format.

    Args:
        engine: of one that has its own kernels, the name alone is checked.

    Raises:
        ValueError: unknown or not simulated, naming the alternatives.
    """
    known = (*UNQUANTIZED, *SIMULATED, *_REAL_ONLY)
    if kv_cache_dtype not in known:
        near = difflib.get_close_matches(kv_cache_dtype, known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ValueError(f"unknown KV cache dtype {kv_cache_dtype!r}; {hint}expected one of {', '.join(known)}")
    if not has_own_kernels(engine) and kv_cache_dtype in _REAL_ONLY:
        raise ValueError(
            f"{kv_cache_dtype} cannot be simulated ({_REAL_ONLY[kv_cache_dtype]}); "
            f"use engine: vllm, or one of {', '.join((*UNQUANTIZED, *SIMULATED))}"
        )


def check_skip_layers(skip_layers: Sequence[int], model: torch.nn.Module) -> None:
    """Checks that the layers exist; a model on the meta device will do.

    Raises:
        ValueError: one does not.
    """
    config = model.config.get_text_config() if hasattr(model, "config") else None  # type: ignore[operator, union-attr]
    layers = getattr(config, "num_hidden_layers", None)
    beyond = [layer for layer in skip_layers if layer < 0 or (layers is not None and layer >= layers)]
    if beyond:
        raise ValueError(f"skipped layer {beyond[0]} does not exist; the model has layers 0 to {(layers or 0) - 1}")


def is_quantized(kv_cache_dtype: str) -> bool:
    """Whether a KV cache of this dtype loses more than the rollout dtype does."""
    return kv_cache_dtype not in UNQUANTIZED


def quantize_kv_cache(
    model: Any,
    kv_cache_dtype: str,
    skip_layers: Sequence[int] = (),
    *,
    scheme: QuantizationArgs | None = None,
    calibration: Callable[[], None] | None = None,
    toward_zero: bool = False,
) -> None:
    """Rounds the keys and values of every attention layer as they enter the cache.

    `fp8`, `fp8_e4m3`, `fp8_e5m2`: per tensor with scale 1.0, which is what vLLM uses when the checkpoint has no scales.
    `fp8_per_token_head`, `int8_per_token_head`: one float32 scale per token and head, absmax / 448 or absmax / 127.
    `bfloat16`, `float16`: cast. `auto`: nothing, unless `scheme` is given.

    Args:
        model: gets hooks on its attention modules; its weights stay as they are.
        kv_cache_dtype: vLLM's name.
        skip_layers: layers whose cache stays as it is.
        scheme: `kv_cache_scheme` of a quantization config. As in vLLM, it turns `auto`, `fp8` and `fp8_e4m3` into FP8
            with calibrated scales.
        calibration: runs the model over calibration text; needed by `scheme`.
        toward_zero: `fp8`, `fp8_e4m3` and `fp8_e5m2` truncate, as vLLM's CPU store does, and not round as a GPU's.

    Raises:
        ValueError: as `check_kv_cache` and `check_skip_layers`; a scheme vLLM does not take; no attention layers.
    """
    check_kv_cache(kv_cache_dtype)
    check_skip_layers(skip_layers, model)
    layers = {index: module for index, module in attention_layers(model).items() if index not in set(skip_layers)}
    if scheme is not None and kv_cache_dtype in ("auto", "fp8", "fp8_e4m3"):
        _quantize_by_scheme(model, layers, scheme, calibration)
        return
    if scheme is not None and is_quantized(kv_cache_dtype):
        raise ValueError(f"the quantization config has FP8 cache scales, which {kv_cache_dtype} cannot use; use fp8")
    if kv_cache_dtype == "auto":
        return
    for module in layers.values():
        rounding = _rounding(kv_cache_dtype, toward_zero=toward_zero)
        _hook(model, module, rounding, rounding)


def attention_layers(model: Any) -> dict[int, torch.nn.Module]:
    """Layer index -> attention module.

    Raises:
        ValueError: none found, so nothing could be quantized.
    """
    layers = {
        int(module.layer_idx): module
        for module in model.modules()
        if is_attention_module(module) and isinstance(getattr(module, "layer_idx", None), int)
    }
    if not layers:
        raise ValueError(f"{type(model).__name__} has no attention layers that a KV cache could be simulated for")
    return layers


def _hook(model: Any, module: torch.nn.Module, round_key: Round, round_value: Round) -> list[Any]:
    """Registers both roundings; returns handles that undo it."""
    initialize_hooked_kv_cache(model, module)
    return [
        register_key_hook(module, lambda _, key: round_key(key)),
        register_value_hook(module, lambda _, value: round_value(value)),
    ]


def _rounding(kv_cache_dtype: str, *, toward_zero: bool) -> Round:
    cast = _cast_truncating if toward_zero else _cast_saturating
    if kv_cache_dtype in ("bfloat16", "float16"):
        return partial(_cast, dtype=getattr(torch, kv_cache_dtype))
    if kv_cache_dtype in ("fp8", "fp8_e4m3"):
        return partial(cast, dtype=torch.float8_e4m3fn)
    if kv_cache_dtype == "fp8_e5m2":
        return partial(cast, dtype=torch.float8_e5m2)
    if kv_cache_dtype == "fp8_per_token_head":
        return _fp8_per_token_head
    return _int8_per_token_head


def _cast(states: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return states.to(dtype).to(states.dtype)


def _cast_saturating(states: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Through an 8-bit float and back; values beyond its range become its largest, as on a GPU (torch gives NaN)."""
    limit = torch.finfo(dtype).max
    return states.float().clamp(-limit, limit).to(dtype).to(states.dtype)


def _cast_truncating(states: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As `_cast_saturating`, but what rounding has moved away from zero takes one step back."""
    limit = torch.finfo(dtype).max
    values = states.float().clamp(-limit, limit)
    rounded = values.to(dtype)
    too_large = rounded.float().abs() > values.abs()
    # An 8-bit float's bits without the sign are ordered as its magnitude is, so one step is one less.
    stepped = (rounded.view(torch.uint8) - too_large.to(torch.uint8)).view(dtype)
    return stepped.to(states.dtype)


def _fp8_per_token_head(states: torch.Tensor) -> torch.Tensor:
    values = states.float()
    scale = _token_head_scale(values, torch.finfo(torch.float8_e4m3fn).max)
    return (_cast_saturating(values / scale, torch.float8_e4m3fn) * scale).to(states.dtype)


def _int8_per_token_head(states: torch.Tensor) -> torch.Tensor:
    values = states.float()
    scale = _token_head_scale(values, 127.0)
    return ((values / scale).round().clamp(-128, 127) * scale).to(states.dtype)


def _token_head_scale(values: torch.Tensor, largest: float) -> torch.Tensor:
    """[..., head_dim] -> [..., 1]; formula of vLLM's `_reshape_cache_per_token_head` kernel."""
    return (values.abs().amax(dim=-1, keepdim=True) / largest).clamp(min=_SMALLEST_SCALE)


def check_scheme(scheme: QuantizationArgs) -> None:
    """Checks a `kv_cache_scheme` against what vLLM takes: static symmetric FP8 per tensor or per head.

    Raises:
        ValueError: anything else.
    """
    strategies = (QuantizationStrategy.TENSOR, QuantizationStrategy.ATTN_HEAD)
    fits = scheme.type == "float" and scheme.num_bits == 8 and scheme.symmetric and scheme.strategy in strategies
    if not fits or scheme.dynamic:
        raise ValueError(
            "kv_cache_scheme: vLLM takes num_bits: 8, type: float, symmetric: true, dynamic: false and strategy tensor "
            f"or attn_head; found {scheme.num_bits} bits, {scheme.type}, strategy {scheme.strategy}, "
            f"dynamic {scheme.dynamic}; for dynamic scales use kv_cache_dtype: fp8_per_token_head"
        )


def _quantize_by_scheme(
    model: Any, layers: dict[int, torch.nn.Module], scheme: QuantizationArgs, calibration: Callable[[], None] | None
) -> None:
    for index, (key, value) in calibrate_kv_cache(model, layers, scheme, calibration).items():
        _hook(
            model,
            layers[index],
            partial(round_to_grid, args=scheme, qparams=key),
            partial(round_to_grid, args=scheme, qparams=value),
        )


@torch.no_grad()
def calibrate_kv_cache(
    model: Any, layers: dict[int, torch.nn.Module], scheme: QuantizationArgs, calibration: Callable[[], None] | None
) -> dict[int, tuple[QParams, QParams]]:
    """Static scales of keys and values per layer, from the largest magnitude in one calibration pass.

    Raises:
        ValueError: a scheme vLLM does not take, no calibration, or a layer that saw no tokens.
    """
    check_scheme(scheme)
    if calibration is None:
        raise ValueError("kv_cache_scheme needs calibration prompts for its scales, and there are none")
    observers = {index: (_PeakObserver(scheme), _PeakObserver(scheme)) for index in layers}
    handles = [handle for index, pair in observers.items() for handle in _hook(model, layers[index], *pair)]
    try:
        calibration()
    finally:
        for handle in handles:
            handle.remove()
    return {index: (key.qparams(index), value.qparams(index)) for index, (key, value) in observers.items()}


class _PeakObserver:
    """Remembers the largest magnitude per tensor or per head, and hands states on unchanged."""

    def __init__(self, scheme: QuantizationArgs) -> None:
        self.scheme = scheme
        self.peak: torch.Tensor | None = None

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        per_head = self.scheme.strategy == QuantizationStrategy.ATTN_HEAD
        dims = (0, 2, 3) if per_head else (0, 1, 2, 3)
        peak = states.detach().float().abs().amax(dim=dims).reshape(-1)  # [heads] or [1]
        self.peak = peak if self.peak is None else torch.maximum(peak, self.peak)
        self.dtype = states.dtype
        return states

    def qparams(self, layer: int) -> QParams:
        if self.peak is None:
            raise ValueError(f"calibration ran no token through the attention of layer {layer}")
        peak = self.peak[:, None, None] if self.scheme.strategy == QuantizationStrategy.ATTN_HEAD else self.peak
        scale, zero_point = calculate_qparams(-peak, peak, self.scheme)
        return QParams(scale.to(self.dtype).float(), zero_point)


__all__ = [
    "SIMULATED",
    "UNQUANTIZED",
    "attention_layers",
    "calibrate_kv_cache",
    "check_kv_cache",
    "check_scheme",
    "check_skip_layers",
    "is_quantized",
    "quantize_kv_cache",
]
