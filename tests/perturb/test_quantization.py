"""Fake quantization against plain NumPy and torch casts, every preset of the library, and calibration."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationStatus, apply_quantization_config
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from transformers import AutoModelForCausalLM

from opdcheck.config import Quantization
from opdcheck.perturb.fit import check_fits
from opdcheck.perturb.qparams import round_activations
from opdcheck.perturb.quantization import (
    calibrate_activations,
    calibration_pass,
    fake_quantize_activations,
    fake_quantize_weights,
    to_quantization_config,
)

IDS = torch.arange(4, 68).reshape(2, 32)
LAYER = "model.layers.0.mlp.down_proj"
PRESETS = sorted(set(PRESET_SCHEMES) - {"UNQUANTIZED"})


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def weight(model: Any, name: str = LAYER) -> np.ndarray:
    return model.get_submodule(name).weight.detach().numpy().copy()


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(input_ids=IDS, use_cache=False).logits.float()


def kl(q: torch.Tensor, p: torch.Tensor) -> float:
    logq, logp = q.log_softmax(-1), p.log_softmax(-1)
    return float((logq.exp() * (logq - logp)).sum(-1).mean())


class TestWeightsAgainstReferences:
    def test_int8_per_channel(self, tiny_student: Path) -> None:
        model = load(tiny_student)
        before = weight(model)
        fake_quantize_weights(model, to_quantization_config("W8A8"))
        scale = np.abs(before).max(axis=1, keepdims=True) / 127.5
        expected = np.clip(np.rint(before / scale), -128, 127) * scale
        np.testing.assert_allclose(weight(model), expected, rtol=1e-6, atol=1e-7)

    def test_int4_groups(self, tiny_student: Path) -> None:
        model = load(tiny_student)
        before = weight(model).reshape(128, -1, 64)
        fake_quantize_weights(model, to_quantization_config(Quantization(scheme="W4A16", group_size=64)))
        scale = np.abs(before).max(axis=2, keepdims=True) / 7.5
        expected = np.clip(np.rint(before / scale), -8, 7) * scale
        np.testing.assert_allclose(weight(model), expected.reshape(128, 256), rtol=1e-6, atol=1e-7)

    def test_int4_asymmetric(self, tiny_student: Path) -> None:
        model = load(tiny_student)
        before = weight(model).reshape(128, -1, 128)
        fake_quantize_weights(model, to_quantization_config("W4A16_ASYM"))
        low, high = (np.minimum(before.min(2, keepdims=True), 0), np.maximum(before.max(2, keepdims=True), 0))
        scale = (high - low) / 15
        zero = np.rint(np.clip(-8 - low / scale, -8, 7))
        expected = (np.clip(np.rint(before / scale + zero), -8, 7) - zero) * scale
        np.testing.assert_allclose(weight(model), expected.reshape(128, 256), rtol=1e-5, atol=1e-6)

    def test_fp8_per_channel(self, tiny_student: Path) -> None:
        model = load(tiny_student)
        before = model.get_submodule(LAYER).weight.detach().clone()
        fake_quantize_weights(model, to_quantization_config("FP8_DYNAMIC"))
        scale = before.abs().amax(1, keepdim=True) / 448
        expected = (before / scale).to(torch.float8_e4m3fn).float() * scale
        torch.testing.assert_close(model.get_submodule(LAYER).weight, expected, rtol=1e-6, atol=0)

    def test_fp8_blocks(self, tiny_student: Path) -> None:
        model = load(tiny_student)
        before = model.get_submodule(LAYER).weight.detach().clone()  # [128, 256]: two blocks
        fake_quantize_weights(model, to_quantization_config("FP8_BLOCK"))
        scales = torch.stack([before[:, :128].abs().max(), before[:, 128:].abs().max()]) / 448
        scale = scales.repeat_interleave(128)
        expected = (before / scale).to(torch.float8_e4m3fn).float() * scale
        torch.testing.assert_close(model.get_submodule(LAYER).weight, expected, rtol=1e-6, atol=0)

    def test_mxfp8_scale_is_a_power_of_two(self, tiny_student: Path) -> None:
        model = load(tiny_student)
        before = weight(model).reshape(128, -1, 32)
        fake_quantize_weights(model, to_quantization_config("MXFP8"))
        after = weight(model).reshape(128, -1, 32)
        # An E4M3 value has 4 significant bits; a power-of-two scale leaves them as they are.
        mantissa, _ = np.frexp(after)
        np.testing.assert_array_equal(mantissa * 16, np.rint(mantissa * 16))
        assert np.abs(after - before).max() < 0.07 * np.abs(before).max()

    def test_bfloat16_rounds_once(self, tiny_student: Path) -> None:
        """The grid point is found in float32: dividing in bfloat16 would round twice."""
        model = load(tiny_student, torch.bfloat16)
        before = model.get_submodule(LAYER).weight.detach().float()
        fake_quantize_weights(model, to_quantization_config("W8A8"))
        scale = (before.abs().amax(1, keepdim=True) / 127.5).bfloat16().float()
        expected = ((before / scale).round().clamp(-128, 127) * scale).bfloat16()
        torch.testing.assert_close(model.get_submodule(LAYER).weight, expected, rtol=0, atol=0)

    def test_fused_shards_share_a_per_tensor_scale(self, tiny_student: Path) -> None:
        model = load(tiny_student)
        attention = model.model.layers[0].self_attn
        shards = [getattr(attention, name).weight.detach().clone() for name in ("q_proj", "k_proj", "v_proj")]
        fake_quantize_weights(model, to_quantization_config("FP8"))
        scale = max(shard.abs().max() for shard in shards) / 448
        expected = (shards[1] / scale).to(torch.float8_e4m3fn).float() * scale
        torch.testing.assert_close(attention.k_proj.weight.detach(), expected, rtol=1e-6, atol=0)

    def test_only_targets_change(self, tiny_student: Path) -> None:
        model, original = load(tiny_student), load(tiny_student)
        spec = Quantization(scheme="W8A8", targets=["re:.*mlp.*_proj"], ignore=["lm_head", "re:.*layers.1.*"])
        fake_quantize_weights(model, to_quantization_config(spec))
        changed = {n for (n, a), (_, b) in zip(model.named_parameters(), original.named_parameters(), strict=True)
                   if not torch.equal(a, b)}  # fmt: skip
        assert changed == {f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}


class TestActivations:
    def test_int8_per_token(self) -> None:
        args = to_quantization_config("W8A8").config_groups["group_0"].input_activations
        x = torch.randn(2, 3, 16)
        scale = x.abs().amax(-1, keepdim=True) / 127.5
        expected = (x / scale).round().clamp(-128, 127) * scale
        torch.testing.assert_close(round_activations(x, args, None), expected, rtol=1e-6, atol=1e-7)
        # Two dimensions, as lm_head sees them: still one scale per token.
        flat = round_activations(x.reshape(6, 16), args, None)
        torch.testing.assert_close(flat, expected.reshape(6, 16), rtol=1e-6, atol=1e-7)

    def test_static_scale_comes_from_the_calibration(self, tiny_student: Path) -> None:
        model = load(tiny_student)
        seen: list[torch.Tensor] = []
        handle = model.get_submodule(LAYER).register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        calibration = calibration_pass(model, IDS.tolist())
        static = calibrate_activations(model, to_quantization_config("FP8"), calibration)
        handle.remove()
        peak = max(float(x.abs().max()) for x in seen)
        assert static[(LAYER, "input")].scale.item() == pytest.approx(peak / 448, rel=1e-6)

    @pytest.mark.parametrize("preset", ["FP8", "NVFP4"])
    def test_static_scales_need_a_calibration(self, tiny_student: Path, preset: str) -> None:
        with pytest.raises(ValueError, match="need calibration prompts"):
            fake_quantize_activations(load(tiny_student), to_quantization_config(preset))

    def test_a_calibration_without_tokens_is_an_error(self, tiny_student: Path) -> None:
        model = load(tiny_student)
        with pytest.raises(ValueError, match=r"ran no token through model\.layers\.0"):
            fake_quantize_activations(model, to_quantization_config("FP8"), calibration_pass(model, []))

    @pytest.mark.parametrize("preset", ["W8A8", "FP8_DYNAMIC", "FP8_BLOCK", "MXFP8", "MXFP4"])
    def test_agrees_with_the_librarys_own_forward(self, tiny_student: Path, preset: str) -> None:
        """In float32 our hooks do what compressed-tensors does when it runs the model itself."""
        ours, theirs = load(tiny_student), load(tiny_student)
        config = to_quantization_config(preset)
        fake_quantize_weights(ours, config)
        fake_quantize_activations(ours, config)
        for theirs_module, ours_module in zip(theirs.modules(), ours.modules(), strict=True):
            if isinstance(theirs_module, torch.nn.Linear):
                theirs_module.weight.data.copy_(ours_module.weight.data)
        activations_only = deepcopy(config)
        for scheme in activations_only.config_groups.values():
            scheme.weights = None
        activations_only.quantization_status = QuantizationStatus.FROZEN
        apply_quantization_config(theirs, activations_only)
        torch.testing.assert_close(logits(ours), logits(theirs), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_works_alone_and_together(tiny_student: Path, preset: str) -> None:
    original = load(tiny_student)
    reference = logits(original)
    config = to_quantization_config(preset)
    check_fits(config, original)
    scheme = config.config_groups["group_0"]

    weights_only = load(tiny_student)
    fake_quantize_weights(weights_only, config)
    q = logits(weights_only)
    assert torch.isfinite(q).all()
    assert 0 < kl(q, reference) < 5
    if scheme.input_activations is None:
        return

    activations_only = load(tiny_student)
    fake_quantize_activations(activations_only, config, calibration_pass(activations_only, IDS.tolist()))
    for (name, a), b in zip(activations_only.named_parameters(), original.parameters(), strict=True):
        assert torch.equal(a, b), name
    q = logits(activations_only)
    assert torch.isfinite(q).all()
    assert 0 < kl(q, reference) < 5

    fake_quantize_weights(activations_only, config)
    assert 0 < kl(logits(activations_only), reference) < 10


def test_unquantized_preset_is_the_identity(tiny_student: Path) -> None:
    model = load(tiny_student)
    reference = logits(model)
    config = to_quantization_config("UNQUANTIZED")
    fake_quantize_weights(model, config)
    fake_quantize_activations(model, config)
    assert torch.equal(logits(model), reference)


def test_output_activations(tiny_student: Path) -> None:
    model = load(tiny_student)
    reference = logits(model)
    args = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    spec = {"config_groups": {"g": {"targets": ["re:.*down_proj"], "output_activations": args}}}
    fake_quantize_activations(model, to_quantization_config(spec))
    assert 0 < kl(logits(model), reference) < 1
