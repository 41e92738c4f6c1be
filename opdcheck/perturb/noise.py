"""Gaussian noise on weights, relative to each tensor's size."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from blake3 import blake3

_CHUNK = 2**22  # elements drawn at a time: bounds memory, and part of what a seed means


@torch.no_grad()
def add_weight_noise(model: torch.nn.Module, sigma: float, seed: int) -> None:
    """Adds Gaussian noise with standard deviation `sigma` times the tensor's root mean square, in place.

    Every floating-point parameter of two or more dimensions gets it: linear layers, embeddings, stacked experts. Norms
    and biases do not, for their RMS says little about what they do. Tied weights are perturbed once. Computed in
    float32 and stored in the model's dtype. The draw depends on the seed, the parameter's name and its shape only, so a
    checkpoint and a live model get the same noise, on any device and in any order.

    Args:
        model: perturbed in place.
        sigma: standard deviation relative to the RMS; 0 leaves every bit as it is.
        seed: of the whole draw.

    Raises:
        ValueError: negative sigma.
    """
    if sigma < 0:
        raise ValueError(f"sigma must be 0 or more, not {sigma}")
    if sigma == 0:
        return
    for name, parameter in noisy_parameters(model):
        _add_noise(parameter.data, sigma, name, seed)


def noisy_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters that `add_weight_noise` perturbs."""
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and parameter.ndim >= 2:
            yield name, parameter


def tensor_seed(seed: int, name: str) -> int:
    """A seed in [0, 2^63) for one tensor; the same on every machine and Python version."""
    digest = blake3(f"weight noise/{seed}/{name}".encode()).digest(length=8)
    return int.from_bytes(digest, "big") >> 1


def _add_noise(weight: torch.Tensor, sigma: float, name: str, seed: int) -> None:
    generator = torch.Generator(device="cpu").manual_seed(tensor_seed(seed, name))
    values = weight if weight.is_contiguous() else weight.contiguous()
    flat = values.view(-1)
    scale = sigma * _rms(flat)
    for chunk in flat.split(_CHUNK):
        # Always drawn on the CPU: a GPU's generator gives other numbers.
        noise = torch.randn(chunk.shape, generator=generator, dtype=torch.float32).to(chunk.device)
        chunk.copy_(chunk.float() + scale * noise)
    if values is not weight:
        weight.copy_(values)


def _rms(flat: torch.Tensor) -> float:
    squares = sum(chunk.double().square().sum().item() for chunk in flat.split(_CHUNK))
    return float((squares / max(flat.numel(), 1)) ** 0.5)


__all__ = ["add_weight_noise", "noisy_parameters", "tensor_seed"]
