"""YAML files as pydantic models, with every error pointing at `FILE:LINE: key.path:`.

A small, safe part of YAML 1.2: no tags, no anchors or aliases (so no file can grow when read), one document, a mapping
at the top, at most 1 MiB. Values are strict: `"8"` is not a number, `1` is not true.
"""

from __future__ import annotations

import dataclasses
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.constructor import DuplicateKeyError, RoundTripConstructor
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent, NodeEvent
from ruamel.yaml.nodes import ScalarNode
from ruamel.yaml.reader import ReaderError
from ruamel.yaml.representer import RoundTripRepresenter

from opdcheck.complaints import Key, complaints
from opdcheck.errors import ConfigError, one_line
from opdcheck.kinds import Kind, kind_of

MAX_BYTES = 2**20
MAX_DEPTH = 40

T = TypeVar("T", bound=BaseModel)

_INDEX = re.compile(r"\[(\d+)\]")
_DOTTED_KEY = re.compile(r"[a-z]\w*(\.\w+|\[\d+\])*")


@dataclass(frozen=True)
class Located(Generic[T]):
    """A loaded file that remembers where each key stands, for errors that are found later than at loading."""

    value: T
    path: Path
    """As the user gave it."""
    tree: Any = field(repr=False, default=None)
    """ruamel's tree, whose `.lc` knows lines and columns."""
    flags: Mapping[str, str] = field(default_factory=dict)
    """Key -> name of the flag or variable that set it instead of the file."""

    def locate(self, key: str | Key) -> str:
        """`FILE:LINE` of a key such as `rollout.quantization.targets[1]`, or of its nearest parent in the file."""
        return f"{self.path}:{line_of(self.tree, as_key(key))}"

    def error(self, key: str | Key, message: str, *, hint: str | None = None) -> ConfigError:
        """A `ConfigError` that points at `key`, or at the flag that set it. To be raised by the caller."""
        return ConfigError(self.complain(key, message), hint=hint)

    def complain(self, key: str | Key, message: str) -> str:
        """The message of `error`, for a check that collects several."""
        parts = as_key(key)
        for flagged, flag in self.flags.items():
            prefix = as_key(flagged)
            if parts[: len(prefix)] == prefix:
                return f"{flag}: {message}"
        where = self.locate(parts)
        return f"{where}: {show_key(parts)}: {message}" if parts else f"{where}: {message}"

    def point(self, error: ConfigError) -> ConfigError:
        """An error found while models load, with file and line if its message begins with a key of this file.

        Such as `rollout.staleness.checkpoint: ...` or `rollout: ...`. Any other error is given back as it is.
        """
        key, colon, message = error.message.partition(": ")
        if not colon or not _DOTTED_KEY.fullmatch(key) or not _has_key(self.value, as_key(key)):
            return error
        return self.error(key, message, hint=error.hint)

    @contextmanager
    def pointing(self) -> Iterator[None]:
        """What is raised inside as a `ConfigError` leaves with file and line where `point` knows them."""
        try:
            yield
        except ConfigError as error:
            pointed = self.point(error)
            if pointed is error:
                raise
            raise pointed from error

    def errors(self, problems: Iterable[tuple[str | Key, str]]) -> ConfigError:
        """One `ConfigError` for several `(key, message)`: a line each, in file order, the flags' first."""
        ordered = sorted(problems, key=lambda problem: line_of(self.tree, as_key(problem[0])))
        lines = dict.fromkeys(self.complain(key, message) for key, message in ordered)
        return ConfigError("\n".join(sorted(lines, key=lambda line: not line.startswith(tuple(self.flags.values())))))

    def replace(self, value: T, flags: Mapping[str, str] | None = None) -> Located[T]:
        """The same file with another value; `flags` names what changed which key."""
        return dataclasses.replace(self, value=value, flags={**self.flags, **(flags or {})})


def load(path: Path, model: type[T]) -> T:
    """Reads and validates a YAML file.

    Raises:
        ConfigError: the file cannot be read, is no YAML, or does not fit `model`; one line per error, in file order.
    """
    return load_located(path, model).value


def load_located(path: Path, model: type[T], expected: Kind | None = None) -> Located[T]:
    """As `load`, and keeps the positions of all keys.

    Args:
        expected: the kind of file that this should be; another one is then refused as a whole, not key by key.

    Raises:
        ConfigError: as `load`.
    """
    text = read_text(path)
    tree = _parse(path, text)
    plain = _to_plain(path, tree, ())
    found = kind_of(plain)
    if expected is not None and found is not None and found is not expected:
        wanted = f"expected a {expected.name} file ({expected.shown})"
        raise ConfigError(f"{path}: this is a {found.name} file; {wanted}", hint=found.purpose)
    # Through JSON, because pydantic's strict mode then means what a file can say: a list for a tuple, text for a date.
    try:
        value = model.model_validate_json(json.dumps(plain), strict=True)
    except ValidationError as error:
        wrong = [(complaint.key, complaint.message) for complaint in complaints(error, model, plain)]
        raise Located(model.model_construct(), path, tree).errors(wrong) from None
    return Located(value, path, tree)


