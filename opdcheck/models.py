"""Loading any Hugging Face decoder, split into decoder and head so that logits can be had a few rows at a time."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging as transformers_logging

from opdcheck.config import HUB_ID, DType, ModelRef, resolve
from opdcheck.errors import ConfigError, EngineError, OpdcheckError, one_line
from opdcheck.fingerprint import model_folder
from opdcheck.sampling import normal_noise, state_keys

_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
_CHECKED_TOKENS = 8

MEMORY_HINT = (
    "Lower `decision.round_prompts` or `workload.max_completion_length`, take a smaller dtype, or use a device with "
    "more memory."
)


# --- the model --------------------------------------------------------------------------------------------------------


class CausalLM:
    """A decoder-only language model in evaluation mode: `final_hidden` is the decoder, `logits` the head.

    Args:
        model: a `transformers` causal language model, perturbed or not.
        logit_noise: sigma of Gaussian noise on every logit, in nats; see `with_logit_noise`.
        noise_seed: of that noise.

    Raises:
        EngineError: the model has no output head or no separate decoder.
    """

    def __init__(self, model: Any, *, logit_noise: float = 0.0, noise_seed: int = 0) -> None:
        self.model = model
        self.logit_noise = logit_noise
        self.noise_seed = noise_seed
        self.head = _output_head(model)
        self._decoder = _decoder(model)
        self._head_transform = _head_transform(model)
        self.max_positions = _max_positions(model.config)

    @property
    def device(self) -> torch.device:
        return torch.device(self.model.device)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def vocab_size(self) -> int:
        """Width of the logits, which may exceed the tokenizer's vocabulary."""
        return int(getattr(self.head, "out_features", None) or self.model.config.get_text_config().vocab_size)

    @property
    def hidden_size(self) -> int:
        return int(getattr(self.head, "in_features", None) or self.model.config.get_text_config().hidden_size)

    def with_logit_noise(self, sigma: float, seed: int) -> CausalLM:
        """The same weights with Gaussian noise on the logits.

        The noise is a function of (seed, final hidden state, token): drawn anew at each position, and yet the noisy
        policy is one fixed distribution per state, which `logits` reproduces whenever it is given that state again.
        (States that differ in a bit, as those of another batch shape do, get other noise.)
        """
        noisy = copy.copy(self)
        noisy.logit_noise, noisy.noise_seed = sigma, seed
        return noisy

    def decode(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """The decoder alone: what the head sees at each position, in the model's dtype; with gradients if they are on.

        Args:
            input_ids: int64 [batch, tokens].
            attention_mask: int64 [batch, tokens], 0 at padding, which must be on the right. None: no padding.

        Returns:
            [batch, tokens, hidden] on the model's device.
        """
        mask = None if attention_mask is None else attention_mask.to(self.device)
        output = self._decoder(input_ids=input_ids.to(self.device), attention_mask=mask, use_cache=False)
        hidden: Tensor = output.last_hidden_state
        return hidden

    @torch.no_grad()
    def final_hidden(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """As `decode`, without gradients."""
        return self.decode(input_ids, attention_mask)

    def head_logits(self, hidden: Tensor) -> Tensor:
        """The model's logits, as `model(...).logits` gives them, in its dtype; with gradients if they are on.

        Args:
            hidden: [tokens, hidden], on any device.

        Returns:
            [tokens, vocab] on the model's device, a tensor of its own.
        """
        return self._head_transform(self.head(hidden.to(self.device)))

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """As `head_logits`, in float32 and without gradients, plus logit noise if the policy has any."""
        return self.add_logit_noise(self.head_logits(hidden).float(), hidden)

    @torch.no_grad()
    def add_logit_noise(self, logits: Tensor, hidden: Tensor) -> Tensor:
        """`logits`, float32 [tokens, vocab], with the noise that belongs to their final hidden states; in place."""
        if not self.logit_noise:
            return logits
        keys = state_keys(hidden.to(logits.device), self.noise_seed)
        return logits.add_(normal_noise(keys, logits.shape[-1]), alpha=self.logit_noise)


@dataclass(frozen=True)
class _HeadTransform:
    """What an architecture does to its logits after the projection, in the model's dtype and in this order."""

    multiplier: float = 1.0
    divisor: float = 1.0
    soft_cap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        """In place. [tokens, vocab] -> [tokens, vocab]."""
        if self.multiplier != 1:
            logits = logits.mul_(self.multiplier)
        if self.divisor != 1:
            logits = logits.div_(self.divisor)
        if self.soft_cap:
            logits = logits.div_(self.soft_cap).tanh_().mul_(self.soft_cap)
        return logits


def _head_transform(model: Any) -> _HeadTransform:
    config = model.config.get_text_config()
    multiplier = 1.0
    for name in ("logit_scale", "lm_head_multiplier", "output_multiplier"):  # Cohere, Falcon-H1, MuseGlimmer
        multiplier *= _number(getattr(config, name, None)) or 1.0
    return _HeadTransform(
        multiplier=multiplier,
        divisor=_number(getattr(config, "logits_scaling", None)) or 1.0,  # Granite
        # Gemma 2 and later, NanoChat; RecurrentGemma
        soft_cap=_number(getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)),
    )


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _output_head(model: Any) -> nn.Module:
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Module):
        raise EngineError(
            f"{type(model).__name__} has no output head that opdcheck can find (get_output_embeddings() gave nothing)",
            hint="opdcheck measures decoder-only language models.",
        )
    return head


