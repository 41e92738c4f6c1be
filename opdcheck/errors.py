"""What can go wrong, and the exit code each kind of failure has.

Every error that a user can cause or meet is an `OpdcheckError`. Its message is complete: what failed, where, and
what to do next. The command line prints it without a traceback and exits with `exit_code`.
"""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of every command. No non-zero code lets a run start. From 128 on: a signal, as shells count them."""

    ADMITTED = 0
    REJECTED = 1
    USAGE = 2
    NO_VERDICT = 3
    FAILED = 4
    HUNG_UP = 129
    INTERRUPTED = 130
    TERMINATED = 143


class OpdcheckError(Exception):
    """Base of all expected errors. `hint` says what to do next; it is printed on a line of its own."""

    exit_code: ExitCode = ExitCode.FAILED

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n{self.hint}"


class ConfigError(OpdcheckError):
    """Wrong usage or an invalid file. `message` starts with `FILE:LINE: key.path:` wherever these are known."""

    exit_code = ExitCode.USAGE


class BudgetInvalidError(OpdcheckError):
    """There is no valid budget for this student and environment, so there can be no verdict."""

    exit_code = ExitCode.NO_VERDICT


class UncertifiedError(BudgetInvalidError):
    """The calibration looked for a limit for one of the candidate's sources, and could certify none."""


class EngineError(OpdcheckError):
    """The engine or the model failed."""

    exit_code = ExitCode.FAILED


class Ended(BaseException):
    """A signal has asked this process to end; like KeyboardInterrupt, nothing but the command line handles it."""

    def __init__(self, name: str, exit_code: ExitCode) -> None:
        super().__init__(f"ended by {name}")
        self.exit_code = exit_code


def one_line(error: BaseException, width: int = 300) -> str:
    """What an exception says, on one line and cut when long; its class where it says nothing."""
    line = " ".join(str(error).split()) or type(error).__name__
    return line if len(line) <= width else f"{line[: width - 3]}..."
