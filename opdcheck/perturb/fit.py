"""Does a quantization config fit a model's layers? Answers from shapes alone: a model on the meta device will do."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import gcd
from typing import Any

import torch
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStrategy,
)
from compressed_tensors.utils.match import is_match

from opdcheck.perturb.fused import fused_groups
from opdcheck.perturb.kv_cache import check_scheme
from opdcheck.perturb.schemes import DEFAULT_IGNORE, fixed_group_size, has_groups, schemes_by_module

Quantized = Mapping[str, tuple[Any, QuantizationScheme]]

_SHOWN = 3


def check_fits(config: QuantizationConfig, model: torch.nn.Module, *, fused: bool = False) -> None:
    """Checks that a configuration can be applied to a model.

    Args:
        config: from `to_quantization_config`.
        model: the model; only names, classes and shapes are used, so it may be on the meta device.
        fused: also check what vLLM needs because it fuses q/k/v and gate/up into one matrix.

    Raises:
        ValueError: a pattern that matches nothing, a layer that cannot be quantized, shapes that the scheme does not
            divide (with a group size that does), or fused shards that disagree.
    """
    if config.kv_cache_scheme is not None:
        check_scheme(config.kv_cache_scheme)
    _check_patterns(config, model)
    quantized = schemes_by_module(model, config)
    _check_kinds(quantized)
    _check_experts(model)
    _check_tied(quantized, model)
    _check_columns(quantized)
    if fused:
        _check_shards_agree(quantized, model)
        _check_block_rows(quantized)


def _check_patterns(config: QuantizationConfig, model: torch.nn.Module) -> None:
    targets = [target for scheme in config.config_groups.values() for target in scheme.targets]
    for role, patterns in (("target", targets), ("ignore", config.ignore or [])):
        for pattern in patterns:
            _check_pattern(role, pattern)
            if role == "ignore" and pattern in DEFAULT_IGNORE:
                continue  # the default, which a model with another head name need not have
            if not any(is_match(name, module, pattern) for name, module in model.named_modules()):
                raise ValueError(
                    f"{role} pattern {pattern!r} matches no module; expected a module name, a class such as `Linear`, "
                    f"or a `re:` pattern. This model has, for instance, {_example_names(model)}"
                )


def _check_pattern(role: str, pattern: str) -> None:
    if not pattern.startswith("re:"):
        return
    try:
        re.compile(pattern.removeprefix("re:"))
    except re.error as error:
        raise ValueError(f"{role} pattern {pattern!r} is not a regular expression: {error}") from error


def _example_names(model: torch.nn.Module) -> str:
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    shown = [names[0], names[-2], names[-1]] if len(names) > _SHOWN else names
    return ", ".join(shown)


def _check_kinds(quantized: Quantized) -> None:
    if not quantized:
        raise ValueError("targets minus ignore leave no layer to quantize")
    others = [name for name, (module, _) in quantized.items() if not isinstance(module, torch.nn.Linear)]
    if others:
        kind = type(quantized[others[0]][0]).__name__
        raise ValueError(
            f"only Linear layers can be quantized, but the targets match {len(others)} others, "
            f"e.g. {others[0]} ({kind}); add them to ignore or narrow the targets"
        )


def _check_experts(model: torch.nn.Module) -> None:
    """Transformers 5 stacks a layer's experts in 3-D parameters, which the library's per-module rounding skips."""
    stacked = [name for name, parameter in model.named_parameters() if ".experts." in name and parameter.ndim == 3]
    if stacked:
        raise ValueError(
            f"{len(stacked)} stacked expert weights, e.g. {stacked[0]}, are no Linear layers and would stay "
            "unquantized without a word; give a checkpoint that is already quantized as rollout.model"
        )


def _check_tied(quantized: Quantized, model: torch.nn.Module) -> None:
    head = next((name for name in quantized if name.rpartition(".")[2] in ("lm_head", "embed_out")), None)
    config = getattr(model, "config", None)
    if head is not None and getattr(config, "tie_word_embeddings", False):
        raise ValueError(
            f"{head} shares its weights with the input embedding, so it cannot be quantized alone; add it to ignore"
        )


def _check_columns(quantized: Quantized) -> None:
    """Columns are what groups and blocks run along, in weights and in activations."""
    for scheme in _distinct(quantized):
        layers = {name: module for name, (module, its) in quantized.items() if its is scheme}
        for args in (scheme.weights, scheme.input_activations):
            if args is None or not has_groups(args):
                continue
            width = _width(args)
            misfits = [name for name, module in layers.items() if _columns(module) % width]
            if misfits:
                raise ValueError(_misfit_message(args, width, misfits, layers))


def _distinct(quantized: Quantized) -> list[QuantizationScheme]:
    return list({id(scheme): scheme for _, scheme in quantized.values()}.values())


def _width(args: QuantizationArgs) -> int:
    if args.strategy == QuantizationStrategy.BLOCK:
        return int(args.block_structure[1])
    return int(args.group_size)


def _columns(module: Any) -> int:
    return int(module.weight.shape[-1])


def _misfit_message(args: QuantizationArgs, width: int, misfits: Sequence[str], layers: Mapping[str, Any]) -> str:
    shapes = {name: "x".join(map(str, layers[name].weight.shape)) for name in misfits}
    examples = ", ".join(f"{name} ({shapes[name]})" for name in misfits[:_SHOWN])
    unit = "blocks" if args.strategy == QuantizationStrategy.BLOCK else "groups"
    message = (
        f"{unit} of {width} columns do not divide {len(misfits)} of {len(layers)} layers: "
        f"{examples}{', ...' if len(misfits) > _SHOWN else ''}; "
    )
    if fixed_group_size(args):
        return message + "the format fixes this size, so add these layers to ignore or choose another scheme"
    size = dividing_group_size([_columns(module) for module in layers.values()])
    return message + f"group_size: {size} divides all of them (`{{scheme: ..., group_size: {size}}}`)"


def dividing_group_size(columns: Sequence[int]) -> int:
    """The largest power of two, at most 128, that divides all the column counts."""
    common = gcd(*columns, 128)
    return common & -common


def _check_shards_agree(quantized: Quantized, model: torch.nn.Module) -> None:
    linears = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    for group in fused_groups(linears):
        schemes = {name: quantized[name][1] if name in quantized else None for name in group}
        first = schemes[group[0]]
        if all(_same(scheme, first) for scheme in schemes.values()):
            continue
        plain = [name for name, scheme in schemes.items() if scheme is None]
        how = f"{', '.join(plain)} left out" if plain else "different schemes"
        raise ValueError(
            f"vLLM fuses {', '.join(group)} into one matrix, so they must be quantized alike ({how}); "
            "target or ignore all of them"
        )


def _same(left: QuantizationScheme | None, right: QuantizationScheme | None) -> bool:
    if left is None or right is None:
        return left is right
    return bool(left.weights == right.weights and left.input_activations == right.input_activations)


def _check_block_rows(quantized: Quantized) -> None:
    """vLLM: in a fused matrix every shard but the last must end at a block's edge."""
    for group in fused_groups(quantized):
        for name in group[:-1]:
            module, scheme = quantized[name]
            if scheme.weights is None or scheme.weights.strategy != QuantizationStrategy.BLOCK:
                continue
            height, rows = scheme.weights.block_structure[0], int(module.weight.shape[0])
            if rows % height:
                size = dividing_group_size([rows, height])
                raise ValueError(
                    f"blocks of {height} rows do not divide {name} ({rows} rows), which vLLM fuses with "
                    f"{', '.join(other for other in group if other != name)}; group_size: {size} does"
                )


__all__ = ["check_fits", "dividing_group_size"]