def _decoder(model: Any) -> nn.Module:
    decoder = model.base_model
    if decoder is model:
        decoder = model.get_decoder()
    if not isinstance(decoder, nn.Module) or decoder is model:
        raise EngineError(
            f"{type(model).__name__} does not separate its decoder from its head (no base_model)",
            hint="opdcheck measures decoder-only language models of the usual transformers layout.",
        )
    return decoder


def _max_positions(config: Any) -> int | None:
    text_config = config.get_text_config()
    for key in _CONTEXT_KEYS:
        value = getattr(text_config, key, None)
        if isinstance(value, int) and 0 < value < 10**9:
            return value
    return None


# --- loading ----------------------------------------------------------------------------------------------------------


def load_causal_lm(ref: ModelRef, base: Path, *, dtype: DType, device: str) -> CausalLM:
    """Loads a causal language model from safetensors, without gradients, and checks that its head is understood.

    Args:
        ref: folder or hub id.
        base: folder that relative paths start from.
        device: `auto`, `cpu`, `cuda`, `cuda:1`, ...

    Raises:
        ConfigError: there is no such model, it is not a causal language model, its weights are pickled, or the device
            does not exist.
        EngineError: weights are missing, superfluous, not finite or do not fit, memory ran out, or the architecture is
            one that opdcheck would get wrong.
    """
    place = resolve_device(device)
    source = source_folder(ref, base)
    _refuse_pickled(source)
    with _explained(source), quiet_transformers():
        model, info = AutoModelForCausalLM.from_pretrained(
            source,
            revision=ref.revision,
            trust_remote_code=ref.trust_remote_code,
            dtype=getattr(torch, dtype),
            device_map={"": place},
            use_safetensors=True,
            output_loading_info=True,
        )
        _refuse_unlike(source, info)
        loaded = CausalLM(model.eval().requires_grad_(False))
        check_causal_lm(loaded)
    return loaded


def check_causal_lm(loaded: CausalLM) -> None:
    """Compares decoder plus head with the model's own logits, and makes sure that no position sees a later one.

    Raises:
        EngineError: opdcheck would score this architecture wrongly, or its logits are NaN or infinite.
    """
    name = type(loaded.model).__name__
    steps = torch.arange(_CHECKED_TOKENS, device=loaded.device)
    input_ids = (steps[None] * 7919 + 1) % loaded.vocab_size
    hidden = loaded.final_hidden(input_ids)[0]
    with torch.no_grad():
        expected = loaded.model(input_ids=input_ids, use_cache=False).logits[0].float()
    if not expected.isfinite().all():
        raise _not_finite(loaded)
    difference = (loaded.logits(hidden) - expected).abs().max()
    if not difference <= 4 * torch.finfo(loaded.dtype).eps * expected.abs().max():  # also catches NaN
        raise EngineError(
            f"{name}: decoder and head alone do not reproduce the model's logits (largest difference "
            f"{difference:.3g}): this architecture post-processes logits in a way opdcheck does not know",
            hint="Please report the architecture. opdcheck knows logit soft-capping and scaling by configuration.",
        )
    if getattr(loaded.model.config, "quantization_config", None) is not None:
        return  # per-tensor activation scales tie positions to each other on purpose
    altered = input_ids.clone()
    altered[0, -1] = (altered[0, -1] + 1) % loaded.vocab_size
    shift = (loaded.final_hidden(altered)[0, :-1] - hidden[:-1]).float().norm() / hidden[:-1].float().norm()
    if not shift <= 0.02:
        raise EngineError(
            f"{name} is not causal: a token changes the states of the tokens before it (by {shift:.1%})",
            hint="opdcheck measures decoder-only language models; encoders such as BERT cannot be students.",
        )


