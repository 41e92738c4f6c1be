"""What a command without a result leaves behind, in the files and the job summary that it would have written."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from opdcheck import __version__
from opdcheck.cli import output
from opdcheck.errors import BudgetInvalidError, Ended, ExitCode, OpdcheckError


@contextmanager
def failures_written(
    candidate: Path, json_file: str | None, markdown_file: Path | None, *, observe: bool
) -> Iterator[None]:
    """Writes a failure where the report would have gone, if the block ends without one. What was raised goes on.

    Otherwise the files of an earlier run would stand there and look like an answer to this one.
    """
    try:
        yield
    except BaseException as error:
        _write(error, candidate, json_file, markdown_file, observe=observe)
        raise


def _write(
    error: BaseException, candidate: Path, json_file: str | None, markdown_file: Path | None, *, observe: bool
) -> None:
    from opdcheck.report.failure import Failure
    from opdcheck.text import replaced

    code, text = _told(error)
    observed = observe and isinstance(error, BudgetInvalidError)
    failure = Failure(
        opdcheck_version=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        candidate_file=replaced(str(candidate)),
        exit_code=ExitCode.ADMITTED if observed else code,
        error=replaced(text),
        observed=observed,
    )
    try:
        output.write_failure(failure, json_file, markdown_file)
    except (OSError, ValueError) as problem:  # what went wrong first is what counts
        if sys.stderr is not None:
            print(f"warning: that this failed could not be written: {problem}", file=sys.stderr)  # noqa: T201


def _told(error: BaseException) -> tuple[int, str]:
    if isinstance(error, OpdcheckError):
        return error.exit_code, str(error)
    if isinstance(error, Ended):
        return error.exit_code, str(error)
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED, "interrupted"
    return ExitCode.FAILED, f"opdcheck failed: {type(error).__name__}: {error}"


__all__ = ["failures_written"]
