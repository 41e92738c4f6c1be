"""Scales and zero points by minimum and maximum, in float32, through compressed-tensors' own formulas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationStrategy
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import (
    calculate_qparams,
    compute_dynamic_scales_and_zp,
    generate_gparam,
    maybe_pad_tensor_for_block_quant,
)

from opdcheck.perturb.fused import fused_groups

Range = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class QParams:
    """What maps numbers to a format's grid. Shapes as compressed-tensors stores them, e.g. scale [rows, groups]."""

    scale: torch.Tensor
    zero_point: torch.Tensor
    global_scale: torch.Tensor | None = None


class RangeObserver:
    """Remembers the minimum and maximum of all tensors it is called with, and hands them on unchanged."""

    def __init__(self) -> None:
        self._range: Range | None = None

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        if values.numel():
            low, high = torch.aminmax(values.detach().float())
            if self._range is not None:
                low, high = torch.minimum(low, self._range[0]), torch.maximum(high, self._range[1])
            self._range = (low, high)
        return values

    def range(self, name: str) -> Range:
        """Two scalars.

        Raises:
            ValueError: nothing was seen; the message names `name`.
        """
        if self._range is None:
            raise ValueError(f"calibration ran no token through {name}, so its scale is unknown")
        return self._range


def weight_range(weight: torch.Tensor, args: QuantizationArgs) -> Range:
    """Minimum and maximum of each part of a weight that has a scale of its own.

    Args:
        weight: [rows, columns].

    Returns:
        Two tensors: [1] per tensor, [rows, 1] per channel, [rows, groups], or [row blocks, column blocks].

    Raises:
        ValueError: a strategy that weights cannot have.
    """
    if args.strategy == QuantizationStrategy.TENSOR:
        return weight.amin().reshape(1), weight.amax().reshape(1)
    if args.strategy == QuantizationStrategy.CHANNEL:
        return weight.amin(dim=-1, keepdim=True), weight.amax(dim=-1, keepdim=True)
    if args.strategy in (QuantizationStrategy.GROUP, QuantizationStrategy.TENSOR_GROUP):
        grouped = weight.unflatten(-1, (-1, args.group_size))
        return grouped.amin(dim=-1), grouped.amax(dim=-1)
    if args.strategy == QuantizationStrategy.BLOCK:
        height, width = args.block_structure
        padded = maybe_pad_tensor_for_block_quant(weight, args.block_structure)
        blocks = padded.unflatten(1, (-1, width)).unflatten(0, (-1, height))  # [row blocks, height, col blocks, width]
        return blocks.amin(dim=(1, 3)), blocks.amax(dim=(1, 3))
    raise ValueError(f"strategy {args.strategy} cannot quantize weights")


def weight_qparams(weight: torch.Tensor, args: QuantizationArgs, shared: Range | None = None) -> QParams:
    """Round-to-nearest parameters of one weight.

    Scales are rounded to the weight's dtype, because that is what a checkpoint stores; all else is float32.

    Args:
        weight: [rows, columns], any floating dtype.
        args: how to quantize it.
        shared: range of all the shards that vLLM fuses with this one. vLLM gives fused shards one per-tensor scale (or
            one global scale), so a simulation must too.
    """
    low, high = weight_range(weight.float(), args)
    global_scale = None
    if args.strategy == QuantizationStrategy.TENSOR_GROUP:
        global_scale = generate_gparam(*(shared or (low.amin(), high.amax())))
    elif args.strategy == QuantizationStrategy.TENSOR and shared is not None:
        low, high = (bound.reshape(1) for bound in shared)
    scale, zero_point = calculate_qparams(low, high, args, global_scale=global_scale)
    return QParams(scale.to(weight.dtype).float(), zero_point, global_scale)


def shared_ranges(weights: Mapping[str, tuple[torch.Tensor, QuantizationArgs]]) -> dict[str, Range]:
    """Module name -> range over all shards that vLLM fuses with it, where the scheme has a scale per tensor."""
    per_tensor = (QuantizationStrategy.TENSOR, QuantizationStrategy.TENSOR_GROUP)
    names = [name for name, (_, args) in weights.items() if args.strategy in per_tensor]
    shared: dict[str, Range] = {}
    for group in fused_groups(names):
        bounds = [torch.aminmax(weights[name][0].detach()) for name in group]
        low = torch.stack([bound.min for bound in bounds]).amin().float()
        high = torch.stack([bound.max for bound in bounds]).amax().float()
        shared.update(dict.fromkeys(group, (low, high)))
    return shared


def round_to_grid(values: torch.Tensor, args: QuantizationArgs, qparams: QParams) -> torch.Tensor:
    """Values as the format represents them: same shape and dtype, computed in float32, rounded to nearest."""
    rounded = fake_quantize(values.float(), qparams.scale, qparams.zero_point, args, global_scale=qparams.global_scale)
    return rounded.to(values.dtype)


def activation_qparams(low: torch.Tensor, high: torch.Tensor, args: QuantizationArgs, dtype: torch.dtype) -> QParams:
    """Static parameters of an activation tensor from its range over a calibration pass (scalars).

    Raises:
        ValueError: only per-tensor scales and NVFP4's global scale can be static.
    """
    if args.strategy == QuantizationStrategy.TENSOR_GROUP:
        empty = torch.empty(0, device=low.device)
        return QParams(empty, empty, generate_gparam(low, high))
    if args.strategy == QuantizationStrategy.TENSOR:
        scale, zero_point = calculate_qparams(low.reshape(1), high.reshape(1), args)
        return QParams(scale.to(dtype).float(), zero_point)
    raise ValueError(f"strategy {args.strategy} cannot quantize activations with static scales; set dynamic: true")


def round_activations(values: torch.Tensor, args: QuantizationArgs, static: QParams | None) -> torch.Tensor:
    """Activations on the format's grid, with dynamic scales where `args` says so.

    Args:
        values: [..., features].
        static: from `activation_qparams`; None for fully dynamic schemes.
    """
    if values.numel() == 0:
        return values
    # compressed-tensors reads the first two dimensions as batch and token: give it exactly these.
    tokens = values.reshape(1, -1, values.shape[-1])
    if args.dynamic:
        global_scale = None if static is None else static.global_scale
        scale, zero_point = compute_dynamic_scales_and_zp(
            tokens.float(), args, torch.nn.Identity(), global_scale=global_scale
        )
        qparams = QParams(scale, zero_point, global_scale)
    else:
        assert static is not None, "static activation scales are set before they are used"
        qparams = static
    return round_to_grid(tokens, args, qparams).reshape(values.shape)


__all__ = [
    "QParams",
    "RangeObserver",
    "activation_qparams",
    "round_activations",
    "round_to_grid",
    "shared_ranges",
    "weight_qparams",
    "weight_range",
]