def _not_finite(loaded: CausalLM) -> EngineError:
    """Why a model's logits are NaN or infinite: its weights, or else the dtype that they are computed in."""
    name, dtype = type(loaded.model).__name__, str(loaded.dtype).removeprefix("torch.")
    for weight, values in loaded.model.named_parameters():
        if not values.isfinite().all():
            return EngineError(
                f"{name}: the weights are not finite: {weight} holds NaN or infinite values (in {dtype})",
                hint="Was the checkpoint saved from a training that diverged, or damaged? In float16 large weights "
                "become infinite: try bfloat16.",
            )
    return EngineError(
        f"{name}: the logits are NaN or infinite although all weights are finite: computing in {dtype} overflows",
        hint="float16 overflows where bfloat16 and float32 do not: try another dtype.",
    )


def meta_model(ref: ModelRef, base: Path) -> Any:
    """The model's modules with shapes and no weights (device `meta`), for checks that need no numbers.

    Raises:
        ConfigError: there is no such model, or it is not a causal language model.
    """
    source = source_folder(ref, base)
    config = load_config(ref, base)
    with _explained(source), quiet_transformers(), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=ref.trust_remote_code).eval()


def load_config(ref: ModelRef, base: Path) -> Any:
    """The model's `transformers` configuration.

    Raises:
        ConfigError: there is no such model or its configuration cannot be read.
    """
    source = source_folder(ref, base)
    with _explained(source), quiet_transformers():
        return AutoConfig.from_pretrained(source, revision=ref.revision, trust_remote_code=ref.trust_remote_code)


def context_length(ref: ModelRef, base: Path) -> int | None:
    """The longest sequence the model was made for, in tokens; None where its configuration does not say."""
    return _max_positions(load_config(ref, base))


def vocabulary_size(ref: ModelRef, base: Path) -> int | None:
    """How many tokens the model has logits for; None where its configuration does not say."""
    size = getattr(load_config(ref, base).get_text_config(), "vocab_size", None)
    return size if isinstance(size, int) else None


def hidden_bytes(ref: ModelRef, base: Path) -> int:
    """Bytes of one token's final hidden state, at most (float32)."""
    return 4 * int(load_config(ref, base).get_text_config().hidden_size)


def end_token_ids(ref: ModelRef, base: Path) -> set[int]:
    """The tokens that end a completion, as vLLM takes them: the generation config's, and the tokenizer's own.

    Raises:
        ConfigError: generation_config.json is there and cannot be read, or its end tokens are no token ids.
    """
    source = source_folder(ref, base)
    file = Path(source) / "generation_config.json"
    with quiet_transformers():
        try:
            generation = (
                GenerationConfig.from_pretrained(source)
                if file.is_file()
                else GenerationConfig.from_model_config(load_config(ref, base))
            )
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"{file}: cannot be read, and it says where completions end: {one_line(error)}"
            ) from error
        try:
            own = AutoTokenizer.from_pretrained(source, trust_remote_code=ref.trust_remote_code).eos_token_id
        except Exception:  # no tokenizer, or a broken one: the workload complains where it needs one
            own = None
    listed = generation.eos_token_id
    tokens = [token for token in [*(listed if isinstance(listed, list) else [listed]), own] if token is not None]
    for token in tokens:
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise ConfigError(f"{file}: eos_token_id: expected token ids (whole numbers from 0), found {token!r}")
    return set(tokens)


def source_folder(ref: ModelRef, base: Path) -> str:
    """The absolute folder: the one named, or the local snapshot of the hub model.

    The snapshot and not the hub id, so that what is loaded is what was fingerprinted, even if the hub has moved on.

    Raises:
        ConfigError: it looks like a folder and there is none, or it is no hub model.
        EngineError: the hub could not be reached.
    """
    folder = resolve(ref.path, base)
    if folder.is_dir():
        return str(folder)
    if folder.exists():
        raise ConfigError(f"{folder} is a file, not a model folder", hint="Name the folder that holds config.json.")
    if HUB_ID.fullmatch(ref.path):
        return str(model_folder(ref, base))
    raise ConfigError(
        f"there is no model folder {folder}",
        hint="Give a folder (relative to the file that names it) or a hub id: HuggingFaceTB/SmolLM2-135M-Instruct.",
    )


