"""Tiny random models of many architectures: what a head can look like. All have 128 tokens and 256 positions."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB = 128

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


def _decoder(name: str, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        config = getattr(transformers, f"{name}Config")(**{**_COMMON, **options})
        return getattr(transformers, f"{name}ForCausalLM")(config)

    return make


def _gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=2, n_positions=256, initializer_range=0.4, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def _opt() -> Any:
    """Its head is narrower than its layers: the decoder projects."""
    config = transformers.OPTConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        word_embed_proj_dim=16,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=256,
        init_std=0.4,
        pad_token_id=1,
        eos_token_id=0,
    )
    return transformers.OPTForCausalLM(config)


def _gemma3_text() -> Any:
    config = transformers.Gemma3TextConfig(**{**_COMMON, "sliding_window": 16, "query_pre_attn_scalar": 16})
    return transformers.Gemma3ForCausalLM(config)


def _multimodal_gemma3() -> Any:
    """A vision wrapper: the text configuration is nested."""
    text = {**_COMMON, "sliding_window": 16}
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "image_size": 16,
        "patch_size": 8,
    }
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=1, image_token_index=5, boi_token_index=6
    )
    return transformers.Gemma3ForConditionalGeneration(config)


ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "llama": _decoder("Llama", tie_word_embeddings=False),
    "llama-tied": _decoder("Llama", tie_word_embeddings=True),
    "qwen2": _decoder("Qwen2"),
    "qwen3": _decoder("Qwen3"),
    "gemma2": _decoder("Gemma2", final_logit_softcapping=3.0, sliding_window=16, query_pre_attn_scalar=16),
    "gemma3-text": _gemma3_text,
    "mistral": _decoder("Mistral", sliding_window=16),
    "phi3": _decoder("Phi3"),
    "granite": _decoder("Granite", logits_scaling=8.0),
    "cohere": _decoder("Cohere", logit_scale=0.25),
    "nanochat": _decoder("NanoChat"),
    "gpt2": _gpt2,
    "opt": _opt,
    "gemma3-multimodal": _multimodal_gemma3,
}


def save(name: str, folder: Path, *, seed: int = 0) -> Path:
    """Writes a random float32 model of an architecture to `folder`."""
    torch.manual_seed(seed)
    ARCHITECTURES[name]().save_pretrained(folder)
    return folder
