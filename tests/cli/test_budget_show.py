"""The tables of `opdcheck backtest`, at the widths that terminals have."""

from __future__ import annotations

import io

import pytest
from rich.cells import cell_len
from rich.console import Console
from samples import backtested, held_out_row

from opdcheck.calibration.records import BacktestRow
from opdcheck.cli.budget_show import show_backtest


def printed(rows: list[BacktestRow], width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    show_backtest(backtested(rows), console)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


LONG = "kv-fp8-per-token-head"
ROWS = [
    held_out_row(LONG, limit=0.05, verdict="admit", passed=True),
    held_out_row("logits-0.6-noise-0.1", limit=0.05, verdict="inconclusive", passed=True),
]


@pytest.mark.parametrize("width", [80, 120])
def test_every_configuration_is_one_line(width: int) -> None:
    lines = printed(ROWS, width)
    assert all(cell_len(line) <= width for line in lines)
    assert lines[0].startswith("Backtest  limit 0.05, margin 0.02 nats/token, 3 seeds")
    assert lines[2].startswith(f"  {LONG} ")
    assert lines[2].endswith("yes")
    assert lines[3].endswith("NO")


def test_limits_have_a_column_where_they_differ() -> None:
    lines = printed([ROWS[0], held_out_row("noise-0.1", limit=None, verdict="reject", passed=False)], 100)
    assert "limit" in lines[1].split()
    assert {line.split()[1] for line in lines[2:4]} == {"0.05", "none"}


def test_a_last_column_without_room_stands_whole_below_its_row() -> None:
    lines = printed(ROWS, 62)
    assert [line.strip() for line in lines].count("yes") == 1