def resolve_device(device: str) -> str:
    """`auto` as the first GPU if there is one, else `cpu`; anything else as it is, after a look that it exists.

    Raises:
        ConfigError: there is no such device here.
    """
    if device == "auto":
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        found = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
        raise ConfigError(
            f"device {device!r} is not available: {one_line(error)}",
            hint=f"Here there is: {', '.join(['cpu', *found])} (or `auto`).",
        ) from error
    return device


def _refuse_pickled(source: str) -> None:
    folder = Path(source)
    if not folder.is_dir() or any(folder.glob("*.safetensors")):
        return
    if not (folder / "config.json").exists():
        raise ConfigError(f"{folder} is not a model: it has no config.json")
    pickled = sorted(file.name for pattern in _PICKLED for file in folder.glob(pattern))
    if pickled:
        raise ConfigError(
            f"{folder} holds only pickled weights ({pickled[0]}), which opdcheck does not load: unpickling runs code",
            hint="Convert them: load the model where you trust it and call save_pretrained(); that writes safetensors.",
        )
    raise ConfigError(f"{folder} holds no weights (*.safetensors)")


def _refuse_unlike(source: str, info: dict[str, Any]) -> None:
    """Refuses weights that are fewer, more or others than the configuration says: another model would be measured."""
    missing = sorted(info.get("missing_keys") or [])
    if missing:
        raise EngineError(
            f"{source}: weights are missing and would be random: {_shown(missing)}",
            hint="Is the checkpoint complete, and does config.json name the architecture that it was saved from?",
        )
    unexpected = sorted(
        info.get("unexpected_keys") or []
    )  # without those that transformers itself declares as harmless
    if unexpected:
        raise EngineError(
            f"{source}: config.json describes a model that has no place for these weights: {_shown(unexpected)}",
            hint="Does config.json (num_hidden_layers, the architecture) belong to this checkpoint? If the weights are "
            "no part of the model, save it without them.",
        )
    unfit = [str(item) for item in [*(info.get("mismatched_keys") or []), *(info.get("error_msgs") or [])]]
    if unfit:
        raise EngineError(f"{source}: weights do not fit the configuration: {unfit[0]}")


def _shown(names: list[str]) -> str:
    """The first three, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


@contextmanager
def _explained(source: str) -> Iterator[None]:
    """Turns what loading a model can raise into an error that says what to do."""
    try:
        yield
    except OpdcheckError:
        raise
    except Exception as error:
        if out_of_memory(error):
            raise EngineError(f"out of memory while loading {source}", hint=MEMORY_HINT) from error
        raise _loading_error(source, error) from error


def _loading_error(source: str, error: Exception) -> OpdcheckError:
    text, said = str(error), one_line(error)
    if "trust_remote_code" in text:
        return ConfigError(
            f"{source} needs modelling code of its own", hint="Set `trust_remote_code: true` if you trust its authors."
        )
    if isinstance(error, ValueError | KeyError) and re.search("nrecognized|does not recognize", text):
        return ConfigError(
            f"{source} is not a causal language model that this version of transformers knows: {said}",
            hint="opdcheck measures decoder-only language models (transformers' AutoModelForCausalLM).",
        )
    if isinstance(error, OSError):
        return ConfigError(
            f"cannot load {source}: {said}",
            hint="A hub id needs network access (HF_HUB_OFFLINE unset) or an earlier download; safetensors only.",
        )
    return EngineError(
        f"cannot load {source}: {type(error).__name__}: {said}",
        hint="If a weight file is damaged or cut short, copy or download it again; else please report the model.",
    )


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that device or host memory ran out."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and bool(re.search("out of memory|can't allocate memory", str(error)))


@contextmanager
def memory_explained(doing: str) -> Iterator[None]:
    """Turns an out-of-memory error into an `EngineError` with a hint; `doing` completes "out of memory while ..."."""
    try:
        yield
    except Exception as error:
        if out_of_memory(error):
            raise EngineError(f"out of memory while {doing}", hint=MEMORY_HINT) from error
        raise


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars, and no log lines below errors, from `transformers`; what was set before comes back."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
