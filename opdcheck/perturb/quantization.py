"""Fake quantization of weights and activations on a live model: rounded to the format's grid, computed in its dtype."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig
from torch.utils.hooks import RemovableHandle

from opdcheck.perturb.qparams import (
    QParams,
    RangeObserver,
    activation_qparams,
    round_activations,
    round_to_grid,
    shared_ranges,
    weight_qparams,
)
from opdcheck.perturb.schemes import quantizes_activations, quantizes_weights, schemes_by_module, to_quantization_config

Calibration = Callable[[], None]
"""Runs the model over calibration text once."""

Side = Literal["input", "output"]


@torch.no_grad()
def fake_quantize_weights(model: torch.nn.Module, config: QuantizationConfig) -> None:
    """Rounds the weights of the targeted layers in place: round-to-nearest, scales by minimum and maximum.

    Shards that vLLM fuses (q/k/v, gate/up) share their per-tensor scale, as they do there. At most one layer exists
    twice, in float32.

    Raises:
        ValueError: a strategy that weights cannot have.
    """
    weights = {
        name: (module.weight, scheme.weights)
        for name, (module, scheme) in schemes_by_module(model, config).items()
        if scheme.weights is not None
    }
    shared = shared_ranges(weights)
    for name, (weight, args) in weights.items():
        weight.data.copy_(round_to_grid(weight.data, args, weight_qparams(weight.data, args, shared.get(name))))


@torch.no_grad()
def fake_quantize_activations(
    model: torch.nn.Module, config: QuantizationConfig, calibration: Calibration | None = None
) -> None:
    """Rounds the inputs (and outputs, where the scheme says so) of the targeted layers at every forward pass.

    Args:
        model: gets forward hooks; its weights stay as they are.
        config: schemes; those without activation arguments do nothing.
        calibration: needed by static scales (`FP8`) and global scales (`NVFP4`): they are set by the minimum and
            maximum seen while it runs, with no activation rounded yet.

    Raises:
        ValueError: static scales without a calibration, or that saw no tokens.
    """
    attach_activations(model, config, calibrate_activations(model, config, calibration))


def attach_activations(
    model: torch.nn.Module, config: QuantizationConfig, static: Mapping[tuple[str, Side], QParams]
) -> None:
    """The second half of `fake_quantize_activations`: hooks with the given static parameters."""
    for site in _sites(model, config):
        site.hook(partial(round_activations, args=site.args, static=static.get(site.key)))


@torch.no_grad()
def calibrate_activations(
    model: torch.nn.Module, config: QuantizationConfig, calibration: Calibration | None
) -> dict[tuple[str, Side], QParams]:
    """Static activation parameters of every layer whose scheme needs them; the model is left as it was.

    Returns:
        (module name, `input` or `output`) -> parameters; empty for dynamic schemes.

    Raises:
        ValueError: static scales without a calibration, or that saw no tokens.
    """
    sites = [site for site in _sites(model, config) if site.args.dynamic is not True]
    if not sites:
        return {}
    if calibration is None:
        raise ValueError(f"{len(sites)} static activation scales need calibration prompts, and there are none")
    observers = [RangeObserver() for _ in sites]
    handles = [site.hook(observer) for site, observer in zip(sites, observers, strict=True)]
    try:
        calibration()
    finally:
        for handle in handles:
            handle.remove()
    return {
        site.key: activation_qparams(*observer.range(site.name), site.args, site.module.weight.dtype)
        for site, observer in zip(sites, observers, strict=True)
    }


def calibration_pass(model: Any, token_ids: Sequence[Sequence[int]]) -> Calibration:
    """A calibration that runs each sequence through the model once, without padding or cache."""
    last_only = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}

    def run() -> None:
        device = next(model.parameters()).device
        for ids in token_ids:
            if len(ids):
                model(input_ids=torch.tensor([list(ids)], device=device), use_cache=False, **last_only)

    return run


@dataclass(frozen=True)
class _Site:
    """A place where activations are rounded: what flows into or out of one layer."""

    name: str
    side: Side
    module: Any
    args: QuantizationArgs

    @property
    def key(self) -> tuple[str, Side]:
        return self.name, self.side

    def hook(self, function: Callable[[torch.Tensor], torch.Tensor]) -> RemovableHandle:
        """Lets `function` replace the activations here at every forward pass."""
        if self.side == "input":
            return self.module.register_forward_pre_hook(lambda _, inputs: (function(inputs[0]), *inputs[1:]))
        return self.module.register_forward_hook(lambda _, __, output: function(output))


def _sites(model: torch.nn.Module, config: QuantizationConfig) -> list[_Site]:
    sites = []
    for name, (module, scheme) in schemes_by_module(model, config).items():
        if scheme.input_activations is not None:
            sites.append(_Site(name, "input", module, scheme.input_activations))
        if scheme.output_activations is not None:
            sites.append(_Site(name, "output", module, scheme.output_activations))
    return sites


__all__ = [
    "attach_activations",
    "calibrate_activations",
    "calibration_pass",
    "fake_quantize_activations",
    "fake_quantize_weights",
    "quantizes_activations",
    "quantizes_weights",
    "to_quantization_config",
]
