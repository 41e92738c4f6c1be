"""AdamW over float32 master weights, whatever dtype the trainer computes in."""

from __future__ import annotations

import torch
from torch import nn


class MasterAdamW:
    """AdamW whose weights and moments are float32; the model holds their copies in its own dtype.

    A BF16 weight moves by at least 1/256 of itself: at common learning rates most updates would round to nothing. So
    the sum is kept in float32, as Megatron-LM and FSDP's mixed precision do, and the model stays the very policy that
    `admit` scores. In float32 the model's own parameters are the master weights.

    Args:
        model: its parameters get gradients.
        learning_rate: constant after the warm-up.
        warmup_steps: steps over which the learning rate rises from 0, linearly.
        max_grad_norm: gradients are scaled down to this norm.
    """

    def __init__(
        self, model: nn.Module, *, learning_rate: float, warmup_steps: int, max_grad_norm: float, weight_decay: float
    ) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
        for parameter in self._parameters:
            parameter.requires_grad_(True)
        self._masters = [
            parameter if parameter.dtype == torch.float32 else parameter.detach().float().requires_grad_(True)
            for parameter in self._parameters
        ]
        self._learning_rate = learning_rate
        self._warmup_steps = warmup_steps
        self._max_grad_norm = max_grad_norm
        self._steps = 0
        self._adam = torch.optim.AdamW(
            self._masters, lr=learning_rate, betas=(0.9, 0.999), weight_decay=weight_decay, foreach=False
        )

    def step(self) -> float:
        """One update from the gradients that the parameters hold, which are cleared.

        Returns:
            The gradients' norm before clipping. Where it is not finite, nothing is updated.
        """
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            if master is not parameter and parameter.grad is not None:
                master.grad, parameter.grad = parameter.grad.float(), None
        norm = float(torch.nn.utils.clip_grad_norm_(self._masters, self._max_grad_norm))
        if norm < float("inf"):  # false for NaN too
            self._steps += 1
            for group in self._adam.param_groups:
                group["lr"] = self._learning_rate * min(1.0, self._steps / max(1, self._warmup_steps))
            self._adam.step()
            with torch.no_grad():
                for master, parameter in zip(self._masters, self._parameters, strict=True):
                    if master is not parameter:
                        parameter.copy_(master)
        self._adam.zero_grad(set_to_none=True)
        return norm
