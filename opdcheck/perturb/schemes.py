"""From what a candidate file says about quantization to a compressed-tensors `QuantizationConfig`."""

from __future__ import annotations

import difflib
from copy import deepcopy
from typing import Any

import torch
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    QuantizationStrategy,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from compressed_tensors.utils.match import match_named_modules, match_targets
from pydantic import ValidationError

from opdcheck.config import Quantization

DEFAULT_IGNORE = ["lm_head"]
_GROUPED = (QuantizationStrategy.GROUP, QuantizationStrategy.TENSOR_GROUP)


def to_quantization_config(spec: str | Quantization | dict[str, Any]) -> QuantizationConfig:
    """The library's own configuration object for any of the three ways to write one.

    Args:
        spec: a preset name such as `W8A8`; `Quantization(scheme, targets, ignore, group_size)`; or a full
            `quantization_config` as checkpoints carry it, with `config_groups`. `lm_head` is left out unless a full
            config or `Quantization` gives its own `ignore`.

    Raises:
        ValueError: unknown preset, or a configuration the library refuses; the message names what is possible.
    """
    if isinstance(spec, str):
        _check_preset(spec)
        spec = Quantization(scheme=spec)
    config = _from_short_form(spec) if isinstance(spec, Quantization) else _from_full_config(spec)
    config.quantization_status = QuantizationStatus.INITIALIZED
    for scheme in config.config_groups.values():
        if scheme.weights is not None:
            scheme.weights.actorder = None  # round-to-nearest has no activation order
    return config


def schemes_by_module(model: torch.nn.Module, config: QuantizationConfig) -> dict[str, tuple[Any, QuantizationScheme]]:
    """The quantized modules of a model: name -> (module, its scheme), by the library's own matching."""
    by_target = {target: scheme for scheme in config.config_groups.values() for target in scheme.targets}
    return {
        name: (module, by_target[match_targets(name, module, by_target)[0]])
        for name, module in match_named_modules(model, by_target, config.ignore)
    }


def quantizes_weights(config: QuantizationConfig) -> bool:
    """Whether any scheme of the configuration rounds weights."""
    return any(scheme.weights is not None for scheme in config.config_groups.values())


def quantizes_activations(config: QuantizationConfig) -> bool:
    """Whether any scheme of the configuration rounds activations."""
    return any(
        scheme.input_activations is not None or scheme.output_activations is not None
        for scheme in config.config_groups.values()
    )


def _from_short_form(spec: Quantization) -> QuantizationConfig:
    _check_preset(spec.scheme)
    if not spec.targets:
        raise ValueError("targets is empty, so nothing would be quantized")
    scheme = preset_name_to_scheme(spec.scheme, list(spec.targets))
    if spec.group_size is not None:
        _set_group_size(spec.scheme.upper(), scheme, spec.group_size)
    return QuantizationConfig(config_groups={"group_0": scheme}, ignore=list(spec.ignore))


def _check_preset(name: str) -> None:
    if name.upper() not in PRESET_SCHEMES:
        near = difflib.get_close_matches(name.upper(), PRESET_SCHEMES, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ValueError(f"unknown scheme {name!r}; {hint}expected one of {', '.join(PRESET_SCHEMES)}")


def _set_group_size(name: str, scheme: QuantizationScheme, size: int) -> None:
    """Replaces the preset's group and block sizes.

    Raises:
        ValueError: the scheme has no groups, or its format fixes their size.
    """
    grouped = [args for args in (scheme.weights, scheme.input_activations) if args is not None and has_groups(args)]
    if not grouped:
        raise ValueError(f"{name} has no groups, so group_size has no meaning; leave it out")
    for args in grouped:
        if fixed_group_size(args):
            raise ValueError(f"{name} fixes its groups at {args.group_size} columns; leave group_size out")
        if args.strategy == QuantizationStrategy.BLOCK:
            args.block_structure = [size, size]
        else:
            args.group_size = size


def has_groups(args: QuantizationArgs) -> bool:
    """Whether several columns, but not all, share a scale."""
    return args.strategy in (*_GROUPED, QuantizationStrategy.BLOCK)


def fixed_group_size(args: QuantizationArgs) -> bool:
    """Whether the number format (NVFP4: 16, MX: 32) prescribes the group size."""
    return args.strategy == QuantizationStrategy.TENSOR_GROUP or args.scale_dtype is torch.uint8


def _from_full_config(spec: dict[str, Any]) -> QuantizationConfig:
    if not spec.get("config_groups"):
        raise ValueError(
            "a full quantization config needs `config_groups`; "
            "for a preset write its name, or `{scheme: NAME, targets: [...], ignore: [...]}`"
        )
    method = spec.get("quant_method", "compressed-tensors")
    if method != "compressed-tensors":
        raise ValueError(f"quant_method {method!r}: only compressed-tensors configurations can be applied")
    try:
        config = QuantizationConfig.model_validate({"ignore": DEFAULT_IGNORE, **deepcopy(spec)})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"compressed-tensors refuses it: {where}: {first['msg']}") from error
    except (KeyError, NotImplementedError, TypeError) as error:
        raise ValueError(f"compressed-tensors refuses it: {error.args[0]}") from error
    _check_groups(config)
    return config


def _check_groups(config: QuantizationConfig) -> None:
    """What the library takes, and then divides by zero on or silently leaves as it is."""
    for group, scheme in config.config_groups.items():
        sides = {side: getattr(scheme, side) for side in ("weights", "input_activations", "output_activations")}
        if not any(sides.values()):
            raise ValueError(f"config_groups.{group} quantizes nothing: it has neither weights nor activations")
        for side, args in sides.items():
            _check_bits(f"config_groups.{group}.{side}", args)
    _check_bits("kv_cache_scheme", config.kv_cache_scheme)


def _check_bits(where: str, args: QuantizationArgs | None) -> None:
    if args is not None and args.num_bits < 2:
        raise ValueError(f"{where}.num_bits: expected at least 2, found {args.num_bits}")


__all__ = [
    "DEFAULT_IGNORE",
    "fixed_group_size",
    "has_groups",
    "quantizes_activations",
    "quantizes_weights",
    "schemes_by_module",
    "to_quantization_config",
]
