"""Rollouts from vLLM, by its real kernels. Estimator `topk` (or `sampled` with `logprobs=0`).

How the engine is set up, and why:

- It runs in this process (`VLLM_ENABLE_V1_MULTIPROCESSING=0`).
- Prompts are token ids and no tokenizer is loaded: no text passes between the sides. It stops at `eos_token_ids` and
  nothing else, the same on both sides; the end token is the rollout's last token.
- The checkpoint's `generation_config.json` has no say in sampling.
- Log-probabilities are those of the distribution that was sampled from: vLLM's `raw_logprobs` where sampling changes
  nothing (temperature 1, no truncation), else its `processed_logprobs`.
- Prefix caching stays as vLLM has it (on, for most models): the rollouts of training share prompt prefixes through it
  too, so a quantized KV cache is read by later samples of a prompt just as it would be then.
"""

from __future__ import annotations

import contextlib
import gc
import os
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from opdcheck.config import Sampling
from opdcheck.engines.base import Provenance
from opdcheck.engines.vllm_support import (
    LogFile,
    check_engine_args,
    check_runnable,
    import_vllm,
    plainly,
    quietly,
    require,
)
from opdcheck.errors import ConfigError, EngineError, OpdcheckError
from opdcheck.rollouts import Rollout, RolloutRequest

GIB = 2**30
CPU_KV_CACHE_BYTES = GIB
GPU_MEMORY_UTILIZATION = 0.55  # vLLM's own default, 0.92, leaves no room for the trainer's model on the same GPU


@dataclass(frozen=True)
class VllmFacts:
    """What the running engine says about itself."""

    version: str
    platform: str
    """`cpu`, or the GPU's name."""
    attention_backend: str
    kv_cache_dtype: str
    kv_cache_size_tokens: int | None
    prefix_caching: bool
    logprobs_mode: str
    enforce_eager: bool


class VllmEngine:
    """A running vLLM. Opened by `open_vllm`."""

    def __init__(
        self,
        llm: Any,
        *,
        sampling: Sampling,
        max_completion_length: int,
        eos_token_ids: Collection[int],
        logprobs: int,
        provenance: Sequence[Provenance],
        log: LogFile,
        process: _Process,
    ) -> None:
        self._llm = llm
        self._sampling = sampling
        self._max_completion_length = max_completion_length
        self._eos_token_ids = sorted(set(eos_token_ids))
        self._logprobs = min(logprobs, llm.model_config.get_vocab_size())
        self._log = log
        self._process = process
        self._failed: str | None = None
        self.facts = _facts(llm)
        self.provenance = _all_provenance(llm, self.facts, provenance)

    @property
    def name(self) -> str:
        """Such as `vllm 0.32.0 (cpu)`."""
        return f"vllm {self.facts.version} ({self.facts.platform})"

    def generate(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        """One rollout per request, in the order of the requests.

        Raises:
            EngineError: vLLM failed, or gave log-probabilities that are no numbers.
        """
        if self._llm is None or self._failed:
            raise EngineError(f"vLLM is not running any more: {self._failed or 'it was closed'}")
        if not requests:
            return []
        prompts = [{"prompt_token_ids": list(request.prompt.token_ids)} for request in requests]
        params = [self._params(request) for request in requests]
        try:
            with self._eagerly():
                outputs = self._llm.generate(prompts, params, use_tqdm=False)
        except BaseException as error:
            # Half-done requests stay in its queue: what it gives from here on would not be what was asked.
            self._failed = f"{type(error).__name__}: {plainly(error)}"
            if not isinstance(error, Exception):
                raise
            raise _generation_error(error, self._log) from error
        if len(outputs) != len(requests):
            raise EngineError(f"vLLM answered {len(outputs)} of {len(requests)} requests")
        return [
            _to_rollout(request, output.outputs[0], self._logprobs)
            for request, output in zip(requests, outputs, strict=True)
        ]

    def reload(self, folder: Path) -> None:
        """Takes the weights of another checkpoint of the same model in the same format, and forgets cached prefixes.

        Weights of another format (plain ones into a quantized engine) give NaN without an error of vLLM's; the next
        rollouts then fail.

        Raises:
            EngineError: vLLM could not read them.
        """
        if self._llm is None or self._failed:
            raise EngineError(f"vLLM is not running any more: {self._failed or 'it was closed'}")
        try:
            with quietly(self._log.path):
                self._llm.collective_rpc("reload_weights", kwargs={"weights_path": str(folder)})
                self._llm.reset_prefix_cache()
        except Exception as error:
            self._failed = f"{type(error).__name__}: {plainly(error)}"
            raise EngineError(f"vLLM could not reload its weights from {folder}: {plainly(error)}") from error

    def close(self) -> None:
        """Frees the engine's memory and undoes what it changed in the process; another can be started then."""
        llm, self._llm = self._llm, None
        if llm is None:
            return
        with contextlib.suppress(Exception), quietly(self._log.path):  # a dead engine may not shut down cleanly
            llm.llm_engine.engine_core.shutdown()
        del llm
        _free_memory()
        self._process.after_close()
        self._log.detach()
        if self._failed is None:
            self._log.path.unlink(missing_ok=True)

    def __enter__(self) -> VllmEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _params(self, request: RolloutRequest) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            temperature=self._sampling.temperature,
            top_p=self._sampling.top_p,
            top_k=max(self._sampling.top_k, 0),
            min_p=self._sampling.min_p,
            seed=request.seed,
            max_tokens=self._max_completion_length,
            logprobs=self._logprobs,
            flat_logprobs=True,
            detokenize=False,
            ignore_eos=True,  # of its own; `stop_token_ids` are the trainer's end tokens
            stop_token_ids=self._eos_token_ids,
        )

    @contextlib.contextmanager
    def _eagerly(self) -> Iterator[None]:
        """On a CPU, without torch.compile: vLLM compiles one helper (a count) at the first token even in eager mode.

        That takes 14 s and a C++ compiler the first time on a machine, 3 s in every later process, and saves nothing
        that could be measured (2.5 s for 980 tokens with and without).
        """
        if self.facts.platform == "cpu" and self.facts.enforce_eager:
            import torch

            with torch.compiler.set_stance("force_eager"):
                yield
        else:
            yield


