"""Noise: its size, its independence of everything but seed, name and shape, and the identity at sigma 0."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from opdcheck.perturb.noise import add_weight_noise, noisy_parameters, tensor_seed


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


@pytest.mark.parametrize("sigma", [0.01, 0.3])
def test_size_is_relative_to_each_tensors_rms(tiny_student: Path, sigma: float) -> None:
    original, noisy = load(tiny_student), load(tiny_student)
    add_weight_noise(noisy, sigma, seed=1)
    for (name, before), (_, after) in zip(noisy_parameters(original), noisy_parameters(noisy), strict=True):
        relative = (after - before).std() / before.square().mean().sqrt()
        assert relative.item() == pytest.approx(sigma, rel=4 / before.numel() ** 0.5), name
        assert abs((after - before).mean()) < 5 * (after - before).std() / before.numel() ** 0.5


def test_norms_are_left_alone(tiny_student: Path) -> None:
    original, noisy = load(tiny_student), load(tiny_student)
    add_weight_noise(noisy, 0.1, seed=0)
    for (name, before), after in zip(original.named_parameters(), noisy.parameters(), strict=True):
        assert torch.equal(before, after) == (before.ndim < 2), name


def test_sigma_zero_is_the_identity_bit_for_bit(tiny_student: Path) -> None:
    original, noisy = load(tiny_student, torch.bfloat16), load(tiny_student, torch.bfloat16)
    add_weight_noise(noisy, 0.0, seed=3)
    assert all(torch.equal(a, b) for a, b in zip(original.parameters(), noisy.parameters(), strict=True))


def test_a_tensors_noise_depends_on_nothing_but_seed_name_and_shape(tiny_student: Path) -> None:
    whole = load(tiny_student)
    add_weight_noise(whole, 0.1, seed=5)
    # A model that holds only one of the layers, under the same name.
    part = torch.nn.Module()
    part.lm_head = torch.nn.Linear(128, whole.config.vocab_size, bias=False)
    part.lm_head.weight.data.copy_(load(tiny_student).lm_head.weight)
    add_weight_noise(part, 0.1, seed=5)
    assert torch.equal(part.lm_head.weight, whole.lm_head.weight)
    assert tensor_seed(5, "lm_head.weight") != tensor_seed(6, "lm_head.weight") != tensor_seed(5, "lm_head")


def test_same_noise_in_a_checkpoint(tiny_student: Path, tmp_path: Path) -> None:
    live = load(tiny_student, torch.bfloat16)
    add_weight_noise(live, 0.1, seed=5)
    live.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(saved[name], parameter) for name, parameter in live.named_parameters())


def test_tied_weights_are_perturbed_once() -> None:
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config)
    before = model.model.embed_tokens.weight.detach().clone()
    add_weight_noise(model, 0.5, seed=0)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    relative = (model.lm_head.weight - before).std() / before.square().mean().sqrt()
    assert relative.item() == pytest.approx(0.5, rel=0.05)


def test_negative_sigma(tiny_student: Path) -> None:
    with pytest.raises(ValueError, match="must be 0 or more"):
        add_weight_noise(load(tiny_student), -0.1, seed=0)