def dump(model: BaseModel, *, skip_defaults: bool = False) -> str:
    """A model as YAML that `load` reads back: block style, fields in their order, floats to the last digit.

    Args:
        model: what to write.
        skip_defaults: leave out values that equal their default.
    """
    yaml = YAML(typ="rt", pure=True)
    yaml.Representer = _Representer
    yaml.default_flow_style = False
    yaml.allow_unicode = True
    yaml.width = 2**16  # never fold a long text: line breaks inside a value make diffs hard to read
    stream = io.StringIO()
    yaml.dump(model.model_dump(mode="json", exclude_defaults=skip_defaults), stream)
    return stream.getvalue()


def read_text(path: Path, *, max_bytes: int = MAX_BYTES) -> str:
    """The text of a UTF-8 file.

    Raises:
        ConfigError: no such file, a folder, no permission, too large, or not UTF-8.
    """
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise ConfigError(f"{path}: expected a YAML file, found a device or a pipe")
        with path.open("rb") as file:
            data = file.read(max_bytes + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: expected a YAML file, found a folder") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL character in the name
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{path}: cannot be read: {reason}") from None
    if len(data) > max_bytes:
        raise ConfigError(f"{path}: larger than {max_bytes:,} bytes, so it is no file for opdcheck")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line}: expected UTF-8 text, found byte 0x{data[error.start]:02x}") from None


def _has_key(value: Any, key: Key) -> bool:
    """Whether `key` can be one of a model's; below a free-form mapping, or where nothing is set, any name can."""
    for part in key:
        if not isinstance(value, BaseModel):
            return True
        if part not in type(value).model_fields:
            return False
        value = getattr(value, str(part))
    return True


def as_key(key: str | Key) -> Key:
    """`rollout.quantization.targets[1]` as `("rollout", "quantization", "targets", 1)`."""
    if not isinstance(key, str):
        return tuple(key)
    parts: list[str | int] = []
    for part in key.split(".") if key else []:
        name = _INDEX.sub("", part)
        parts += [name] if name else []
        parts += [int(index) for index in _INDEX.findall(part)]
    return tuple(parts)


def show_key(key: Key) -> str:
    """The reverse of `as_key`."""
    shown = ""
    for part in key:
        shown += f"[{part}]" if isinstance(part, int) else f".{part}" if shown else str(part)
    return shown


def line_of(tree: Any, key: Key) -> int:
    """Line, from 1, of a key in ruamel's tree; of the nearest parent that exists if the key does not."""
    line = 1
    for part in key:
        child = _child(tree, part)
        if child is None:
            return line
        line, tree = child
    return line


def _child(tree: Any, part: str | int) -> tuple[int, Any] | None:
    """Line and value of one entry of a mapping or list."""
    if isinstance(tree, Mapping):
        for key in (part, str(part), *([int(part)] if str(part).isdecimal() else [])):
            if key in tree:
                return tree.lc.key(key)[0] + 1, tree[key]  # type: ignore[attr-defined]
    if isinstance(tree, list) and str(part).isdecimal() and int(part) < len(tree):
        return tree.lc.item(int(part))[0] + 1, tree[int(part)]  # type: ignore[attr-defined]
    return None


class _Constructor(RoundTripConstructor):
    """Dates stay text: whoever wants a date validates it, and `revision: 2026-01-31` is what it looks like."""


def _construct_date_as_text(_: RoundTripConstructor, node: ScalarNode) -> str:
    return str(node.value)


_Constructor.add_constructor("tag:yaml.org,2002:timestamp", _construct_date_as_text)


class _Representer(RoundTripRepresenter):
    """Floats by `repr`, which loses no digit."""


def _represent_float(representer: RoundTripRepresenter, value: float) -> ScalarNode:
    if value != value or value in (float("inf"), float("-inf")):
        text = {"nan": ".nan", "inf": ".inf", "-inf": "-.inf"}[repr(value)]
    else:
        text = repr(value)
        if "." not in text:  # 1e-05: a YAML 1.1 reader takes it for text unless there is a point
            text = text.replace("e", ".0e")
    return representer.represent_scalar("tag:yaml.org,2002:float", text)


def _represent_none(representer: RoundTripRepresenter, _: None) -> ScalarNode:
    return representer.represent_scalar("tag:yaml.org,2002:null", "null")  # ruamel's default is an empty value


_Representer.add_representer(float, _represent_float)
_Representer.add_representer(type(None), _represent_none)