# --- opening ----------------------------------------------------------------------------------------------------------


def open_vllm(
    *,
    model: str,
    dtype: str,
    kv_cache_dtype: str,
    kv_cache_dtype_skip_layers: Sequence[int],
    sampling: Sampling,
    max_completion_length: int,
    max_prompt_length: int,
    eos_token_ids: Collection[int],
    logprobs: int,
    trust_remote_code: bool,
    seed: int,
    engine_args: dict[str, Any],
    provenance: Sequence[Provenance] = (),
) -> VllmEngine:
    """Starts vLLM. The weights have been read when this returns.

    Args:
        model: folder that holds the weights.
        eos_token_ids: where a rollout stops; the trainer's.
        logprobs: top log-probabilities per token; at most the vocabulary is asked for.
        engine_args: the user's, checked by `check_engine_args`; they win over this module's defaults.
        provenance: of what the checkpoint simulates.

    Raises:
        ConfigError: vLLM is not installed, or refuses the configuration.
        EngineError: it did not start; names the file that holds its log.
    """
    require()
    _check_folder(model)
    length = _context_length(engine_args, max_prompt_length + max_completion_length)
    log = LogFile(_new_log())
    process = _Process()
    try:
        with quietly(log.path):
            vllm = import_vllm()
            log.attach()
            _check_kv_cache(kv_cache_dtype, dtype)
            llm = vllm.LLM(
                model=model,
                dtype=dtype,
                kv_cache_dtype=_kv_cache_dtype(kv_cache_dtype, dtype),
                kv_cache_dtype_skip_layers=[str(layer) for layer in kv_cache_dtype_skip_layers],
                max_logprobs=logprobs,
                logprobs_mode=_logprobs_mode(sampling),
                trust_remote_code=trust_remote_code,
                seed=seed % 2**32,
                **(_defaults(engine_args) | {"max_model_len": length} | engine_args),
            )
        process.after_start()
        return VllmEngine(
            llm,
            sampling=sampling,
            max_completion_length=max_completion_length,
            eos_token_ids=eos_token_ids,
            logprobs=logprobs,
            provenance=provenance,
            log=log,
            process=process,
        )
    except BaseException as error:
        log.detach()
        _free_memory()
        process.after_close()
        failure = _start_error(error, model, log) if isinstance(error, Exception) else error
        if not isinstance(failure, EngineError):
            log.path.unlink(missing_ok=True)
        raise failure from (None if failure is error else error)


