"""Prompts as token ids: tokenized once, here, so that both sides see the same ids and never the text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from opdcheck.complaints import describe
from opdcheck.config import ModelRef, Workload, resolve
from opdcheck.errors import ConfigError, one_line
from opdcheck.rollouts import Prompt

MAX_ROW_BYTES = 16 * 2**20
"""A longer line is no prompt; it would be read into memory whole."""


@dataclass(frozen=True)
class Row:
    """One row of a prompt file, not yet checked, and where it stands."""

    where: str
    """`FILE:LINE`, or `FILE: row N` for Parquet."""
    content: Any


def load_tokenizer(ref: ModelRef, base: Path) -> Any:
    """The tokenizer that belongs to a model.

    Raises:
        ConfigError: there is none, or it needs `trust_remote_code`.
    """
    from transformers import AutoTokenizer

    from opdcheck.models import quiet_transformers, source_folder

    source = source_folder(ref, base)
    try:
        with quiet_transformers():
            tokenizer = AutoTokenizer.from_pretrained(
                source, revision=ref.revision, trust_remote_code=ref.trust_remote_code
            )
    except (
        Exception
    ) as error:  # transformers raises OSError, ValueError, KeyError, ImportError, ... for what is missing
        if "trust_remote_code" in str(error):
            hint = "Set `trust_remote_code: true` if you trust its authors."
        else:
            hint = "Save the tokenizer beside the weights (tokenizer.json, tokenizer_config.json)."
        raise ConfigError(f"cannot load the tokenizer of {source}: {one_line(error)}", hint=hint) from error
    if len(tokenizer) == 0:
        raise ConfigError(
            f"cannot load the tokenizer of {source}: it has no tokens",
            hint="Save the tokenizer beside the weights (tokenizer.json, tokenizer_config.json).",
        )
    return tokenizer


def load_prompts(workload: Workload, base: Path, tokenizer: Any, max_model_len: int | None) -> list[Prompt]:
    """The workload's first `num_prompts` prompts as token ids, in file order.

    A row `{"prompt": text}` is tokenized as it is, with the special tokens the tokenizer adds by itself; a row
    `{"messages": [{"role": ..., "content": ...}]}` through the chat template, up to where the assistant begins. Other
    keys are ignored.

    Args:
        workload: names the file and how many rows.
        base: folder that relative paths start from.
        tokenizer: of the student (transformers).
        max_model_len: the model's context in tokens; None if it has no limit.

    Raises:
        ConfigError: at the first row that is wrong, as `FILE:LINE: ...`.
    """
    path = resolve(workload.prompts, base)
    prompts = []
    for index, row in enumerate(islice(prompt_rows(workload, base), workload.num_prompts)):
        token_ids = _token_ids(row, workload, tokenizer)
        _check_length(row, len(token_ids), workload.max_completion_length, max_model_len)
        prompts.append(Prompt(index, token_ids))
    if not prompts:
        raise ConfigError(f"{_shown(path)}: no prompts in this file")
    if workload.num_prompts is not None and len(prompts) < workload.num_prompts:
        wanted = f"workload.num_prompts ({workload.num_prompts})"
        raise ConfigError(f"{_shown(path)}: expected at least {wanted} rows, found {len(prompts)}")
    return prompts


def prompt_rows(workload: Workload, base: Path) -> Iterator[Row]:
    """All rows of the workload's file, one by one, as `jsonl_rows` or `parquet_rows` read them."""
    path = resolve(workload.prompts, base)
    return parquet_rows(path) if path.suffix.lower() == ".parquet" else jsonl_rows(path)


def jsonl_rows(path: Path) -> Iterator[Row]:
    """The rows of a JSON Lines file, one by one; blank lines are skipped.

    Raises:
        ConfigError: the file cannot be read, or a line is not JSON in UTF-8.
    """
    try:
        with path.open("rb") as file:
            number = 0
            while line := file.readline(MAX_ROW_BYTES + 1):
                number += 1
                where = f"{_shown(path)}:{number}"
                if len(line) > MAX_ROW_BYTES:
                    raise ConfigError(f"{where}: the line is longer than {MAX_ROW_BYTES:,} bytes")
                if line.strip():
                    yield Row(where, _parse_line(where, line))
    except OSError as error:
        raise ConfigError(f"{_shown(path)}: cannot be read: {error.strerror or error}") from None


