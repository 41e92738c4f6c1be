"""`OPDCHECK_*` variables: a wrong value is reported under the name that the user wrote it under."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


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