def _defaults(engine_args: dict[str, Any]) -> dict[str, Any]:
    """What differs from vLLM's own defaults, where the user says nothing."""
    from vllm.platforms import current_platform

    common = {"skip_tokenizer_init": True, "generation_config": "vllm", "use_tqdm_on_load": False}
    if not current_platform.is_cpu():
        return common | {"gpu_memory_utilization": GPU_MEMORY_UTILIZATION}
    # Compiling a small student on a CPU takes longer than the measurement.
    common["enforce_eager"] = True
    sized = "gpu_memory_utilization" in engine_args or "VLLM_CPU_KVCACHE_SPACE" in os.environ
    return common if sized else common | {"kv_cache_memory_bytes": CPU_KV_CACHE_BYTES}


def _check_folder(model: str) -> None:
    """vLLM takes a folder that does not exist for a hub id, and says something about repositories."""
    path = Path(model)
    if path.is_absolute() and not (path / "config.json").is_file():
        what = "has no config.json" if path.is_dir() else "does not exist"
        raise EngineError(f"vLLM cannot load {model}: the folder {what}", hint="It must be a Transformers checkpoint.")


def _context_length(engine_args: dict[str, Any], needed: int) -> int:
    """The longest prompt plus the longest completion; vLLM would cut rollouts short at less, and not say so."""
    asked = engine_args.get("max_model_len")
    if isinstance(asked, int) and 0 < asked < needed:
        raise ConfigError(
            f"rollout.engine_args.max_model_len: {asked} is too short: the longest prompt and "
            f"workload.max_completion_length need {needed} tokens"
        )
    return needed


def _kv_cache_dtype(kv_cache_dtype: str, dtype: str) -> str:
    """`auto` where the KV cache has the rollout dtype anyway: backends know that name best."""
    return "auto" if kv_cache_dtype == dtype else kv_cache_dtype


def _check_kv_cache(kv_cache_dtype: str, dtype: str) -> None:
    """vLLM's CPU backend takes every name, runs without an error, and stores something else than the name says."""
    from vllm.platforms import current_platform

    message = check_runnable(None, kv_cache_dtype)
    plain = kv_cache_dtype in ("float16", "bfloat16")
    if message is None and plain and kv_cache_dtype != dtype and current_platform.is_cpu():
        message = f"vLLM's CPU backend keeps the KV cache in rollout.dtype ({dtype}) or in fp8, not in {kv_cache_dtype}"
    if message:
        raise ConfigError(f"rollout.kv_cache_dtype: {message}")


def _logprobs_mode(sampling: Sampling) -> str:
    """vLLM's mode that describes the distribution sampled from."""
    plain = sampling.temperature == 1 and not sampling.truncates
    return "raw_logprobs" if plain else "processed_logprobs"


def _new_log() -> Path:
    descriptor, path = tempfile.mkstemp(prefix="opdcheck-vllm-", suffix=".log")
    os.close(descriptor)
    return Path(path)


class _Process:
    """What vLLM changes in the process that it runs in, to be put back."""

    def __init__(self) -> None:
        import torch

        self._set_num_threads = torch.set_num_threads
        self._threads = torch.get_num_threads()
        self._preload = os.environ.get("LD_PRELOAD")

    def after_start(self) -> None:
        """vLLM leaves torch one thread, and the trainer needs all; its libraries are not for our child processes."""
        import torch

        if self._preload is None:
            os.environ.pop("LD_PRELOAD", None)
        else:
            os.environ["LD_PRELOAD"] = self._preload
        # On a CPU vLLM has bound its threads, put a function without effect here, and relies on it while it runs.
        if torch.set_num_threads is self._set_num_threads and torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)

    def after_close(self) -> None:
        import torch

        torch.set_num_threads = self._set_num_threads
        self.after_start()


def _free_memory() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# --- results ----------------------------------------------------------------------------------------------------------


