"""`opdcheck calibrate`: parse, call, print, exit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from opdcheck.calibration.calibrator import Plan


def calibrate(
    calibration: Annotated[Path, typer.Argument(help="Calibration file (YAML).", show_default=False)],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say how many trainings, and how long; train none.")
    ] = False,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Trainings at a time, a process each.")] = 1,
) -> None:
    """Find a student's budget by short trainings under rising mismatch.

    Writes the budget that the file names, and beside it a picture (.png) and a report (.html). Finished trainings are
    kept: after a kill the same command goes on.
    """
    from opdcheck.calibration.calibrator import Calibrator
    from opdcheck.calibration.file import load_calibration
    from opdcheck.cli import budget_show, output
    from opdcheck.cli.console import TerminalProgress, log_console, result_console
    from opdcheck.config import resolve

    located = load_calibration(calibration)
    out = resolve(located.value.budget, calibration.parent)
    output.check_writable(None, None, out=out, inputs={"the calibration": calibration})
    with TerminalProgress(log_console()) as progress:
        calibrator = Calibrator(located, progress, jobs=jobs)
        if dry_run:
            _print_plan(calibrator.plan())
            return
        budget = calibrator.budget()
    for path in output.write_calibrated(budget, out):
        typer.echo(f"written: {path}", err=True)
    budget_show.show(budget, result_console())


def _print_plan(plan: Plan) -> None:
    from opdcheck.cli.console import duration
    from opdcheck.units import plural

    typer.echo(f"{plural(plan.trainings, 'training')}: {len(plan.levels)} levels x {plural(len(plan.seeds), 'seed')}")
    for level in plan.levels:
        typer.echo(f"  {level.source:13} {level.name}")
    typer.echo(f"finished already: {plan.finished}")
    if plan.finished == plan.trainings:
        typer.echo("nothing left to train: the limit is fitted from what is kept")
    elif plan.seconds_left is None:
        typer.echo("how long: not known before the first training; `opdcheck calibrate` then shows the time left")
    else:
        typer.echo(f"time left: about {duration(plan.seconds_left)}, by the finished ones on this machine")
