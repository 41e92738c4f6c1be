"""The rollout policy as a live Hugging Face model, with all of a candidate's sources of mismatch or only some."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, assert_never

import torch
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from opdcheck.config import Candidate, DType, EngineName, ModelRef, Quantization
from opdcheck.engines.base import How, Provenance, has_own_kernels
from opdcheck.errors import ConfigError, EngineError
from opdcheck.measurement import SourceName
from opdcheck.models import (
    CausalLM,
    load_causal_lm,
    load_config,
    meta_model,
    quiet_transformers,
    resolve_device,
    source_folder,
)
from opdcheck.perturb.kv_cache import is_quantized, quantize_kv_cache
from opdcheck.perturb.noise import add_weight_noise
from opdcheck.perturb.quantization import (
    attach_activations,
    calibrate_activations,
    calibration_pass,
    fake_quantize_weights,
    quantizes_activations,
    quantizes_weights,
    to_quantization_config,
)

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationConfig

PARTS: tuple[SourceName, ...] = ("staleness", "noise", "weights", "activations", "kv_cache", "dtype")
"""Every source that a live model can have, in the order of reports. (`kernel` is another engine's.)"""


def active_parts(candidate: Candidate) -> list[SourceName]:
    """The sources that the candidate has, in the order of `PARTS`.

    A checkpoint of its own (`rollout.model`) is the source `weights` as a whole: all that its config asks for.

    Raises:
        ConfigError: the quantization is not one the library takes.
    """
    rollout = candidate.rollout
    config = quantization_config(candidate)
    present: dict[SourceName, bool] = {
        "staleness": rollout.staleness is not None,
        "noise": rollout.noise is not None and (rollout.noise.weights > 0 or rollout.noise.logits > 0),
        "weights": rollout.model is not None or (config is not None and quantizes_weights(config)),
        "activations": config is not None and quantizes_activations(config),
        "kv_cache": _casts_kv_cache(candidate) or (config is not None and config.kv_cache_scheme is not None),
        "dtype": rollout.dtype != candidate.student.dtype,
    }
    return [part for part in PARTS if present[part]]


def build_policy(
    candidate: Candidate,
    base: Path,
    parts: Collection[SourceName],
    *,
    calibration_ids: list[list[int]] | None = None,
) -> CausalLM:
    """Loads the student and applies the chosen parts of the candidate to it, and nothing else.

    Checkpoint (the student's, the stale one or another) in its dtype, then noise, then quantization of weights,
    activations and KV cache. Noise on logits is not part of the model: see `CausalLM.with_logit_noise`.

    Args:
        candidate: what to build.
        base: folder that the candidate file's relative paths start from.
        parts: from `active_parts`; others are ignored.
        calibration_ids: token ids that static activation and KV scales are set from.

    Returns:
        A model in memory of its own.

    Raises:
        ConfigError: a part does not fit the model, or the checkpoints do not fit each other.
    """
    policy = load_base(candidate, base, parts)
    try:
        _fake_quantize(policy.model, candidate, parts, calibration_ids)
    except ValueError as error:
        raise ConfigError(f"rollout: {error}") from error
    return policy


def load_base(candidate: Candidate, base: Path, parts: Collection[SourceName]) -> CausalLM:
    """The checkpoint to perturb, in its dtype, with noise: what comes before quantization.

    Raises:
        ConfigError: the stale checkpoint is not the student's architecture, or two checkpoints are asked for.
    """
    rollout, student = candidate.rollout, candidate.student
    if rollout.staleness is not None and rollout.model is not None:
        raise ConfigError(
            "rollout: give either `model` or `staleness`, not both: each names the weights to sample from"
        )
    ref: ModelRef = student
    stale = rollout.staleness.as_model() if rollout.staleness is not None and "staleness" in parts else None
    if stale is not None:
        ref = stale.model_copy(update={"trust_remote_code": student.trust_remote_code})
    elif rollout.model is not None and "weights" in parts:
        ref = rollout.model
    dtype = rollout.dtype if "dtype" in parts else student.dtype
    if ref is not student:
        _refuse_quantizing_twice(candidate, ref, base)
    policy = _load(ref, base, dtype, student.device)
    if stale is not None:
        _check_same_architecture(policy.model, meta_model(student, base), stale.path)
    if rollout.noise is not None and "noise" in parts:
        add_weight_noise(policy.model, rollout.noise.weights, rollout.noise.seed)
    return policy


def _load(ref: ModelRef, base: Path, dtype: DType, device: str) -> CausalLM:
    """As `load_causal_lm`; compressed weights are decompressed first, for a decoder called alone would not do it."""
    declared = getattr(load_config(ref, base), "quantization_config", None)
    if declared is None:
        return load_causal_lm(ref, base, dtype=dtype, device=device)
    method = declared.get("quant_method") if isinstance(declared, dict) else getattr(declared, "quant_method", None)
    if method != "compressed-tensors":
        raise ConfigError(
            f"rollout.model: {ref.path} is quantized by {method}; only compressed-tensors checkpoints load here",
            hint="Use engine: vllm for this checkpoint.",
        )
    source = source_folder(ref, base)
    try:
        with quiet_transformers(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "You passed `quantization_config`")  # on purpose: to decompress
            model = AutoModelForCausalLM.from_pretrained(
                source,
                revision=ref.revision,
                trust_remote_code=ref.trust_remote_code,
                dtype=getattr(torch, dtype),
                device_map={"": resolve_device(device)},
                use_safetensors=True,
                quantization_config=CompressedTensorsConfig(dequantize=True),
            )
    except (OSError, ValueError, RuntimeError) as error:
        raise EngineError(f"cannot load {source}: {type(error).__name__}: {error}") from error
    return CausalLM(model.eval().requires_grad_(False))


def quantization_config(candidate: Candidate) -> QuantizationConfig | None:
    """The candidate's quantization as the library's object.

    Raises:
        ConfigError: unknown scheme, or the library refuses it.
    """
    if candidate.rollout.quantization is None:
        return None
    try:
        return to_quantization_config(candidate.rollout.quantization)
    except ValueError as error:
        raise ConfigError(f"rollout.quantization: {error}") from error


def describe(candidate: Candidate, *, engine: EngineName) -> list[Provenance]:
    """How each part of the candidate is brought about by an engine, for every report."""
    return [provenance for part in active_parts(candidate) for provenance in _describe_part(candidate, part, engine)]


def _fake_quantize(
    model: Any, candidate: Candidate, parts: Collection[SourceName], calibration_ids: list[list[int]] | None
) -> None:
    attach_rounding(model, candidate, parts, calibration_ids)
    config = quantization_config(candidate)
    if config is not None and "weights" in parts:
        fake_quantize_weights(model, config)


def attach_rounding(
    model: Any, candidate: Candidate, parts: Collection[SourceName], calibration_ids: list[list[int]] | None
) -> None:
    """Hooks that round activations and the KV cache as the candidate says. The weights stay as they are.

    Static scales are set while nothing is rounded yet, as llm-compressor and `write_checkpoint` do.

    Raises:
        ValueError: a part does not fit the model, or static scales have no text to be set from.
    """
    rollout = candidate.rollout
    config = quantization_config(candidate)
    calibration = calibration_pass(model, calibration_ids) if calibration_ids else None
    has_activations = config is not None and "activations" in parts
    static = calibrate_activations(model, config, calibration) if has_activations else {}
    if "kv_cache" in parts:
        quantize_kv_cache(
            model,
            rollout.kv_cache_dtype,
            rollout.kv_cache_dtype_skip_layers,
            scheme=None if config is None else config.kv_cache_scheme,
            calibration=calibration,
            toward_zero=truncates_kv_cache(candidate),
        )
    if has_activations:
        attach_activations(model, config, static)


def truncates_kv_cache(candidate: Candidate) -> bool:
    """Whether the candidate's engine cuts FP8 keys and values off instead of rounding: vLLM's CPU backend does."""
    match candidate.rollout.engine:
        case "vllm":
            return not torch.cuda.is_available()
        case "transformers":
            return False
        case _:
            assert_never(candidate.rollout.engine)


def _casts_kv_cache(candidate: Candidate) -> bool:
    """Whether `kv_cache_dtype` itself changes what is cached."""
    chosen = candidate.rollout.kv_cache_dtype
    return is_quantized(chosen) or chosen not in ("auto", candidate.rollout.dtype)


def _refuse_quantizing_twice(candidate: Candidate, ref: ModelRef, base: Path) -> None:
    rollout = candidate.rollout
    noisy = rollout.noise is not None and rollout.noise.weights > 0
    if not noisy and rollout.quantization is None:
        return
    if getattr(load_config(ref, base), "quantization_config", None) is None:
        return
    key = "quantization" if rollout.quantization is not None else "noise.weights"
    raise ConfigError(
        f"rollout.{key}: {ref.path} is already quantized, so nothing can be added to its weights",
        hint=f"Leave rollout.{key} out, or name the checkpoint that it was quantized from.",
    )


def _check_same_architecture(stale: Any, student: Any, checkpoint: str) -> None:
    if stale.config.model_type != student.config.model_type:
        raise ConfigError(
            f"rollout.staleness.checkpoint: {checkpoint} is a {stale.config.model_type} model, "
            f"the student a {student.config.model_type}; expected older weights of the same student"
        )
    old = {name: tuple(parameter.shape) for name, parameter in stale.named_parameters()}
    new = {name: tuple(parameter.shape) for name, parameter in student.named_parameters()}
    for name in (*new, *old):
        if old.get(name) != new.get(name):
            raise ConfigError(
                f"rollout.staleness.checkpoint: {checkpoint} has {name} {old.get(name, 'nowhere')}, "
                f"the student {new.get(name, 'nowhere')}; expected older weights of the same student"
            )


def _describe_part(candidate: Candidate, part: SourceName, engine: EngineName) -> list[Provenance]:
    rollout = candidate.rollout
    real_engine = has_own_kernels(engine)
    kernels: How = "real" if real_engine and not rollout.simulate else "simulated"
    match part:
        case "staleness":
            return [Provenance(part, "real", rollout.staleness.describe())] if rollout.staleness else []
        case "noise":
            return _describe_noise(candidate, real_engine)
        case "dtype":
            return [Provenance(part, "real", f"{rollout.dtype}; the trainer computes in {candidate.student.dtype}")]
        case "weights":
            if rollout.model is not None and rollout.quantization is None:
                return [Provenance(part, "real" if real_engine else "simulated", f"checkpoint {rollout.model.path}")]
            how = "own kernels" if kernels == "real" else "rounded to the format's grid"
            return [Provenance(part, kernels, f"{scheme_name(candidate)}, round-to-nearest, {how}")]
        case "activations":
            if real_engine and rollout.simulate:
                only = f"{scheme_name(candidate)}: only weights are simulated in vLLM"
                return [Provenance(part, "not applied", only)]
            return [Provenance(part, kernels, scheme_name(candidate))]
        case "kv_cache":
            return _describe_kv_cache(candidate, real_engine)
        case "kernel":
            raise ValueError("the kernel is the engine's: no part of what a candidate asks for")
        case _:
            assert_never(part)


def _describe_noise(candidate: Candidate, real_engine: bool) -> list[Provenance]:
    noise = candidate.rollout.noise
    found = []
    if noise is not None and noise.weights > 0:
        found.append(Provenance("noise", "real", f"weights, sigma {noise.weights:g} of each tensor's RMS"))
    if noise is not None and noise.logits > 0:
        how: How = "not applied" if real_engine else "real"
        found.append(Provenance("noise", how, f"logits, sigma {noise.logits:g} nats"))
    return found


def _describe_kv_cache(candidate: Candidate, real_engine: bool) -> list[Provenance]:
    rollout = candidate.rollout
    skipped = rollout.kv_cache_dtype_skip_layers
    but = f", except layers {', '.join(map(str, skipped))}" if skipped else ""
    config = quantization_config(candidate)
    if config is not None and config.kv_cache_scheme is not None:
        if real_engine and rollout.simulate:
            scales = "scales 1.0: a simulated checkpoint carries none" if is_quantized(rollout.kv_cache_dtype) else ""
            how: How = "real" if scales else "not applied"
            return [Provenance("kv_cache", how, f"{rollout.kv_cache_dtype}, {scales or 'kv_cache_scheme'}{but}")]
        return [Provenance("kv_cache", "real" if real_engine else "simulated", f"fp8, calibrated scales{but}")]
    cut = rollout.kv_cache_dtype.startswith("fp8") and not real_engine and truncates_kv_cache(candidate)
    how_rounded = ", truncated toward zero as in vLLM on a CPU" if cut else ""
    detail = f"{rollout.kv_cache_dtype}{how_rounded}{but}"
    return [Provenance("kv_cache", "real" if real_engine else "simulated", detail)]


def scheme_name(candidate: Candidate) -> str:
    """What a report calls the candidate's quantization."""
    spec = candidate.rollout.quantization
    if isinstance(spec, Quantization):
        return spec.scheme if spec.group_size is None else f"{spec.scheme} (group size {spec.group_size})"
    return spec if isinstance(spec, str) else "quantization config"


def in_weights(part: SourceName) -> bool:
    """Whether a checkpoint's weights hold this part; the others are up to whoever runs it.

    Raises:
        ValueError: `kernel`, which no policy has.
    """
    match part:
        case "staleness" | "noise" | "weights" | "dtype":
            return True
        case "activations" | "kv_cache":
            return False
        case "kernel":
            raise ValueError("the kernel is the engine's: no part of what a candidate asks for")
        case _:
            assert_never(part)


def free(policy: CausalLM) -> None:
    """Gives a policy's weights back, so that the next one fits; the policy cannot be used afterwards."""
    policy.model.to_empty(device="meta")
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


__all__ = [
    "PARTS",
    "active_parts",
    "attach_rounding",
    "build_policy",
    "describe",
    "free",
    "in_weights",
    "load_base",
    "quantization_config",
    "scheme_name",
]