def parquet_rows(path: Path, keys: tuple[str, ...] = ("prompt", "messages")) -> Iterator[Row]:
    """The rows of a Parquet file, one by one; only the columns in `keys` are read.

    Raises:
        ConfigError: the file cannot be read, is no Parquet, or has none of the columns.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            columns = [name for name in keys if name in names]
            if not columns:
                listed = ", ".join(map(repr, names[:20])) or "none"
                wanted = " or ".join(f"`{key}`" for key in keys)
                raise ConfigError(f"{_shown(path)}: expected a column {wanted}, found: {listed}")
            number = 0
            for batch in file.iter_batches(batch_size=256, columns=columns):
                for at in range(batch.num_rows):
                    number += 1
                    where = f"{_shown(path)}: row {number}"
                    yield Row(where, _parquet_row(where, batch.slice(at, 1)))
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{_shown(path)}: cannot be read as Parquet: {one_line(error)}") from None


def _parquet_row(where: str, row: Any) -> Any:
    """A batch of one row as an object. Parquet does not check that its strings are UTF-8; Python does."""
    try:
        return row.to_pylist()[0]
    except UnicodeDecodeError as error:
        found = f"byte 0x{error.object[error.start]:02x}"
        raise ConfigError(f"{where}: expected UTF-8 text, found {found}") from None


def _parse_line(where: str, line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where}: expected UTF-8 text, found byte 0x{line[error.start]:02x}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: expected one JSON object per line: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; thousands of nested brackets
        raise ConfigError(f"{where}: expected one JSON object per line: {one_line(error)}") from None


def _token_ids(row: Row, workload: Workload, tokenizer: Any) -> list[int]:
    if not isinstance(row.content, dict):
        raise ConfigError(f"{row.where}: expected an object with `prompt` or `messages`, found {describe(row.content)}")
    prompt, messages = row.content.get("prompt"), row.content.get("messages")
    if (prompt is None) == (messages is None):
        found = "neither" if prompt is None else "both"
        raise ConfigError(f"{row.where}: expected either `prompt` (text) or `messages` (chat), found {found}")
    if prompt is not None:
        token_ids = _tokenize_text(row, prompt, tokenizer)
    else:
        token_ids = _tokenize_chat(row, _checked_messages(row, messages), workload.chat_template_kwargs, tokenizer)
    if not token_ids:
        raise ConfigError(f"{row.where}: the prompt has no tokens; expected at least one")
    return token_ids


def _tokenize_text(row: Row, prompt: object, tokenizer: Any) -> list[int]:
    if isinstance(prompt, list):
        raise ConfigError(f"{row.where}: expected text in `prompt`; a list of chat messages belongs in `messages`")
    text = _checked_text(row, "prompt", prompt)
    # verbose: its warning about long inputs repeats what _check_length says better
    return [int(token) for token in tokenizer(text, truncation=False, verbose=False)["input_ids"]]


def _tokenize_chat(row: Row, messages: list[dict[str, Any]], kwargs: dict[str, Any], tokenizer: Any) -> list[int]:
    if not getattr(tokenizer, "chat_template", True):
        raise ConfigError(
            f"{row.where}: `messages` needs a chat template, and the student's tokenizer has none",
            hint="Give `prompt` (text) instead, or save the tokenizer with its chat template.",
        )
    try:
        token_ids = tokenizer.apply_chat_template(
            messages, **kwargs, add_generation_prompt=True, tokenize=True, return_dict=False, truncation=False
        )
    except Exception as error:  # a template is a program: it may raise anything
        raise ConfigError(f"{row.where}: the chat template does not take these messages: {one_line(error)}") from error
    return [int(token) for token in token_ids]


def _checked_messages(row: Row, messages: object) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise ConfigError(f"{row.where}: messages: expected a list of chat messages, found {describe(messages)}")
    for number, message in enumerate(messages):
        key = f"messages[{number}]"
        if not isinstance(message, dict):
            raise ConfigError(f"{row.where}: {key}: expected `role` and `content`, found {describe(message)}")
        _checked_text(row, f"{key}.role", message.get("role"))
        _checked_text(row, f"{key}.content", message.get("content"))
    if messages[-1]["role"] == "assistant":
        raise ConfigError(
            f"{row.where}: messages[{len(messages) - 1}]: expected a prompt, found the assistant's answer at its end",
            hint="Leave the last answer out: the student writes its own.",
        )
    # Parquet gives every message every key of its schema; absent ones are null and must not reach the template.
    return [{name: value for name, value in message.items() if value is not None} for message in messages]


def _checked_text(row: Row, key: str, value: object) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{row.where}: {key}: expected text, found {describe(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{row.where}: {key}: expected text, found half a character (a lone surrogate)") from None
    return value


def _check_length(row: Row, prompt_tokens: int, completion_tokens: int, max_model_len: int | None) -> None:
    if max_model_len is not None and prompt_tokens + completion_tokens > max_model_len:
        raise ConfigError(
            f"{row.where}: {prompt_tokens:,} prompt tokens and max_completion_length {completion_tokens:,} make "
            f"{prompt_tokens + completion_tokens:,}, more than the model's context of {max_model_len:,}"
        )


def _shown(path: Path) -> str:
    """Relative to the current folder where that is shorter."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
