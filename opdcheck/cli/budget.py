"""`opdcheck budget show | verify | declare | curve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Show, verify or declare a student's mismatch budget.", no_args_is_help=True)


@app.command("show")
def show(budget: Annotated[Path, typer.Argument(help="Budget file (YAML).", show_default=False)]) -> None:
    """Print a budget: limits, floor, fingerprints, evidence."""
    from opdcheck.budget import load_budget
    from opdcheck.cli.budget_show import show as print_budget
    from opdcheck.cli.console import result_console

    print_budget(load_budget(budget), result_console())


@app.command("verify")
def verify(
    context: typer.Context,
    candidate: Annotated[Path, typer.Argument(help="Candidate file that names the budget.", show_default=False)],
    budget: Annotated[
        Path | None, typer.Option(envvar="OPDCHECK_BUDGET", help="Budget file instead of the candidate's.")
    ] = None,
) -> None:
    """Compare a budget's fingerprints with the candidate's student and this machine: exit 0 if all agree, else 3."""
    from opdcheck import admission
    from opdcheck.cli.budget_show import verify as print_comparison
    from opdcheck.cli.console import result_console
    from opdcheck.cli.variables import flags_of

    stored, subject = admission.verify(candidate, budget=budget, flags=flags_of(context, {"budget": "budget"}))
    exit_code = print_comparison(stored, subject.student, subject.teacher, subject.environment, result_console())
    raise typer.Exit(exit_code)


@app.command("declare")
def declare(
    candidate: Annotated[
        Path, typer.Argument(help="Candidate file: names student, engine, workload.", show_default=False)
    ],
    limit: Annotated[
        list[str], typer.Option("--limit", metavar="METRIC=VALUE", help="Limit of the total; may be given again.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Budget file to write.")],
    reason: Annotated[str, typer.Option(help="Why this limit; shown in every verdict.")],
    name: Annotated[str | None, typer.Option(help="Name of the budget; default: the student's.")] = None,
    prompts: Annotated[int, typer.Option(min=2, help="Prompts that the floor is measured on.")] = 16,
    force: Annotated[bool, typer.Option("--force", help="Overwrite FILE.")] = False,
) -> None:
    """Write a budget that your team sets by hand. Floor and fingerprints are measured, the limit is yours."""
    from opdcheck import declaration
    from opdcheck.budget import write_budget
    from opdcheck.cli import output
    from opdcheck.cli.budget_show import show as print_budget
    from opdcheck.cli.console import TerminalProgress, log_console, result_console
    from opdcheck.errors import ConfigError

    total = _parse_limits(limit)
    declaration.check_limits(total)
    output.check_writable(None, None, out=out, inputs={"the candidate": candidate})
    if out.exists() and not force:
        raise ConfigError(f"--out: {out} exists", hint="--force overwrites it.")
    with TerminalProgress(log_console()) as progress:
        declared = declaration.declare(
            candidate, total=total, reason=reason, name=name, prompts=prompts, progress=progress
        )
    with output.writing(out):
        write_budget(out, declared)
    print_budget(declared, result_console())
    typer.echo(f"written: {out}", err=True)


@app.command("curve")
def curve(
    budgets: Annotated[list[Path], typer.Argument(help="Calibrated budget files (YAML).", show_default=False)],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="Picture to write: .png or .svg.")],
) -> None:
    """Draw calibrated budgets side by side: quality lost, as a share of each one's gain, against mismatch."""
    from opdcheck.budget import load_budget
    from opdcheck.cli import output
    from opdcheck.errors import ConfigError
    from opdcheck.files import write_atomically
    from opdcheck.report.curve import draw_side_by_side

    format = out.suffix.removeprefix(".").lower()
    if format not in ("png", "svg"):
        raise ConfigError(f"--out: expected a file that ends in .png or .svg, found {out}")
    output.check_writable(None, None, out=out)
    try:
        picture = draw_side_by_side([load_budget(path) for path in budgets], format=format)
    except ValueError as error:
        raise ConfigError(str(error), hint="`opdcheck calibrate` makes budgets that can be drawn.") from error
    with output.writing(out):
        write_atomically(out, picture)
    typer.echo(f"written: {out}", err=True)


def _parse_limits(texts: list[str]) -> dict[str, float]:
    from opdcheck.errors import ConfigError

    total: dict[str, float] = {}
    for text in texts:
        metric, _, value = (part.strip() for part in text.partition("="))
        if metric in total:
            raise ConfigError(f"--limit: {metric} is given twice; expected one METRIC=VALUE for each metric")
        try:
            total[metric] = float(value)
        except ValueError:
            raise ConfigError(f"--limit: expected METRIC=VALUE such as k3=0.015, found {text!r}") from None
    return total
