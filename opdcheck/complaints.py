"""Pydantic's validation errors in the words of somebody who wrote the file: what was expected, what was found."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

Key = tuple[str | int, ...]

_WANTED = {
    "string_type": "text",
    "string_sub_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "set_type": "a list",
    "dict_type": "a mapping (`key: value` lines)",
    "model_type": "a mapping (`key: value` lines)",
    "model_attributes_type": "a mapping (`key: value` lines)",
    "finite_number": "a finite number",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "a number of at least {ge}",
    "less_than": "a number below {lt}",
    "less_than_equal": "a number of at most {le}",
    "too_short": "at least {min_length} entries",
    "too_long": "at most {max_length} entries",
    "string_too_short": "at least {min_length} characters",
    "string_too_long": "at most {max_length} characters",
    "string_pattern_mismatch": "text of the form {pattern}",
    "none_required": "nothing (null)",
}
_SHOWN = 60
_ALL_CHOICES = 24


@dataclass(frozen=True)
class Complaint:
    """One thing wrong with a file: at which key, and what."""

    key: Key
    message: str


@dataclass(frozen=True)
class _Failure:
    """One pydantic error with the union branches taken out of its path."""

    key: Key
    branch: tuple[Key, str] | None
    """Where a union stands, and the name of the alternative that this error is about."""
    error: ErrorDetails


def complaints(error: ValidationError, model: type[BaseModel], data: Any) -> list[Complaint]:
    """One complaint per mistake: the alternatives of a union are told together, not one by one."""
    failures = [_without_branches(detail, data) for detail in error.errors(include_url=False)]
    found: list[Complaint] = []
    seen: set[Key] = set()
    for failure in failures:
        if failure.branch is None:
            found.append(Complaint(failure.key, _message(failure, model)))
        elif failure.branch[0] not in seen:
            union = failure.branch[0]
            seen.add(union)
            rivals = [other for other in failures if other.branch is not None and other.branch[0] == union]
            found += _union_complaints(union, rivals, model, data)
    return found


def unknown_key_hint(key: Key, model: type[BaseModel]) -> str:
    """What to say of a key that `model` does not have: the nearest one, where it belongs, or all that there are."""
    name = str(key[-1])
    here = _models_at(model, key[:-1])
    valid = list(dict.fromkeys(field for one in here for field in one.model_fields))
    if near := difflib.get_close_matches(name, valid, n=1, cutoff=0.7):
        return f"unknown key; did you mean `{near[0]}`?"
    if elsewhere := [place for place in _places(model) if place[-1] == name]:
        return f"unknown key here; did you mean `{'.'.join(elsewhere[0])}`?"
    if near := difflib.get_close_matches(name, valid, n=1, cutoff=0.5):
        return f"unknown key; did you mean `{near[0]}`? Valid keys: {', '.join(valid)}"
    return f"unknown key; valid keys: {', '.join(valid)}"


def one_of(choices: Sequence[str], value: object) -> str:
    """`expected one of ..., found ...`, with the nearest choice first if there is one."""
    near = difflib.get_close_matches(str(value).lower(), [choice.lower() for choice in choices], n=1, cutoff=0.6)
    nearest = next((choice for choice in choices if near and choice.lower() == near[0]), None)
    meant = f" (did you mean `{nearest}`?)" if nearest else ""
    listed = ", ".join(f"`{choice}`" for choice in choices[:_ALL_CHOICES])
    return f"expected one of {listed}; found {describe(value)}{meant}"


def describe(value: object) -> str:
    """A value as a message shows it: with its kind, and cut when long."""
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return _cut(repr(value))
    if isinstance(value, str):
        return f"the text {_cut(repr(value))}"
    if isinstance(value, Mapping):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}" if value else "an empty list"
    return _cut(repr(value))


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _without_branches(error: ErrorDetails, data: Any) -> _Failure:
    """Follows an error's path through the data. What is no key there is the name of a union's alternative."""
    key: Key = ()
    branch = None
    last = len(error["loc"]) - 1
    for position, part in enumerate(error["loc"]):
        inside = _entry(data, part)
        if inside is not None:
            key, data = (*key, part), inside[0]
        elif position == last and error["type"] == "missing":
            key = (*key, part)
        elif part != "[key]":
            branch = branch or (key, str(part))
    return _Failure(key, branch, error)


def _entry(data: Any, part: str | int) -> tuple[Any] | None:
    if isinstance(data, Mapping) and part in data:
        return (data[part],)
    if isinstance(data, list) and isinstance(part, int) and part < len(data):
        return (data[part],)
    return None


def _union_complaints(union: Key, rivals: list[_Failure], model: type[BaseModel], data: Any) -> list[Complaint]:
    """Of a union's failed alternatives, those that were meant; all in one sentence where none stands out."""
    deeper = [rival for rival in rivals if rival.key != union]
    meant = deeper if len({rival.branch for rival in deeper}) == 1 else rivals
    if len({rival.branch for rival in meant}) == 1:
        return [Complaint(rival.key, _message(rival, model)) for rival in meant]
    wanted = dict.fromkeys(_wanted(rival.error) for rival in rivals if rival.key == union)
    value = rivals[0].error["input"] if rivals[0].key == union else _value_at(data, union)
    return [Complaint(union, f"expected {' or '.join(wanted) or 'another value'}, found {describe(value)}")]