def _parse(path: Path, text: str) -> Any:
    """ruamel's tree of one mapping without tags and aliases."""
    try:
        _scan(path, text)
        yaml = YAML(typ="rt", pure=True)
        yaml.Constructor = _Constructor
        tree = yaml.load(text)
    except ConfigError:
        raise
    except DuplicateKeyError as error:
        raise _duplicate_key(path, error) from None
    except MarkedYAMLError as error:
        raise ConfigError(f"{path}:{_mark_line(error)}: not valid YAML: {_describe(error)}") from None
    except ReaderError as error:
        line = text.count("\n", 0, int(error.position)) + 1
        raise ConfigError(f"{path}:{line}: expected text, found control character {_code_point(error)}") from None
    except (YAMLError, ValueError, OverflowError, RecursionError) as error:
        # ValueError: among others a whole number of more digits than Python converts.
        raise ConfigError(f"{path}: not valid YAML: {_unreadable(error)}") from None
    if tree is None:
        raise ConfigError(f"{path}:1: the file is empty; expected a mapping (`key: value` lines)")
    if not isinstance(tree, Mapping):
        found = "a list" if isinstance(tree, list) else "a single value"
        raise ConfigError(f"{path}:1: expected a mapping (`key: value` lines), found {found}")
    return tree


def _scan(path: Path, text: str) -> None:
    """Refuses what could make reading expensive or surprising, before anything is built."""
    depth = 0
    for event in YAML(typ="rt", pure=True).parse(io.StringIO(text)):
        line = event.start_mark.line + 1
        if isinstance(event, AliasEvent):
            raise ConfigError(f"{path}:{line}: aliases (`*{event.anchor}`) are not supported; write the value out")
        if isinstance(event, NodeEvent) and event.anchor is not None:
            raise ConfigError(f"{path}:{line}: anchors (`&{event.anchor}`) are not supported; write the value out")
        if getattr(event, "tag", None) is not None:
            raise ConfigError(f"{path}:{line}: tags (`{_show_tag(event.tag)}`) are not supported; write a plain value")
        depth += isinstance(event, CollectionStartEvent)
        depth -= isinstance(event, CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ConfigError(f"{path}:{line}: nested more than {MAX_DEPTH} levels deep")


def _show_tag(tag: object) -> str:
    return str(tag).replace("tag:yaml.org,2002:", "!!")


def _duplicate_key(path: Path, error: DuplicateKeyError) -> ConfigError:
    key = re.search(r'found duplicate key "(.*?)" with value', error.problem or "", re.DOTALL)
    name = f"{key[1]}: " if key else ""
    return ConfigError(f"{path}:{_mark_line(error)}: {name}the key is given twice in this mapping")


def _mark_line(error: MarkedYAMLError) -> int:
    mark = error.problem_mark or error.context_mark
    return 1 if mark is None else int(mark.line) + 1


def _describe(error: MarkedYAMLError) -> str:
    """A scanner's complaint, with advice for the three that people meet."""
    problem = error.problem or error.context or "unreadable"
    if "'\\t'" in problem:
        return "found a tab; indent with spaces"
    if "mapping values are not allowed here" in f"{problem}{error.context}":
        return "a second `:` in this place; put the value in quotes, or check the indentation"
    if "another document" in problem:
        return "found a second document (`---`); expected one"
    if problem.startswith("found character"):
        return f"{problem}; put the value in quotes"
    return f"{error.context}, {problem}" if error.context and error.context != problem else problem


def _code_point(error: ReaderError) -> str:
    character = error.character
    return f"U+{character if isinstance(character, int) else ord(character):04X}"


def _unreadable(error: BaseException) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return one_line(error).partition(": value has")[0]


def _to_plain(path: Path, tree: Any, key: Key) -> Any:
    """ruamel's tree as plain dict, list, str, int, float, bool and None."""
    if isinstance(tree, Mapping):
        return {_text_key(path, tree, name, key): _to_plain(path, value, (*key, name)) for name, value in tree.items()}
    if isinstance(tree, list):
        return [_to_plain(path, value, (*key, index)) for index, value in enumerate(tree)]
    if isinstance(tree, str):
        _check_characters(path, tree, key)
    for kind in (bool, int, float, str):
        if isinstance(tree, kind):
            return kind(tree)
    return None


def _check_characters(path: Path, text: str, key: Key) -> None:
    """An escape such as `"\\ud800"` makes text that no file can hold."""
    if any(0xD800 <= ord(character) <= 0xDFFF for character in text):
        raise ConfigError(f"{path}: {show_key(key)}: expected text, found half a character (a lone surrogate)")


def _text_key(path: Path, tree: Any, name: Any, parent: Key) -> str:
    if isinstance(name, str):
        _check_characters(path, name, parent)
        return str(name)
    if isinstance(name, int) and not isinstance(name, bool) and str(int(name)) not in tree:
        return str(int(name))
    line = tree.lc.key(name)[0] + 1
    where = f"{show_key(parent)}: " if parent else ""
    raise ConfigError(f"{path}:{line}: {where}keys must be text, found {name!r}; put it in quotes")
