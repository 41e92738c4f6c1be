"""The command line. Every command parses, calls, prints and exits; nothing is computed here.

Nothing heavy is imported at start-up: each command imports what it needs when it runs.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Annotated, Any, NoReturn, TextIO

import typer

from opdcheck import __version__
from opdcheck.cli import admit, backtest, budget, calibrate, schema
from opdcheck.cli.variables import complaint, variable_of, warnings
from opdcheck.errors import Ended, ExitCode, OpdcheckError

GOES_ON = "the same command goes on after the last finished round or training"

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
app.command("calibrate")(calibrate.calibrate)
app.command("backtest")(backtest.backtest)
app.command("schema")(schema.schema)
app.add_typer(budget.app, name="budget")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"opdcheck {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001 (its callback does the work)
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    for warning in warnings(context.command, os.environ):
        _say(warning)


# Typer has click inside and keeps most of its exceptions private. BadParameter is one of those for wrong usage, and all
# of them share this ancestor.
_WrongUsage: type[BaseException] = typer.BadParameter.__mro__[2]


def main() -> NoReturn:
    """Runs the command and exits with a code that means what `opdcheck.errors.ExitCode` says, whatever happens."""
    try:
        with _ending_in_order():
            code = _run()
    except BaseException as error:  # to tell of a failure can fail as well: another Ctrl-C, a stream that is closed
        try:
            code = _failed(error)
        except BaseException:  # the last resort says nothing, and is still no verdict
            code = ExitCode.FAILED
    sys.exit(_written(code))


@contextlib.contextmanager
def _ending_in_order() -> Iterator[None]:
    """Lets SIGTERM (a scheduler, a CI job that is cancelled) and SIGHUP (a lost connection) end the command as Ctrl-C
    does: what is open is closed, and a sentence says how to go on. A signal that is ignored (nohup) stays so."""
    codes = {"SIGTERM": ExitCode.TERMINATED, "SIGHUP": ExitCode.HUNG_UP}
    known = {name: getattr(signal, name) for name in codes if hasattr(signal, name)}  # Windows has no SIGHUP
    taken = {name: number for name, number in known.items() if signal.getsignal(number) == signal.SIG_DFL}

    def end(number: int, _frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        raise Ended(name, codes[name])

    for number in taken.values():
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in taken.values():
            signal.signal(number, signal.SIG_DFL)


def _run() -> int:
    """Runs the command and gives its exit code.

    Only a verdict may be 1, and only a verdict or an answer 0: no code that a library chose is passed on.
    """
    try:
        code = app(standalone_mode=False)
    except _WrongUsage as error:
        _explain_usage(error)
        return ExitCode.USAGE
    except OpdcheckError as error:
        _say(f"error: {error}")
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort) as error:
        # Typer turns the end of stdin into an abort, and nobody has interrupted anything then.
        return _failed(error.__cause__) if isinstance(error.__cause__, EOFError) else _interrupted()
    except Ended as end:
        _say(f"{end}: {GOES_ON}")
        return end.exit_code
    except BaseException as error:  # a crash must never look like a verdict
        return _failed(error)
    if code == ExitCode.INTERRUPTED:  # a KeyboardInterrupt that Typer has caught
        return _interrupted()
    return int(code) if isinstance(code, int) else ExitCode.ADMITTED


def _explain_usage(error: Any) -> None:
    """Prints what is wrong with the command line, under the name of the variable where a variable is to blame."""
    parameter, context = getattr(error, "param", None), getattr(error, "ctx", None)
    variable = variable_of(context, parameter) if parameter is not None and context is not None else None
    if variable is not None:
        value = os.environ.get(variable, "")
        _say(f"error: {variable}: {complaint(context, parameter, value) or error.message}")
        return
    with contextlib.suppress(OSError, ValueError):  # stderr may be closed
        error.show()


def _interrupted() -> int:
    _say(f"interrupted: {GOES_ON}")
    return ExitCode.INTERRUPTED


def _failed(error: BaseException) -> int:
    cause = error.__context__ if isinstance(error, SystemExit) else error  # rich and Typer turn it into SystemExit(1)
    if isinstance(cause, BrokenPipeError):
        _output_lost(cause)
    else:
        _report_crash(error)
    return ExitCode.FAILED


def _written(code: int) -> int:
    """`code`, once the result has left this process; it counts for nothing if nobody can have read it."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except (OSError, ValueError) as error:
        _output_lost(error)
        code = ExitCode.FAILED
    _discard_unwritten()
    return code


def _output_lost(error: BaseException) -> None:
    _say(f"error: the result could not be written: {error}. This is not a verdict.")
    _discard_unwritten()


def _discard_unwritten() -> None:
    """Lets what a closed stream still holds go nowhere: Python would complain as it ends, and exit with its own 120."""
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.__stdout__, sys.__stderr__):
            if stream is not None and not _takes_output(stream):
                os.dup2(nowhere, stream.fileno())


def _takes_output(stream: TextIO) -> bool:
    try:
        stream.flush()
    except (OSError, ValueError):
        return False
    return True


def _say(text: str) -> None:
    from opdcheck.text import escaped

    with contextlib.suppress(OSError, ValueError):  # stderr may be closed as well
        print(escaped(text), file=sys.stderr, flush=True)  # noqa: T201


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
    except Exception:  # whatever keeps the log from being written, the code stays 4
        _say(details)