def _value_at(data: Any, key: Key) -> Any:
    for part in key:
        data = data[part]
    return data


def _wanted(error: ErrorDetails) -> str:
    kind = error["type"]
    context = error.get("ctx", {})
    if kind == "literal_error":
        return f"one of {context['expected']}"
    if kind in _WANTED:
        return _WANTED[kind].format(**{name: _bound(value) for name, value in context.items()})
    return error["msg"][:1].lower() + error["msg"][1:]


def _bound(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _message(failure: _Failure, model: type[BaseModel]) -> str:
    error = failure.error
    kind, value = error["type"], error["input"]
    if kind == "missing":
        return f"required, but missing{_purpose(model, failure.key)}"
    if kind == "extra_forbidden":
        return unknown_key_hint(failure.key, model)
    if kind == "value_error":
        return error["msg"].removeprefix("Value error, ")
    if kind == "literal_error":
        return one_of(_choices(model, failure.key, error), value)
    if kind in _WANTED:
        return f"expected {_wanted(error)}, found {describe(value)}{_advice(kind, value)}"
    if kind == "json_invalid":
        return f"cannot be read: {error['msg']}"
    return f"{_wanted(error)}, found {describe(value)}"


def _choices(model: type[BaseModel], key: Key, error: ErrorDetails) -> list[str]:
    """The values a literal allows, from the model itself; from pydantic's prose where the model does not tell."""
    for owner in _models_at(model, key[:-1]):
        field = owner.model_fields.get(str(key[-1]))
        if field is not None and (choices := list(_literals(field.annotation))):
            return choices
    return error.get("ctx", {})["expected"].replace(" or ", ", ").replace("'", "").split(", ")


def _literals(annotation: Any) -> Iterator[str]:
    for argument in get_args(annotation):
        if isinstance(argument, str):
            yield argument
        else:
            yield from _literals(argument)


def _advice(kind: str, value: object) -> str:
    if kind == "string_type" and isinstance(value, int | float):
        return "; put it in quotes to make it text"
    if kind in ("int_type", "float_type") and isinstance(value, str) and _is_number(value):
        return "; take the quotes away"
    if kind == "bool_type" and isinstance(value, str | int) and str(value).lower() in ("yes", "on", "true", "1"):
        return "; write true"
    if kind == "bool_type" and isinstance(value, str | int) and str(value).lower() in ("no", "off", "false", "0"):
        return "; write false"
    return ""


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _purpose(model: type[BaseModel], key: Key) -> str:
    """The first line of a field's description."""
    for owner in _models_at(model, key[:-1]):
        field = owner.model_fields.get(str(key[-1]))
        if field is not None:
            nested = list(_models_in(field.annotation))
            text = field.description or (nested[0].__doc__ if nested else None)
            if text:
                return f" ({text.strip().splitlines()[0].rstrip(' .,')})"
    return ""


def _models_at(model: type[BaseModel], key: Key) -> list[type[BaseModel]]:
    """The models that may stand at a key: several where the field is a union."""
    here = [model]
    for part in key:
        if isinstance(part, int):
            continue  # a list's entries are of the models that its annotation names
        fields = [one.model_fields[part] for one in here if part in one.model_fields]
        # A mapping's keys are no fields: its values are of the models that its own annotation names.
        here = [found for field in fields for found in _models_in(field.annotation)] if fields else here
    return here


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    elif get_origin(annotation) in (Union, UnionType, Annotated, list, dict, tuple):
        for argument in get_args(annotation):
            yield from _models_in(argument)


def _places(model: type[BaseModel], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every field below `model`, the nearest first."""
    if len(above) > 4:
        return
    for name in model.model_fields:
        yield (*above, name)
    for name, field in model.model_fields.items():
        for nested in _models_in(field.annotation):
            yield from _places(nested, (*above, name))
