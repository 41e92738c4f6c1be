"""`OPDCHECK_*` variables: wrong values are reported under the variable's name, and unknown names are warned of."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args, get_type_hints

PREFIX = "OPDCHECK_"
WITHOUT_OPTION = ("OPDCHECK_CACHE", "OPDCHECK_DEBUG")
"""Variables that no command has an option for."""

_WANTED = {float: "a number", int: "a whole number", bool: "true or false"}


def variable_of(context: Any, parameter: Any) -> str | None:
    """The variable that gave a command's parameter its value; None where it was a flag, or nothing.

    Args:
        context: Typer's, of the command.
        parameter: Typer's; its class is not public.
    """
    names: str | list[str] = getattr(parameter, "envvar", None) or []
    source = context.get_parameter_source(parameter.name) if names else None
    if source is None or source.name != "ENVIRONMENT":
        return None
    return names if isinstance(names, str) else ", ".join(names)


def flags_of(context: Any, keys: Mapping[str, str]) -> dict[str, str]:
    """What to call each key of a candidate in messages, for those that a variable has set.

    Args:
        context: Typer's, of the command.
        keys: parameter name -> dotted key that it overrides.
    """
    found = {}
    for parameter in context.command.params:
        variable = variable_of(context, parameter) if parameter.name in keys else None
        if variable is not None:
            found[keys[parameter.name]] = variable
    return found


def complaint(context: Any, parameter: Any, value: str) -> str | None:
    """What is wrong with a variable's value, in our own words: `expected a number, found the text 'small'`.

    None where only Typer knows.

    Args:
        context: Typer's, of the command.
        parameter: Typer's.
        value: of the variable.
    """
    from opdcheck.complaints import describe

    hint = get_type_hints(context.command.callback).get(parameter.name)
    wanted = next((_WANTED[kind] for kind in (hint, *get_args(hint)) if kind in _WANTED), None)
    return None if wanted is None else f"expected {wanted}, found {describe(value)}"


def warnings(root: Any, names: Iterable[str]) -> Iterator[str]:
    """A sentence for each variable that looks like opdcheck's and is none: a typo would go unnoticed.

    Args:
        root: Typer's command that has all the others.
        names: of all variables that are set.
    """
    known = sorted({*WITHOUT_OPTION, *_of_options(root)})
    ends = [name.removeprefix(PREFIX) for name in known]
    for name in sorted(names):
        if name.startswith(PREFIX) and name not in known:
            near = difflib.get_close_matches(name.removeprefix(PREFIX), ends, n=1, cutoff=0.6)
            meant = f"did you mean {PREFIX}{near[0]}?" if near else f"there are: {', '.join(known)}"
            yield f"warning: {name} is set, and opdcheck knows no such variable; {meant}"


def _of_options(command: Any) -> Iterator[str]:
    for parameter in command.params:
        names: str | list[str] = getattr(parameter, "envvar", None) or []
        yield from [names] if isinstance(names, str) else names
    for member in getattr(command, "commands", {}).values():
        yield from _of_options(member)
