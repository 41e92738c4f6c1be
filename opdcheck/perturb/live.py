"""A rollout policy that is given new weights again and again, as a training run's weight sync does."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, assert_never

import torch
from torch import Tensor

from opdcheck.config import Candidate
from opdcheck.measurement import SourceName
from opdcheck.models import CausalLM
from opdcheck.perturb.noise import add_weight_noise
from opdcheck.perturb.policy import attach_rounding, quantization_config
from opdcheck.perturb.quantization import fake_quantize_weights

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationConfig


def snapshot(model: torch.nn.Module) -> dict[str, Tensor]:
    """A copy of the model's parameters, by name; tied ones once. Buffers do not change in training."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


class LivePolicy:
    """A copy of the student that takes the student's weights and perturbs them as the candidate says.

    Static activation and KV scales are set once, from the first weights, as an engine that loads a calibrated
    checkpoint keeps them.

    Args:
        student: copied; stays as it is.
        candidate: what is done to the copy: noise on weights, quantization of weights, activations and KV cache, dtype.
        parts: which of these; see `opdcheck.perturb.policy.active_parts`.
        noise_seed: of the noise on weights; the same draw at every load, so it persists as a rounding error does.
        calibration_ids: token ids that static scales are set from.

    Raises:
        ValueError: a part does not fit the model, or is none that is done to new weights (`staleness`, `kernel`).
    """

    def __init__(
        self,
        student: CausalLM,
        candidate: Candidate,
        parts: Collection[SourceName],
        *,
        noise_seed: int,
        calibration_ids: list[list[int]],
    ) -> None:
        model = copy.deepcopy(student.model).requires_grad_(False)
        self._sigma = 0.0
        self._noise_seed = noise_seed
        self._config: QuantizationConfig | None = None
        for part in parts:
            match part:
                case "dtype":
                    model = model.to(getattr(torch, candidate.rollout.dtype))
                case "noise":
                    self._sigma = candidate.rollout.noise.weights if candidate.rollout.noise else 0.0
                case "weights":
                    self._config = quantization_config(candidate)
                case "activations" | "kv_cache":
                    pass  # `attach_rounding`
                case "staleness" | "kernel":
                    raise ValueError(f"{part} is nothing that is done to new weights")
                case _:
                    assert_never(part)
        self.policy = CausalLM(model)
        attach_rounding(model, candidate, parts, calibration_ids)

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Takes new weights (see `snapshot`) and perturbs them."""
        for name, parameter in self.policy.model.named_parameters():
            parameter.copy_(weights[name])
        add_weight_noise(self.policy.model, self._sigma, self._noise_seed)
        if self._config is not None:
            fake_quantize_weights(self.policy.model, self._config)


__all__ = ["LivePolicy", "snapshot"]
