"""Where a report goes: the screen, `--json`, `--markdown` and, inside GitHub Actions, the job's summary."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from opdcheck.errors import ConfigError
from opdcheck.files import write_atomically

if TYPE_CHECKING:
    from rich.console import Console

    from opdcheck.budget import Budget
    from opdcheck.report.failure import Failure
    from opdcheck.report.record import Report


def check_writable(
    json_file: str | None,
    markdown_file: Path | None,
    *,
    out: Path | None = None,
    inputs: Mapping[str, Path] | None = None,
) -> None:
    """Finds out before the measurement, not after it, that a report could not be written, or onto what.

    Args:
        inputs: what this command reads, by name: no report may take its place.

    Raises:
        ConfigError: naming the flag and the path.
    """
    taken = dict(inputs or {})
    for flag, path in (("--json", json_file), ("--markdown", markdown_file), ("--out", out)):
        if path is None or (flag == "--json" and path == "-"):
            continue
        if str(path) == "-":
            raise ConfigError(f"{flag}: expected a file; only --json writes to stdout (`-`)")
        try:
            _check_target(flag, Path(path))
        except OSError as error:  # such as a name that is too long
            raise ConfigError(f"{flag}: cannot write {path}: {error.strerror}") from error
        for name, other in taken.items():
            if _same_file(Path(path), other):
                raise ConfigError(f"{flag}: {path} is {name}, and would be overwritten", hint="Name another file.")
        taken[f"the file of {flag}"] = Path(path)


def _check_target(flag: str, target: Path) -> None:
    if target.is_dir():
        raise ConfigError(f"{flag}: {target} is a folder", hint="Name a file.")
    folder = target.absolute().parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(f"{flag}: cannot write {target}: {folder} is not a writable folder")
    with suppress(FileNotFoundError):
        target.lstat()


def _same_file(one: Path, other: Path) -> bool:
    if one.exists() and other.exists():
        return one.samefile(other) and one.is_file()  # anything may be written to /dev/null twice
    return os.path.realpath(one) == os.path.realpath(other)


def write(report: Report, json_file: str | None, markdown_file: Path | None) -> None:
    """Writes the files that were asked for, each atomically.

    Raises:
        OpdcheckError: a file could not be written; the verdict is then not reported as one.
    """
    from opdcheck.errors import OpdcheckError
    from opdcheck.report.markdown import to_markdown
    from opdcheck.report.record import to_json

    try:
        for step in _writes(to_json(report), to_markdown(report), json_file, markdown_file):
            step()
    except OSError as error:
        raise OpdcheckError(
            f"the measurement is done, but a report could not be written: {error}",
            hint="Measured rounds are kept: run the same command again with another path.",
        ) from error


def _writes(
    as_json: str, as_markdown: str, json_file: str | None, markdown_file: Path | None
) -> Iterator[Callable[[], None]]:
    """One step per place. The job's summary is the last: it is appended to, and what stands there cannot be undone."""
    if markdown_file is not None:
        yield lambda: write_atomically(markdown_file, as_markdown)
    if json_file == "-":
        yield lambda: _print(as_json)
    elif json_file is not None:
        yield lambda: write_atomically(Path(json_file), as_json + "\n")
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        yield lambda: _append(Path(summary), as_markdown)


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _append(summary: Path, text: str) -> None:
    with summary.open("a", encoding="utf-8") as file:  # shared by all steps of a job
        file.write(text)


def write_failure(failure: Failure, json_file: str | None, markdown_file: Path | None) -> None:
    """Writes a failure where the report would have gone: everywhere it can.

    Raises:
        OSError: a file could not be written; the first one.
    """
    from opdcheck.report.failure import failure_to_json, failure_to_markdown

    problems = []
    for step in _writes(failure_to_json(failure), failure_to_markdown(failure), json_file, markdown_file):
        try:
            step()
        except OSError as problem:
            problems.append(problem)
    if problems:
        raise problems[0]


def show(report: Report, console: Console) -> None:
    """Prints the report for a person.

    Raises:
        OpdcheckError: nobody can have read it.
    """
    from opdcheck.errors import OpdcheckError
    from opdcheck.report.terminal import render

    text = render(report)
    try:
        console.print(text)
        console.file.flush()  # so that it fails here, if at all
    except (OSError, SystemExit) as error:  # rich turns a broken pipe into an exit
        cause = error.__context__ if isinstance(error, SystemExit) else error
        raise OpdcheckError(f"the result could not be written: {cause}. This is not a verdict.") from error


@contextmanager
def writing(file: Path) -> Iterator[None]:
    """Says which file could not be written, in place of a traceback.

    Raises:
        OpdcheckError: the block raised an OSError.
    """
    from opdcheck.errors import OpdcheckError

    try:
        yield
    except OSError as error:
        raise OpdcheckError(f"cannot write {file}: {error}", hint="Make room, or name another file.") from error


def write_calibrated(budget: Budget, out: Path) -> list[Path]:
    """Writes a calibrated budget, and beside it its picture, its report and its backtest's picture, each atomically.

    Returns:
        The files, the budget first.

    Raises:
        OpdcheckError: a file could not be written; the trainings are kept.
    """
    from opdcheck.budget import write_budget
    from opdcheck.errors import OpdcheckError
    from opdcheck.report.calibration import render_html
    from opdcheck.report.curve import draw, draw_backtest

    files: dict[Path, str | bytes] = {
        out.with_suffix(".png"): draw(budget),
        out.with_suffix(".html"): render_html(budget),
    }
    if budget.backtest is not None:
        files[out.with_suffix(".backtest.png")] = draw_backtest(budget.backtest)
    try:
        write_budget(out, budget)
        for file, content in files.items():
            write_atomically(file, content)
    except OSError as error:
        raise OpdcheckError(
            f"the trainings are done, but the budget or its pictures could not be written: {error}",
            hint="Finished trainings are kept: make room, and run the same command again.",
        ) from error
    return [out, *files]