def _to_rollout(request: RolloutRequest, completion: Any, width: int) -> Rollout:
    """vLLM's completion as arrays. Its flat lists hold, per token, the sampled token, then the `width` most probable.

    Raises:
        EngineError: the request was aborted, or a log-probability is not a number.
    """
    reason = completion.finish_reason
    if reason not in ("stop", "length"):
        raise EngineError(f"vLLM ended prompt {request.prompt.index} early, with `{reason}`")
    tokens = len(completion.token_ids)
    flat = completion.logprobs
    logq = np.asarray(flat.logprobs, dtype=np.float64).reshape(tokens, width + 1)
    ids = np.asarray(flat.token_ids, dtype=np.int64).reshape(tokens, width + 1)
    if not np.isfinite(logq[:, 0]).all() or np.isnan(logq).any():
        raise EngineError(
            f"vLLM gave log-probabilities that are not finite, first at prompt {request.prompt.index}",
            hint="The weights or scales it holds do not work with this scheme and dtype: a checkpoint quantized in "
            "another format, or values beyond the dtype's range (try rollout.dtype bfloat16 or float32).",
        )
    return Rollout(
        prompt=request.prompt,
        sample=request.sample,
        token_ids=np.asarray(completion.token_ids, dtype=np.int64),
        logq=logq[:, 0],
        finish_reason=reason,
        top_ids=ids[:, 1:] if width else None,
        top_logq=logq[:, 1:] if width else None,
    )


def _facts(llm: Any) -> VllmFacts:
    from vllm import __version__
    from vllm.platforms import current_platform

    config = llm.llm_engine.vllm_config
    return VllmFacts(
        version=__version__.partition("+")[0],
        platform="cpu" if current_platform.is_cpu() else current_platform.get_device_name(),
        attention_backend=_attention_backend(config),
        kv_cache_dtype=_resolved_kv_cache_dtype(config),
        kv_cache_size_tokens=config.cache_config.kv_cache_size_tokens,
        prefix_caching=bool(config.cache_config.enable_prefix_caching),
        logprobs_mode=config.model_config.logprobs_mode,
        enforce_eager=bool(config.model_config.enforce_eager),
    )


def _attention_backend(config: Any) -> str:
    """The backends of the model's attention layers, as vLLM names them."""
    layers = config.compilation_config.static_forward_context.values()
    names = {layer.get_attn_backend().get_name() for layer in layers if hasattr(layer, "get_attn_backend")}
    return ", ".join(sorted(names)) or "unknown"


def _resolved_kv_cache_dtype(config: Any) -> str:
    dtype = str(config.cache_config.cache_dtype)
    return str(config.model_config.dtype).removeprefix("torch.") if dtype == "auto" else dtype


# --- provenance -------------------------------------------------------------------------------------------------------


def _all_provenance(llm: Any, facts: VllmFacts, given: Sequence[Provenance]) -> list[Provenance]:
    """What the caller says of the checkpoint, with what the engine knows of its own kernels in its place."""
    config = llm.llm_engine.vllm_config
    cache = _kv_cache_part(config.cache_config, facts, str(config.model_config.dtype).removeprefix("torch."))
    own = [*_quantized_parts(config.model_config, facts.platform == "cpu"), cache]
    return _merged(given, own)


def _merged(given: Sequence[Provenance], own: Sequence[Provenance]) -> list[Provenance]:
    """One account per part: the engine's own, except of what the caller has left out.

    vLLM runs the checkpoint that it is given and cannot know what was asked for and is missing from it.
    """
    left_out = {part.part for part in given if part.how == "not applied"}
    own = [part for part in own if part.part not in left_out]
    told = {part.part for part in own}
    return [part for part in given if part.part not in told] + own


def _kv_cache_part(cache_config: Any, facts: VllmFacts, dtype: str) -> Provenance:
    """The KV cache, a source of mismatch only where it is kept in another dtype than the model computes in."""
    if facts.kv_cache_dtype == dtype:
        return Provenance("kernel", "real", f"KV cache in {dtype}, {facts.attention_backend}")
    detail = f"{facts.kv_cache_dtype}, {facts.attention_backend}"
    if facts.kv_cache_dtype.startswith("fp8"):
        detail += ", scales from the checkpoint, else 1.0"
        if facts.platform == "cpu":
            detail += "; vLLM's CPU store truncates toward zero, so its mismatch is about three times that of rounding"
    if skipped := cache_config.kv_cache_dtype_skip_layers:
        detail += f"; layers in the rollout dtype: {', '.join(skipped)}"
    return Provenance("kv_cache", "real", detail)


