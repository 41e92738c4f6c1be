"""The command line. Every command parses, calls, prints and exits; nothing is computed here.

Nothing heavy is imported at start-up: each command imports what it needs when it runs.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, NoReturn

import typer

from opdcheck import __version__
from opdcheck.cli import admit, budget, schema
from opdcheck.errors import ExitCode, OpdcheckError

app = typer.Typer(
    name="opdcheck",
    help="Admission check for on-policy distillation rollouts: may this configuration feed this run?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 admitted, 1 rejected, 2 wrong usage or file, 3 no verdict, 4 failure, 130 interrupted.",
)
app.command("admit")(admit.admit)
app.command("schema")(schema.schema)
app.add_typer(budget.app, name="budget")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"opdcheck {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...


def main() -> NoReturn:
    """Runs the command and exits with a code that means what `opdcheck.errors.ExitCode` says, whatever happens."""
    try:
        app()
    except SystemExit as exit_:
        sys.exit(exit_.code)
    except OpdcheckError as error:
        _say(f"error: {error}")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        _say("interrupted: the same command goes on where it stopped")
        sys.exit(ExitCode.INTERRUPTED)
    except BaseException as error:  # a crash must never look like a verdict
        _report_crash(error)
        sys.exit(ExitCode.FAILED)
    sys.exit(ExitCode.ADMITTED)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201


def _report_crash(error: BaseException) -> None:
    import traceback

    from opdcheck.files import cache_dir, write_atomically

    details = "".join(traceback.format_exception(error))
    _say(f"error: opdcheck failed: {type(error).__name__}: {error}")
    if os.environ.get("OPDCHECK_DEBUG"):
        _say(details)
        return
    try:
        log = cache_dir() / "crash.log"
        write_atomically(log, details)
        _say(f"The traceback is in {log}; OPDCHECK_DEBUG=1 prints it. This is not a verdict.")
    except OSError:
        _say(details)
