"""What stands in the place of a report where a command ended without one.

So the files of an earlier run are never taken for the result of this one, and a CI job's summary says what went wrong.
"""

from __future__ import annotations

from typing import Literal

from opdcheck.config import Model
from opdcheck.report.markdown import code, escape
from opdcheck.report.record import standard_json


class Failure(Model):
    """A command that reached no verdict, and why."""

    schema_version: Literal[1] = 1
    opdcheck_version: str
    created: str
    """ISO 8601 date and time."""
    command: str = "admit"
    candidate_file: str
    verdict: None = None
    exit_code: int
    """What the process ends with."""
    error: str
    """The message on the screen; several lines where several things are wrong."""
    observed: bool = False
    """Whether `--observe` has turned a missing verdict into exit code 0."""


def failure_to_json(failure: Failure) -> str:
    """The record as JSON; `verdict` is null, as it never is in a report."""
    return standard_json(failure)


def failure_to_markdown(failure: Failure) -> str:
    """The record for a CI job's summary."""
    lines = [
        "## opdcheck: NO VERDICT, so not admitted",
        "",
        f"Candidate {code(failure.candidate_file)}, exit code {failure.exit_code}",
        "",
        *(f"> {escape(line)}  " for line in failure.error.splitlines()),
        "",
    ]
    if failure.observed:
        lines += ["**`--observe`: the exit code is 0 all the same; without it this run would not start.**", ""]
    return "\n".join(lines)


__all__ = ["Failure", "failure_to_json", "failure_to_markdown"]
