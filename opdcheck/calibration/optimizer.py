"""AdamW over float32 master weights, whatever dtype the trainer computes in."""

from __future__ import annotations

import torch
from torch import nn

from opdcheck.calibration.file import Method


class MasterAdamW:
    """AdamW whose weights and moments are float32; the model holds their copies in its own dtype.

    A BF16 weight moves by at least 1/256 of itself: at common learning rates most updates would round to nothing. So
    the sum is kept in float32, as Megatron-LM and FSDP's mixed precision do, and the model stays the very policy that
    `admit` scores. In float32 the model's own parameters are the master weights.

    Args:
        model: its parameters get gradients.
        method: learning rate, its warm-up and schedule, weight decay, and the norm that gradients are scaled down to.
    """

    def __init__(self, model: nn.Module, method: Method) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
        for parameter in self._parameters:
            parameter.requires_grad_(True)
        self._masters = [
            parameter if parameter.dtype == torch.float32 else parameter.detach().float().requires_grad_(True)
            for parameter in self._parameters
        ]
        self._method = method
        self._steps = 0
        self._adam = torch.optim.AdamW(
            self._masters,
            lr=method.learning_rate,
            betas=(0.9, 0.999),
            weight_decay=method.weight_decay,
            foreach=False,
        )

    def step(self) -> float:
        """One update from the gradients that the parameters hold, which are cleared.

        Returns:
            The gradients' norm before clipping. Where it is not finite, nothing is updated.
        """
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            if master is not parameter and parameter.grad is not None:
                master.grad, parameter.grad = parameter.grad.float(), None
        norm = float(torch.nn.utils.clip_grad_norm_(self._masters, self._method.max_grad_norm))
        if norm < float("inf"):  # false for NaN too
            for group in self._adam.param_groups:
                group["lr"] = learning_rate(self._method, self._steps)
            self._steps += 1
            self._adam.step()
            with torch.no_grad():
                for master, parameter in zip(self._masters, self._parameters, strict=True):
                    if master is not parameter:
                        parameter.copy_(master)
        self._adam.zero_grad(set_to_none=True)
        return norm


def learning_rate(method: Method, step: int) -> float:
    """The learning rate of a step, counted from 0."""
    warm = min(1.0, (step + 1) / method.warmup_steps) if method.warmup_steps else 1.0
    if method.schedule == "constant":
        return method.learning_rate * warm
    left = (method.steps - step) / max(1, method.steps - method.warmup_steps)
    return method.learning_rate * min(warm, max(0.0, left))


__all__ = ["MasterAdamW", "learning_rate"]
