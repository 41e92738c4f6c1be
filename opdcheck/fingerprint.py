"""Fingerprints of a model: hashes by which a budget knows its student and its teacher again.

Hashes are BLAKE3 over file contents, so a copy in another folder has the same fingerprint. Large files are hashed once
and remembered by path, size, modification and change time, and inode. Nothing here imports torch.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from blake3 import blake3
from filelock import FileLock

from opdcheck.config import HUB_ID, Model, ModelRef, resolve
from opdcheck.errors import ConfigError, EngineError, one_line
from opdcheck.files import cache_dir, write_atomically

PREFIX = "blake3:"
"""Before every hash in a file, so that another algorithm can be told apart later."""

CACHED_FROM_BYTES = 2**20
"""Smaller files are hashed anew: that is as fast as looking them up."""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tekken.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
)

# Written into tokenizer_config.json by whoever saved it; they say where from, not how it tokenizes.
_TOKENIZER_CONFIG_NOISE = ("chat_template", "is_local", "local_files_only", "name_or_path", "transformers_version")


class ModelFingerprint(Model):
    """What identifies a model for a budget. Hashes read `blake3:` and 64 hexadecimal digits."""

    name: str
    """How the file called it; recorded, not compared."""
    weights: str
    """Weights, their index, config.json and modelling code."""
    tokenizer: str
    """Vocabulary, merges, special tokens and settings, without the chat template."""
    chat_template: str | None = None
    """Text of the chat template; None where there is none."""


def shorten(value: str | None) -> str:
    """A hash as people read it, its first 12 digits; other values as they are; None as `none`."""
    if value is None:
        return "none"
    return value.removeprefix(PREFIX)[:12] if value.startswith(PREFIX) else value


def fingerprint_model(model: ModelRef, base: Path) -> ModelFingerprint:
    """Fingerprint of a model in a folder or on a hub.

    Args:
        model: the reference as a file gives it.
        base: folder that relative paths start from.

    Raises:
        ConfigError: no such folder or hub model, no safetensors weights, a missing shard, unreadable JSON.
        EngineError: the hub could not be reached.
    """
    folder = model_folder(model, base)
    return ModelFingerprint(
        name=f"{model.path}@{model.revision}" if model.revision else model.path,
        weights=_combine(_weight_files(folder)),
        tokenizer=_tokenizer_hash(folder),
        chat_template=_chat_template_hash(folder),
    )


def weights_hash(model: ModelRef, base: Path) -> str:
    """The weights' part of the fingerprint, for checkpoints that come without a tokenizer.

    Raises:
        ConfigError, EngineError: as `fingerprint_model`, but not for a missing tokenizer.
    """
    return _combine(_weight_files(model_folder(model, base)))


# --- where the files are -------------------------------------------------------------------------------------------


def model_folder(model: ModelRef, base: Path) -> Path:
    """The folder that holds the model's files: the one named, or the local snapshot of a hub model.

    What is in the hub cache is used as it is; only what is missing is downloaded.

    Raises:
        ConfigError: neither a folder nor a hub model (or not a local one while offline).
        EngineError: the hub could not be reached.
    """
    folder = resolve(model.path, base)
    if folder.is_dir():
        return folder
    if folder.is_file():
        raise ConfigError(f"{model.path} is a file; a model is a folder with config.json and safetensors weights")
    if not HUB_ID.fullmatch(model.path):
        raise ConfigError(f"no such model folder: {folder}", hint="Relative paths start from the file that names them.")
    return _snapshot(model.path, model.revision)


def _snapshot(repo: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    wanted: dict[str, Any] = {
        "revision": revision,
        "allow_patterns": ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.py"],
        "ignore_patterns": ["*/*", "consolidated*"],  # other formats of the same weights
    }
    try:
        local = Path(snapshot_download(repo, local_files_only=True, **wanted))
    except (LocalEntryNotFoundError, OSError, ValueError):
        return _download(repo, wanted)  # nothing of it is in the cache
    if _has_weights(local) and _has_tokenizer(local):
        return local
    try:
        return _download(repo, wanted)
    except (ConfigError, EngineError):
        if _has_weights(local):
            return local  # offline; it may be a checkpoint that comes without a tokenizer
        raise


def _has_weights(folder: Path) -> bool:
    """Whether config.json and all weight files are there; a download that broke off leaves some of the shards."""
    try:
        return all(file.is_file() for file in _weight_files(folder))
    except ConfigError:
        return False


def _has_tokenizer(folder: Path) -> bool:
    return (folder / "tokenizer_config.json").is_file() or any((folder / name).is_file() for name in TOKENIZER_FILES)


def _download(repo: str, wanted: dict[str, Any]) -> Path:
    from huggingface_hub import constants, errors, snapshot_download

    at = f"{repo} at revision {wanted['revision']}" if wanted["revision"] else repo
    if constants.HF_HUB_OFFLINE:
        raise ConfigError(
            f"no model folder {repo} here, and {at} is not in the local hub cache, or not all of it",
            hint="HF_HUB_OFFLINE is set: name a folder, or download the model first.",
        )
    try:
        return Path(snapshot_download(repo, **wanted))
    except errors.GatedRepoError as error:
        raise ConfigError(f"{at}: access to this hub model is restricted", hint="Log in: `hf auth login`.") from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.HFValidationError) as error:
        raise ConfigError(f"neither a folder nor a hub model: {at}") from error
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, OSError) as error:
        raise EngineError(
            f"{at}: no such folder here, and as a hub model it could not be downloaded: {one_line(error)}",
            hint="A folder? Check the path (it is relative to the file; `./` says that it is a folder). A hub model? "
            "Check the network.",
        ) from error


# --- what belongs to each hash -------------------------------------------------------------------------------------


def _weight_files(folder: Path) -> list[Path]:
    """config.json, modelling code and the weight files that Transformers would load, with their index."""
    config = folder / "config.json"
    if not config.is_file():
        raise ConfigError(f"{folder}: no config.json, so this is not a model folder")
    return [config, *sorted(folder.glob("*.py")), *_safetensors(folder)]


def _safetensors(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        return [index, *_shards(index)]
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise ConfigError(
            f"{folder}: no safetensors weights",
            hint="Pickled and GGUF weights are not read: load the model with Transformers and save_pretrained() it.",
        )
    return found


def _shards(index: Path) -> list[Path]:
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ConfigError(f"{index}: no weight_map")
    shards = [index.parent / name for name in sorted({str(name) for name in weight_map.values()})]
    for shard in shards:
        if not shard.is_file():
            raise ConfigError(f"{index}: names {shard.name}, which is not there", hint="Is the download complete?")
    return shards


def _tokenizer_hash(folder: Path) -> str:
    files = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    files += sorted(folder.glob("*.tiktoken"))
    settings = {k: v for k, v in _tokenizer_config(folder).items() if k not in _TOKENIZER_CONFIG_NOISE}
    if not files and not settings:
        raise ConfigError(f"{folder}: no tokenizer files")
    return _combine(files, {"tokenizer_config.json": json.dumps(settings, sort_keys=True)})


def _chat_template_hash(folder: Path) -> str | None:
    """Hash of the template's text, the same whether it stands in a file of its own or in tokenizer_config.json."""
    own_file = folder / "chat_template.jinja"
    if own_file.is_file():
        template: Any = _read_template(own_file)
    else:
        template = _tokenizer_config(folder).get("chat_template")
    if not template:
        return None
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    # surrogatepass: JSON can hold half a character; whether such a template works is not for a hash to say.
    return PREFIX + blake3(text.encode("utf-8", "surrogatepass")).hexdigest()


