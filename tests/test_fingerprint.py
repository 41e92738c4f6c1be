"""Fingerprints: the same content is the same, any other content is not, and the cache never lies."""

import json
import os
import shutil
import time

import pytest

from opdcheck import fingerprint
from opdcheck.config import ModelRef
from opdcheck.errors import ConfigError, EngineError
from opdcheck.fingerprint import fingerprint_model, hash_files, shorten, weights_hash

OLD = time.time() - 3600


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OPDCHECK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def model(tmp_path):
    """A model folder of made-up bytes: hashes do not care whether a tensor is inside."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(b"w" * 2**20)
    (folder / "tokenizer.json").write_text('{"model": {}}')
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": "{{ messages }}"}))
    return folder


def of(folder):
    return fingerprint_model(ModelRef(path=folder.name), folder.parent)


def differing(before, after):
    return {name for name in ("weights", "tokenizer", "chat_template") if getattr(before, name) != getattr(after, name)}


def test_a_copy_elsewhere_is_the_same_model(model, tmp_path):
    shutil.copytree(model, tmp_path / "copy")
    assert differing(of(model), of(tmp_path / "copy")) == set()


@pytest.mark.parametrize(
    ("name", "content", "changes"),
    [
        ("config.json", '{"model_type": "qwen3"}', {"weights"}),
        ("model.safetensors", "x", {"weights"}),
        ("modeling_own.py", "pass", {"weights"}),
        ("tokenizer.json", "{}", {"tokenizer"}),
        ("added_tokens.json", "{}", {"tokenizer"}),
        ("tokenizer_config.json", '{"eos_token": "<e>", "chat_template": "{{ messages }}"}', {"tokenizer"}),
        ("tokenizer_config.json", '{"eos_token": "</s>", "chat_template": "{{ other }}"}', {"chat_template"}),
        ("tokenizer_config.json", '{"eos_token": "</s>"}', {"chat_template"}),
        ("chat_template.jinja", "{{ messages }}", set()),
        ("chat_template.jinja", "{{ other }}", {"chat_template"}),
        ("tokenizer_config.json", '{"eos_token": "</s>", "chat_template": "\\ud800"}', {"chat_template"}),
        ("consolidated.safetensors", "not what Transformers loads", set()),
        ("README.md", "words", set()),
    ],
)
def test_what_belongs_to_which_hash(model, name, content, changes):
    before = of(model)
    (model / name).write_text(content)
    assert differing(before, of(model)) == changes


def test_order_of_keys_and_place_of_saving_do_not_matter(model):
    before = of(model)
    settings = {"chat_template": "{{ messages }}", "is_local": True, "name_or_path": "elsewhere", "eos_token": "</s>"}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    assert of(model) == before


def test_shards(model):
    (model / "model.safetensors").unlink()
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    (model / "model-1.safetensors").write_text("one")
    with pytest.raises(ConfigError, match=r"names model-2\.safetensors, which is not there"):
        of(model)
    (model / "model-2.safetensors").write_text("two")
    before = of(model)
    (model / "model-1.safetensors").write_text("two")
    (model / "model-2.safetensors").write_text("one")
    assert differing(before, of(model)) == {"weights"}, "swapped shards are another model"


def test_no_template_is_none(model):
    (model / "tokenizer_config.json").write_text("{}")
    assert of(model).chat_template is None


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        (["config.json"], "no config.json"),
        (["model.safetensors"], "no safetensors weights"),
        (["tokenizer.json", "tokenizer_config.json"], "no tokenizer files"),
    ],
)
def test_incomplete_folder(model, missing, message):
    for name in missing:
        (model / name).unlink()
    with pytest.raises(ConfigError, match=message):
        of(model)


def test_weights_of_a_checkpoint_without_tokenizer(model):
    whole = of(model)
    (model / "tokenizer.json").unlink()
    (model / "tokenizer_config.json").unlink()
    assert weights_hash(ModelRef(path=str(model)), model) == whole.weights


def test_broken_json(model):
    (model / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: not readable as JSON"):
        of(model)


def test_a_template_that_is_not_utf_8_is_named(model):
    (model / "chat_template.jinja").write_bytes(b"caf\xe9 {{ messages }}")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja: expected UTF-8 text, found byte 0xe9 at offset 3"):
        of(model)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("./nothing/here", "no such model folder"),
        ("model/config.json", "is a file; a model is a folder"),
        ("someone/unknown", "not in the local hub cache"),
    ],
)
def test_not_a_model(model, path, message, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=message):
        fingerprint_model(ModelRef(path=path), model.parent)


def test_hub_snapshot_is_used_without_a_download(model, monkeypatch):
    asked = []

    def snapshot_download(repo, **kwargs):
        asked.append((repo, kwargs["revision"], kwargs.get("local_files_only")))
        return str(model)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    found = fingerprint_model(ModelRef(path="someone/model", revision="v1"), model.parent)
    assert found.name == "someone/model@v1"
    assert differing(found, of(model)) == set()
    assert asked == [("someone/model", "v1", True)]


class TestIncompleteHubSnapshot:
    """A download that broke off: the hub is asked for the rest, and is not asked once all is there."""

    @pytest.fixture
    def hub(self, model, monkeypatch):
        """A hub whose snapshot is `model`; a download puts the files in `rest` there, or fails if there are none."""
        rest, asked = {}, []

        def snapshot_download(_, **kwargs):
            asked.append(kwargs.get("local_files_only", False))
            if not asked[-1] and not rest:
                raise OSError("no network")
            for name, content in rest.items() if not asked[-1] else ():
                (model / name).write_bytes(content)
            return str(model)

        monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        return rest, asked

    def shard(self, model):
        """Makes a model of two shards, and takes the second away."""
        (model / "model.safetensors").rename(model / "model-1.safetensors")
        index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
        (model / "model.safetensors.index.json").write_text(json.dumps(index))

    def test_a_missing_shard_is_downloaded(self, model, hub):
        rest, asked = hub
        self.shard(model)
        rest["model-2.safetensors"] = b"x"
        assert weights_hash(ModelRef(path="someone/model"), model.parent) == of(model).weights
        assert asked == [True, False]
        weights_hash(ModelRef(path="someone/model"), model.parent)
        assert asked == [True, False, True]

    def test_a_missing_tokenizer_is_downloaded(self, model, hub):
        rest, _ = hub
        for name in ("tokenizer.json", "tokenizer_config.json"):
            rest[name] = (model / name).read_bytes()
            (model / name).unlink()
        assert fingerprint_model(ModelRef(path="someone/model"), model.parent).tokenizer == of(model).tokenizer

    def test_without_network_weights_without_a_tokenizer_are_used(self, model, hub):
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (model / name).unlink()
        assert weights_hash(ModelRef(path="someone/model"), model.parent)
        assert hub[1] == [True, False]

    def test_without_network_a_missing_shard_is_an_error(self, model, hub):  # noqa: ARG002
        self.shard(model)
        with pytest.raises(EngineError, match="could not be downloaded: no network"):
            weights_hash(ModelRef(path="someone/model"), model.parent)


class TestCache:
    @pytest.fixture
    def large(self, tmp_path):
        file = tmp_path / "large.safetensors"
        file.write_bytes(b"a" * 2**20)
        os.utime(file, (OLD, OLD))
        return file

    @pytest.fixture
    def reads(self, monkeypatch):
        """Names of the files that were really read; files count as written long ago."""
        names = []
        hash_file = fingerprint._hash_file
        monkeypatch.setattr(fingerprint, "_hash_file", lambda file: names.append(file.name) or hash_file(file))
        monkeypatch.setattr(fingerprint, "_worth_keeping", lambda stamp: stamp[0] >= fingerprint.CACHED_FROM_BYTES)
        return names

    def test_second_time_is_not_read(self, large, reads):
        assert hash_files([large]) == hash_files([large])
        assert reads == ["large.safetensors"]

    def test_change_with_restored_times_is_seen(self, large, reads):
        first = hash_files([large])
        large.write_bytes(b"b" * 2**20)
        os.utime(large, (OLD, OLD))
        assert hash_files([large]) != first
        assert len(reads) == 2

    @pytest.mark.parametrize("content", ["", "{", "[]", '{"x": 1}', "\x00", '{"%s": [1, 2, 3, 4, "short"]}'])
    def test_corrupt_store_is_ignored_and_rewritten(self, large, reads, cache, content):
        first = hash_files([large])
        store = cache / "fingerprints.json"
        store.write_text(content.replace("%s", str(large)))
        assert hash_files([large]) == first
        assert hash_files([large]) == first
        assert len(reads) == 2
        assert list(json.loads(store.read_text())) == [str(large)]

    @pytest.mark.usefixtures("reads")
    def test_forgets_files_that_are_gone(self, large, cache, tmp_path):
        hash_files([large])
        other = tmp_path / "other.safetensors"
        large.rename(other)
        hash_files([other])
        assert list(json.loads((cache / "fingerprints.json").read_text())) == [str(other)]

    def test_fresh_files_are_not_remembered(self, tmp_path, cache):
        file = tmp_path / "just_written.safetensors"
        file.write_bytes(b"a" * 2**20)
        hash_files([file])
        assert not (cache / "fingerprints.json").exists()

    def test_unwritable_store_costs_only_time(self, large, reads, tmp_path):
        blocked = tmp_path / "file"
        blocked.write_text("")
        assert hash_files([large], store=blocked / "fingerprints.json") == hash_files([large])
        assert len(reads) == 2

    def test_change_while_reading(self, large, monkeypatch):
        monkeypatch.setattr(fingerprint, "_hash_file", lambda file: file.write_bytes(b"longer" * 2**18) and "0")
        with pytest.raises(ConfigError, match="changed while it was read"):
            hash_files([large])


def test_unreadable_file(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        hash_files([tmp_path / "nothing"])


def test_shorten():
    assert shorten("blake3:" + "ab" * 32) == "abababababab"
    assert shorten("2.13.0") == "2.13.0"
    assert shorten(None) == "none"


def test_real_model(tiny_student):
    first = fingerprint_model(ModelRef(path=str(tiny_student)), tiny_student)
    assert first.chat_template is not None
    assert first.weights.startswith("blake3:")
