"""`opdcheck admit`: parse, call, print, exit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

KEYS = {
    "budget": "budget",
    "metric": "decision.metric",
    "alpha": "decision.alpha",
    "min_prompts": "decision.min_prompts",
    "max_prompts": "decision.max_prompts",
}
"""Flag -> the key of the candidate that it overrides."""

OBSERVED = "--observe: exit code 0 all the same; without it this run would not start (exit code 3)."


def admit(
    context: typer.Context,
    candidate: Annotated[Path, typer.Argument(help="Candidate file (YAML).", show_default=False)],
    budget: Annotated[
        Path | None, typer.Option(envvar="OPDCHECK_BUDGET", help="Budget file instead of the candidate's.")
    ] = None,
    metric: Annotated[
        str | None, typer.Option(envvar="OPDCHECK_METRIC", help="Decision scale: tv, kl, k3 or abs_dlogp.")
    ] = None,
    alpha: Annotated[
        float | None, typer.Option(envvar="OPDCHECK_ALPHA", help="Error level of the confidence sequence.")
    ] = None,
    min_prompts: Annotated[
        int | None, typer.Option(envvar="OPDCHECK_MIN_PROMPTS", help="No verdict before so many prompts.")
    ] = None,
    max_prompts: Annotated[
        int | None, typer.Option(envvar="OPDCHECK_MAX_PROMPTS", help="Inconclusive after so many prompts.")
    ] = None,
    sources: Annotated[
        bool, typer.Option("--sources", envvar="OPDCHECK_SOURCES", help="Split by source even when admitted.")
    ] = False,
    accept_stale: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIELD", help="Forgive one changed fingerprint, e.g. environment.vllm; shown in the verdict."
        ),
    ] = None,
    observe: Annotated[
        bool, typer.Option("--observe", envvar="OPDCHECK_OBSERVE", help="Trial period: exit 0 instead of 1 and 3.")
    ] = False,
    fresh: Annotated[
        bool, typer.Option("--fresh", envvar="OPDCHECK_FRESH", help="Measure again what the cache already holds.")
    ] = False,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write everything measured as JSON ('-': stdout).")
    ] = None,
    markdown_file: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE", help="Write a summary for CI as Markdown.")
    ] = None,
) -> None:
    """Measure a rollout configuration and compare it with the student's budget.

    Exit codes: 0 admitted, 1 rejected, 2 wrong usage or file, 3 no verdict, 4 failure.
    """
    from opdcheck import admission
    from opdcheck.cli import output
    from opdcheck.cli.console import TerminalProgress, log_console, result_console
    from opdcheck.cli.failures import failures_written
    from opdcheck.cli.variables import flags_of
    from opdcheck.errors import BudgetInvalidError, ExitCode
    from opdcheck.text import escaped

    output.check_writable(json_file, markdown_file, inputs=admission.files_of(candidate, budget))
    given: dict[str, Any] = {
        "budget": budget,
        "metric": metric,
        "alpha": alpha,
        "min_prompts": min_prompts,
        "max_prompts": max_prompts,
    }
    try:
        with failures_written(candidate, json_file, markdown_file, observe=observe):
            with TerminalProgress(log_console()) as progress:
                report = admission.admit(
                    candidate,
                    overrides={KEYS[name]: value for name, value in given.items() if value is not None},
                    flags=flags_of(context, KEYS),
                    sources=True if sources else None,
                    accept_stale=_only_one(accept_stale),
                    observe=observe,
                    fresh=fresh,
                    progress=progress,
                )
            # The files come last: where the screen is gone or something failed, no verdict stands in them.
            output.show(report, result_console() if json_file != "-" else log_console())
            output.write(report, json_file, markdown_file)
    except BudgetInvalidError as error:
        if not observe:
            raise
        typer.echo(escaped(f"no verdict: {error}\n{OBSERVED}"), err=True)
        raise typer.Exit(ExitCode.ADMITTED) from error
    raise typer.Exit(report.verdict.exit_code)


def _only_one(fields: list[str] | None) -> str | None:
    """The one fingerprint field to forgive: forgiving several would leave little of what a budget promises."""
    from opdcheck.errors import ConfigError

    if not fields:
        return None
    if len(fields) > 1:
        raise ConfigError(f"--accept-stale: expected one field, found {len(fields)}: {', '.join(fields)}")
    return fields[0]
