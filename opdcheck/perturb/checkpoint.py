"""The rollout policy as a checkpoint folder, for engines that load one: real compressed weights, or simulated ones."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_never, get_args

import torch
from compressed_tensors.compressors.base import compress_module
from compressed_tensors.compressors.model_compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus, apply_quantization_config
from transformers import AutoTokenizer

from opdcheck.config import Candidate, Rollout, Source
from opdcheck.errors import ConfigError
from opdcheck.models import quiet_transformers, source_folder
from opdcheck.perturb.kv_cache import attention_layers, calibrate_kv_cache
from opdcheck.perturb.policy import PARTS, free, in_weights, load_base, quantization_config
from opdcheck.perturb.qparams import QParams, shared_ranges, weight_qparams
from opdcheck.perturb.quantization import calibrate_activations, calibration_pass, fake_quantize_weights
from opdcheck.perturb.schemes import schemes_by_module

if TYPE_CHECKING:
    from opdcheck.models import CausalLM

Calibration = Callable[[], None] | None


def needs_checkpoint(candidate: Candidate) -> bool:
    """Whether a folder must be written to sample from: the weights are noisy, older, or quantized by opdcheck."""
    return any(_changes_weights(candidate.rollout, source) for source in get_args(Source))


def _changes_weights(rollout: Rollout, source: Source) -> bool:
    match source:
        case "noise":
            return rollout.noise is not None and rollout.noise.weights > 0
        case "quantization":  # the KV cache's dtype and another checkpoint are the engine's to take as they are
            return rollout.quantization is not None
        case "staleness":
            return rollout.staleness is not None
        case _:
            assert_never(source)


def write_checkpoint(
    candidate: Candidate,
    base: Path,
    folder: Path,
    *,
    calibration_ids: list[list[int]] | None = None,
    compressed: bool | None = None,
) -> None:
    """Writes the candidate's weights, its config and the student's tokenizer to a folder.

    Args:
        candidate: what to write: staleness, noise on weights and quantization, in the rollout dtype.
        base: folder that the candidate file's relative paths start from.
        folder: to be made; an older one is replaced. Written beside it first, so it is whole or absent.
        calibration_ids: token ids that static activation and KV scales are set from.
        compressed: True: a compressed-tensors checkpoint, for real kernels. False: plain weights, rounded to the
            format's grid (activations stay as they are). Default: False where the candidate says `simulate: true`.

    Raises:
        ConfigError: the quantization does not fit, or the checkpoints do not fit each other.
        OSError: the folder cannot be written.
    """
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    policy = load_base(candidate, base, [part for part in PARTS if in_weights(part)])
    try:
        partial.mkdir(parents=True)
        _write(policy, candidate, partial, calibration_ids, _is_compressed(candidate, compressed))
        _write_tokenizer(candidate, base, partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    except ValueError as error:
        raise ConfigError(f"rollout: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        free(policy)


def _is_compressed(candidate: Candidate, compressed: bool | None) -> bool:
    return not candidate.rollout.simulate if compressed is None else compressed


def _write(
    policy: CausalLM, candidate: Candidate, folder: Path, calibration_ids: list[list[int]] | None, compressed: bool
) -> None:
    model = policy.model
    config = quantization_config(candidate)
    if config is None or not compressed:
        if config is not None:
            fake_quantize_weights(model, config)
        with quiet_transformers():
            model.save_pretrained(folder)
        return
    calibration = calibration_pass(model, calibration_ids) if calibration_ids else None
    compressor = compress(model, config, calibration)
    with quiet_transformers():
        model.save_pretrained(folder)
    compressor.update_config(str(folder))


def _write_tokenizer(candidate: Candidate, base: Path, folder: Path) -> None:
    student = candidate.student
    tokenizer = AutoTokenizer.from_pretrained(
        source_folder(student, base), revision=student.revision, trust_remote_code=student.trust_remote_code
    )
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def compress(model: Any, config: QuantizationConfig, calibration: Calibration) -> ModelCompressor:
    """Replaces the targeted layers' weights by compressed ones, in place, by round-to-nearest.

    Returns:
        What writes the matching `quantization_config` into a config.json.

    Raises:
        ValueError: static scales without a calibration.
    """
    inputs = calibrate_activations(model, config, calibration)
    kv_scales = (
        calibrate_kv_cache(model, attention_layers(model), config.kv_cache_scheme, calibration)
        if config.kv_cache_scheme is not None
        else {}
    )
    apply_quantization_config(model, config)
    _fill_weight_scales(model, config)
    modules = dict(model.named_modules())
    for (name, side), qparams in inputs.items():
        _fill(modules[name], side, qparams)
    for layer, (key, value) in kv_scales.items():
        attention = attention_layers(model)[layer]
        _fill(attention, "k", key)
        _fill(attention, "v", value)
    compressor = ModelCompressor.from_pretrained_model(model)
    _compress_modules([module for module, _ in schemes_by_module(model, config).values()])
    compressor.quantization_config.quantization_status = QuantizationStatus.COMPRESSED
    return compressor


def _fill_weight_scales(model: Any, config: QuantizationConfig) -> None:
    weights = {
        name: (module.weight, scheme.weights)
        for name, (module, scheme) in schemes_by_module(model, config).items()
        if scheme.weights is not None
    }
    modules = dict(model.named_modules())
    shared = shared_ranges(weights)
    for name, (weight, args) in weights.items():
        _fill(modules[name], "weight", weight_qparams(weight.data, args, shared.get(name)))


def _fill(module: Any, base_name: str, qparams: QParams) -> None:
    """Sets the parameters that the library has registered on a module and left uninitialised."""
    values = {"scale": qparams.scale, "zero_point": qparams.zero_point, "global_scale": qparams.global_scale}
    for suffix, value in values.items():
        parameter = getattr(module, f"{base_name}_{suffix}", None)
        if parameter is not None and value is not None:
            parameter.data.copy_(value.reshape(parameter.shape))


def _compress_modules(modules: Sequence[Any]) -> None:
    """Module by module rather than by `ModelCompressor.compress_model`, which would round in the weight's own dtype.

    Dividing in bfloat16 and then rounding to the grid rounds twice: the result is not the nearest value.
    """
    for module in modules:
        if module.quantization_scheme.weights is not None:
            module.weight.data = module.weight.data.float()
        compress_module(module)


__all__ = ["compress", "needs_checkpoint", "write_checkpoint"]