def _quantized_parts(model_config: Any, on_cpu: bool) -> list[Provenance]:
    """Weights and activations of a checkpoint that vLLM runs quantized; none for a plain one."""
    if model_config.quantization is None:
        return []
    groups = _config_groups(model_config.hf_config)
    if not groups:
        detail = f"vLLM quantization `{model_config.quantization}`"
        kind = "float" if "fp" in model_config.quantization else "int"
        return [Provenance("weights", "real", detail), _activation_part(detail, [{"type": kind}], on_cpu)]
    weights = " + ".join(dict.fromkeys(_describe_args(group["weights"]) for group in groups if group.get("weights")))
    parts = [Provenance("weights", "real", weights)]
    activations = [group["input_activations"] for group in groups if group.get("input_activations")]
    if activations:
        detail = " + ".join(dict.fromkeys(_describe_args(args) for args in activations))
        return [*parts, _activation_part(detail, activations, on_cpu)]
    if on_cpu and os.environ.get("VLLM_CPU_INT4_W4A8", "1") != "0":
        parts.append(Provenance("activations", "real", "int8: VLLM_CPU_INT4_W4A8 is set, so W4A16 runs as W4A8"))
    return parts


def _activation_part(detail: str, activations: list[dict[str, Any]], on_cpu: bool) -> Provenance:
    if on_cpu and activations[0].get("type") == "float" and not _cpu_has_fp8_kernels():
        return Provenance("activations", "not applied", f"{detail}: vLLM's CPU kernel keeps activations in the dtype")
    return Provenance("activations", "real", detail)


def _cpu_has_fp8_kernels() -> bool:
    from vllm import _custom_ops

    return bool(_custom_ops.cpu_has_amx_fp8())


def _config_groups(hf_config: Any) -> list[dict[str, Any]]:
    """The groups of a compressed-tensors `quantization_config`; none where it has another format."""
    config = getattr(hf_config, "quantization_config", None) or {}
    groups = config.get("config_groups") if isinstance(config, dict) else None
    return [group for group in groups.values() if isinstance(group, dict)] if isinstance(groups, dict) else []


def _describe_args(args: dict[str, Any]) -> str:
    """Such as `int4 per group of 32`."""
    size = args.get("group_size")
    per = f"group of {size}" if args.get("strategy") in ("group", "tensor_group") and size else args.get("strategy")
    dynamic = ", dynamic" if args.get("dynamic") else ""
    return f"{args.get('type')}{args.get('num_bits')} per {per}{dynamic}"


# --- errors -----------------------------------------------------------------------------------------------------------

_MEMORY_WORDS = ("out of memory", "available memory", "memory utilization", "no available memory", "kv cache is needed")


def _start_error(error: Exception, model: str, log: LogFile) -> OpdcheckError:
    """Exit code 2 where vLLM refuses the configuration by its own rules, 4 where it or the model failed."""
    if isinstance(error, OpdcheckError):
        return error
    if isinstance(error, ValidationError):
        return ConfigError(
            f"vLLM refuses this rollout configuration: {plainly(error)}",
            hint="Change rollout or its engine_args as it says.",
        )
    return EngineError(f"vLLM did not start on {model}: {plainly(error)}", hint=_advice(error) + _log_hint(log))


def _generation_error(error: Exception, log: LogFile) -> EngineError:
    return EngineError(
        f"vLLM failed while sampling: {type(error).__name__}: {plainly(error)}", hint=_advice(error) + _log_hint(log)
    )


def _advice(error: Exception) -> str:
    text = str(error).lower()
    if any(word in text for word in _MEMORY_WORDS):
        return (
            "Memory: free some, sample shorter or fewer completions at a time, or set gpu_memory_utilization, "
            "kv_cache_memory_bytes or max_num_seqs under rollout.engine_args. "
        )
    return ""


def _log_hint(log: LogFile) -> str:
    tail = log.tail()
    return f"Its log is in {log.path}" + (f"; the last lines:\n{tail}" if tail else "")


__all__ = ["VllmEngine", "VllmFacts", "check_engine_args", "check_runnable", "open_vllm", "require"]
