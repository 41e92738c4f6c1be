"""`opdcheck backtest`: parse, call, print, exit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def backtest(
    budget: Annotated[Path, typer.Argument(help="Calibrated budget file (YAML).", show_default=False)],
    configs: Annotated[Path, typer.Argument(help="Folder of candidate files.", show_default=False)],
    seeds: Annotated[int, typer.Option(min=2, help="Trainings per configuration; other seeds than before.")] = 5,
    calibration: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Calibration file; default: the one that the budget names.")
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Trainings at a time, a process each.")] = 1,
    store: Annotated[bool, typer.Option("--store", help="Write the result into the budget file.")] = False,
) -> None:
    """Compare the gate's verdicts with full trainings, on configurations that the calibration never saw."""
    from opdcheck.budget import load_budget
    from opdcheck.calibration.backtest import backtest as run
    from opdcheck.cli import output
    from opdcheck.cli.budget_show import show_backtest
    from opdcheck.cli.console import TerminalProgress, log_console, result_console

    if store:
        output.check_writable(None, None, out=budget)
    with TerminalProgress(log_console()) as progress:
        result = run(budget, configs, seeds=seeds, calibration_file=calibration, jobs=jobs, progress=progress)
    if store:
        files = output.write_calibrated(load_budget(budget).model_copy(update={"backtest": result}), budget)
        typer.echo(f"stored in {', '.join(str(file) for file in files)}", err=True)
    show_backtest(result, result_console())