def _read_template(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        found = f"byte 0x{error.object[error.start]:02x} at offset {error.start}"
        raise ConfigError(f"{file}: expected UTF-8 text, found {found}") from None
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror or error}") from None


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    return _read_json(path) if path.is_file() else {}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a JSON object")
    return content


# --- hashing -------------------------------------------------------------------------------------------------------


def _combine(files: Sequence[Path], texts: Mapping[str, str] | None = None) -> str:
    """One hash over (file name, content hash) pairs in the order of the names."""
    pairs = list(zip([file.name for file in files], hash_files(files), strict=True))
    pairs += [(name, blake3(text.encode()).hexdigest()) for name, text in (texts or {}).items()]
    return PREFIX + blake3(json.dumps(sorted(pairs)).encode()).hexdigest()


def hash_files(files: Sequence[Path], *, store: Path | None = None) -> list[str]:
    """BLAKE3 of each file's content, in hexadecimal; large files from the store where they have not changed.

    Args:
        store: file that remembers hashes; default `fingerprints.json` in the cache folder.

    Raises:
        ConfigError: a file cannot be read, or changes while it is read.
    """
    store = store or cache_dir() / "fingerprints.json"
    known = _load_store(store)
    fresh: dict[str, list[Any]] = {}
    hashes = []
    for file in files:
        key, stamp = str(file.resolve()), _stamp(file)
        entry = known.get(key)
        if entry is not None and entry[:-1] == stamp:
            hashes.append(entry[-1])
            continue
        digest = _hash_file(file)
        if _stamp(file) != stamp:
            raise ConfigError(f"{file}: changed while it was read", hint="Is something still writing the model?")
        hashes.append(digest)
        if _worth_keeping(stamp):
            fresh[key] = [*stamp, digest]
    if fresh:
        _save_store(store, fresh)
    return hashes


def _hash_file(file: Path) -> str:
    hasher = blake3(max_threads=blake3.AUTO)
    try:
        hasher.update_mmap(file)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror or error}") from error
    return hasher.hexdigest()


def _stamp(file: Path) -> list[int]:
    """Size, times and inode. The change time is there because copying tools can restore the modification time."""
    try:
        status = file.stat()
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror or error}") from error
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _worth_keeping(stamp: list[int]) -> bool:
    size, modified, changed, _ = stamp
    # A file written a moment ago may be written again within the clock's resolution, with the same stamp.
    settled = max(modified, changed) < time.time_ns() - 1_000_000_000
    return size >= CACHED_FROM_BYTES and settled


def _load_store(store: Path) -> dict[str, list[Any]]:
    """The remembered hashes. Whatever is not as `_save_store` wrote it counts as absent."""
    try:
        content = json.loads(store.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict):
        return {}
    return {path: entry for path, entry in content.items() if _is_entry(entry)}


def _is_entry(entry: Any) -> bool:
    return (
        isinstance(entry, list)
        and len(entry) == 5
        and all(isinstance(number, int) for number in entry[:4])
        and isinstance(entry[4], str)
        and re.fullmatch("[0-9a-f]{64}", entry[4]) is not None
    )


def _save_store(store: Path, fresh: dict[str, list[Any]]) -> None:
    """Adds hashes and forgets files that are gone. A store that cannot be written only costs time."""
    try:
        store.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{store}.lock", timeout=10):
            entries = _load_store(store) | fresh
            kept = {path: entry for path, entry in entries.items() if os.path.exists(path)}
            write_atomically(store, json.dumps(kept, indent=0, sort_keys=True))
    except (OSError, TimeoutError):  # filelock's Timeout is a TimeoutError
        return
