"""Loading, the split into decoder and head, and every way in which a model can be refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from architectures import ARCHITECTURES, VOCAB, save
from safetensors.torch import load_file, save_file

from opdcheck.config import ModelRef
from opdcheck.errors import ConfigError, EngineError
from opdcheck.models import (
    CausalLM,
    check_causal_lm,
    context_length,
    end_token_ids,
    load_causal_lm,
    memory_explained,
    meta_model,
    resolve_device,
    source_folder,
)

IDS = torch.tensor([[3, 14, 15, 92, 65, 35]])


def load(folder: Path, dtype: str = "float32") -> CausalLM:
    return load_causal_lm(ModelRef(path=str(folder)), Path("/"), dtype=dtype, device="cpu")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_decoder_and_head_reproduce_the_model(name: str, dtype: str, tmp_path: Path) -> None:
    model = load(save(name, tmp_path), dtype)
    hidden = model.final_hidden(IDS)
    assert hidden.shape == (1, 6, model.hidden_size)
    assert hidden.dtype == model.dtype == getattr(torch, dtype)
    logits = model.logits(hidden[0])
    assert logits.dtype == torch.float32
    assert logits.shape == (6, VOCAB) == (6, model.vocab_size)
    assert torch.equal(logits, model.model(input_ids=IDS).logits[0].float())
    assert logits.std() > 0.1  # the test could not fail on a head that says nothing
    assert model.max_positions == 256
    assert not any(parameter.requires_grad for parameter in model.model.parameters())


def test_float16(tiny_student: Path) -> None:
    model = load(tiny_student, "float16")
    assert model.final_hidden(IDS).dtype == torch.float16


def test_logits_leave_the_hidden_states_alone(tiny_student: Path) -> None:
    model = load(tiny_student)
    hidden = model.final_hidden(IDS)[0]
    before = hidden.clone()
    model.with_logit_noise(1.0, 0).logits(hidden)
    assert torch.equal(hidden, before)


def test_padding_on_the_right_changes_nothing(tiny_student: Path) -> None:
    model = load(tiny_student)
    padded = torch.cat([IDS, torch.zeros(1, 5, dtype=torch.long)], dim=1)
    mask = torch.tensor([[1] * 6 + [0] * 5])
    torch.testing.assert_close(model.final_hidden(padded, mask)[:, :6], model.final_hidden(IDS), atol=1e-5, rtol=1e-5)


def test_logit_noise_is_reproducible_and_of_the_asked_size(tiny_student: Path) -> None:
    model = load(tiny_student)
    noisy = model.with_logit_noise(0.5, 1)
    hidden = model.final_hidden(IDS)[0]
    noise = noisy.logits(hidden) - model.logits(hidden)
    torch.testing.assert_close(noisy.logits(hidden[2:4]), noisy.logits(hidden)[2:4], atol=1e-5, rtol=1e-5)
    assert abs(noise.std() - 0.5) < 0.03
    assert abs(noise.mean()) < 0.05
    assert not torch.equal(noise[0], noise[1])
    assert not torch.equal(model.with_logit_noise(0.5, 2).logits(hidden), noisy.logits(hidden))
    assert model.logit_noise == 0


def test_unknown_post_processing_is_refused(tiny_student: Path) -> None:
    model = load(tiny_student)
    original = model.model.forward

    def halved(*args: object, **kwargs: object) -> object:
        output = original(*args, **kwargs)
        output.logits = output.logits / 2
        return output

    model.model.forward = halved
    with pytest.raises(EngineError, match="post-processes logits in a way opdcheck does not know"):
        check_causal_lm(model)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_named(tiny_student: Path, tmp_path: Path, value: float) -> None:
    def spoil(weights: dict[str, torch.Tensor]) -> None:
        weights["model.layers.1.mlp.up_proj.weight"][0] = value
        weights["model.norm.weight"][0] = value

    folder = edit_weights(tiny_student, tmp_path / "nan", spoil)
    with pytest.raises(EngineError, match=r"the weights are not finite: model\.layers\.1\.mlp\.up_proj\.weight holds"):
        load(folder)


def test_finite_weights_that_overflow_are_not_blamed(tiny_student: Path, tmp_path: Path) -> None:
    folder = edit_weights(tiny_student, tmp_path / "large", lambda weights: weights["lm_head.weight"].mul_(1e5))
    assert load(folder).dtype == torch.float32
    folder = edit_weights(tiny_student, tmp_path / "larger", lambda weights: weights["lm_head.weight"].fill_(6e4))
    with pytest.raises(EngineError, match="although all weights are finite: computing in float16 overflows"):
        load(folder, "float16")


def test_missing_weights_are_an_error_and_not_random(tiny_student: Path, tmp_path: Path) -> None:
    def remove(weights: dict[str, torch.Tensor]) -> None:
        del weights["lm_head.weight"], weights["model.layers.1.mlp.up_proj.weight"]

    folder = edit_weights(tiny_student, tmp_path / "incomplete", remove)
    with pytest.raises(EngineError, match=r"weights are missing and would be random: lm_head.weight, model.layers.1"):
        load(folder)


def test_more_layers_than_the_configuration_says_are_an_error_and_not_left_out(
    tiny_student: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_student, tmp_path / "shortened")
    edit_config(folder, num_hidden_layers=1)
    with pytest.raises(EngineError, match=r"no place for these weights: model\.layers\.1\..* and 6 more") as caught:
        load(folder)
    assert "num_hidden_layers" in (caught.value.hint or "")


def test_weights_that_transformers_declares_as_harmless_are_no_error(tiny_student: Path, tmp_path: Path) -> None:
    def add(weights: dict[str, torch.Tensor]) -> None:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
        weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(32)

    folder = edit_weights(tiny_student, tmp_path / "old", add)
    edit_config(folder, tie_word_embeddings=True)
    assert load(folder).vocab_size == 260


def test_weights_of_another_shape(tiny_student: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_student, tmp_path / "unfit")
    edit_config(folder, intermediate_size=200)
    with pytest.raises(EngineError, match=str(folder)):
        load(folder)


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    from transformers import BertConfig, BertLMHeadModel

    config = BertConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        initializer_range=0.4,
    )
    BertLMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises((EngineError, ConfigError)):
        load(tmp_path)


def test_a_model_that_looks_ahead_is_refused(tiny_student: Path) -> None:
    model = load(tiny_student)
    for layer in model.model.model.layers:
        layer.self_attn.is_causal = False
    original = model._decoder.forward

    def whole(*args: object, **kwargs: object) -> object:
        kwargs["attention_mask"] = torch.zeros(1, 1, 8, 8)
        return original(*args, **kwargs)

    model._decoder.forward = whole  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="is not causal"):
        check_causal_lm(model)


@pytest.mark.parametrize("architecture", ["vit", "t5"])
def test_not_a_language_model(architecture: str, tmp_path: Path) -> None:
    from transformers import T5Config, ViTConfig

    config = ViTConfig() if architecture == "vit" else T5Config()
    config.save_pretrained(tmp_path)
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="is not a causal language model"):
        load(tmp_path)


def test_unknown_model_type(tiny_student: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_student, tmp_path / "unknown")
    edit_config(folder, model_type="frobnicator")
    with pytest.raises(ConfigError, match="is not a causal language model that this version of transformers knows"):
        load(folder)


def test_remote_code_is_not_run_unless_asked_for(tiny_student: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_student, tmp_path / "remote")
    (folder / "evil.py").write_text("raise SystemExit('ran')\n")
    edit_config(folder, model_type="frobnicator", auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"})
    with pytest.raises(ConfigError, match="modelling code of its own") as caught:
        load(folder)
    assert "trust_remote_code: true" in (caught.value.hint or "")


def test_pickled_weights_are_refused(tiny_student: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_student, tmp_path / "pickled")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"only pickled weights \(pytorch_model.bin\)"):
        load(folder)


def test_folders_that_are_no_model(tiny_student: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no config"):
        load(tmp_path)
    folder = shutil.copytree(tiny_student, tmp_path / "bare")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="holds no weights"):
        load(folder)
    folder = shutil.copytree(tiny_student, tmp_path / "no_config")
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError):
        load(folder)


def test_damaged_weights(tiny_student: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_student, tmp_path / "damaged")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(EngineError, match="cannot load"):
        load(folder)


def test_places(tmp_path: Path) -> None:
    (tmp_path / "models" / "a").mkdir(parents=True)
    (tmp_path / "file").touch()
    assert source_folder(ModelRef(path="models/a"), tmp_path) == str(tmp_path / "models" / "a")
    assert source_folder(ModelRef(path="./models/a"), tmp_path) == str(tmp_path / "models" / "a")
    for path in ("./nowhere", "/nowhere", "~/nowhere-at-all", "a/b/c", "../nowhere"):
        with pytest.raises(ConfigError, match="there is no model folder"):
            source_folder(ModelRef(path=path), tmp_path)
    with pytest.raises(ConfigError, match="is a file"):
        source_folder(ModelRef(path="file"), tmp_path)


def test_a_hub_id_is_loaded_from_the_snapshot_that_is_fingerprinted(
    tiny_student: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("opdcheck.fingerprint._snapshot", lambda *_: tiny_student)
    assert source_folder(ModelRef(path="someone/tiny"), tmp_path) == str(tiny_student)


def test_a_hub_id_that_is_not_there(tmp_path: Path) -> None:
    ref = ModelRef(path="nobody/nothing-of-this-name")
    with pytest.raises(ConfigError, match="nobody/nothing-of-this-name") as caught:
        load_causal_lm(ref, tmp_path, dtype="float32", device="cpu")
    assert "download" in (caught.value.hint or "")


def test_devices() -> None:
    assert resolve_device("cpu") == "cpu"
    assert resolve_device("auto") == ("cuda:0" if torch.cuda.is_available() else "cpu")
    for device in ("cuda:99", "toaster"):
        with pytest.raises(ConfigError, match=f"device '{device}' is not available"):
            resolve_device(device)


def test_what_can_be_known_without_weights(tiny_student: Path) -> None:
    ref = ModelRef(path=str(tiny_student))
    assert context_length(ref, Path("/")) == 512
    assert end_token_ids(ref, Path("/")) == {0}
    skeleton = meta_model(ref, Path("/"))
    assert skeleton.lm_head.weight.device.type == "meta"
    assert skeleton.lm_head.weight.shape == (260, 128)


def test_end_tokens_of_generation_config_and_tokenizer(tiny_student: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_student, tmp_path / "ends")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    assert end_token_ids(ModelRef(path=str(folder)), Path("/")) == {0, 7, 9}
    (folder / "generation_config.json").unlink()
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    edit_config(folder, eos_token_id=11)
    assert end_token_ids(ModelRef(path=str(folder)), Path("/")) == {11}


@pytest.mark.parametrize(
    "text", ["garbage", "[1]", '{"eos_token_id": "abc"}', '{"eos_token_id": [[1]]}', '{"eos_token_id": -1}']
)
def test_unreadable_end_tokens_are_not_passed_over(tiny_student: Path, tmp_path: Path, text: str) -> None:
    folder = shutil.copytree(tiny_student, tmp_path / "ends")
    (folder / "generation_config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"generation_config\.json: "):
        end_token_ids(ModelRef(path=str(folder)), Path("/"))


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
)
def test_out_of_memory_has_a_hint(error: Exception) -> None:
    with pytest.raises(EngineError, match="out of memory while dreaming") as caught, memory_explained("dreaming"):
        raise error
    assert "max_completion_length" in (caught.value.hint or "")


def test_nothing_is_printed(tiny_student: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load(tiny_student)
    assert capfd.readouterr() == ("", "")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu(tiny_student: Path) -> None:
    model = load_causal_lm(ModelRef(path=str(tiny_student)), Path("/"), dtype="bfloat16", device="auto")
    assert model.device == torch.device("cuda:0")
    assert model.logits(model.final_hidden(IDS)[0].cpu()).device.type == "cuda"


def edit_weights(student: Path, copy: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """A copy of the student whose tensors have gone through `edit`."""
    folder: Path = shutil.copytree(student, copy)
    weights = load_file(folder / "model.safetensors")
    edit(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def edit_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
