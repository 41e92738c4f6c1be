"""A backtest for people: its rows as text, and what they come to in a few sentences."""

from __future__ import annotations

from opdcheck.calibration.records import Backtest, BacktestRow
from opdcheck.units import number, percent, plural

NEAR = 0.25
"""A configuration within this share of the limit may go either way."""

COLUMNS = ("configuration", "limit", "mismatch", "gate", "prompts", "loss", "at most", "agree")
NUMERIC = ("limit", "mismatch", "prompts", "loss", "at most")


def rows(backtest: Backtest) -> list[dict[str, str]]:
    """The held-out configurations by mismatch over limit, as column: text."""
    return [_cells(row) for row in sorted(backtest.rows, key=lambda row: row.distance)]


def _cells(row: BacktestRow) -> dict[str, str]:
    cells = (
        row.name,
        "none" if row.limit is None else number(row.limit),
        "" if row.mismatch is None else number(row.mismatch),
        row.verdict,
        str(row.prompts),
        number(row.mean),
        number(row.upper),
        "yes" if row.agrees else "NO",
    )
    return dict(zip(COLUMNS, cells, strict=True))


def summary(backtest: Backtest) -> str:
    """How often the gate agreed with full trainings, as sentences."""
    held_out = backtest.rows
    agree = sum(row.agrees for row in held_out)
    far = [row for row in held_out if abs(row.distance) > NEAR]
    false_admits = [row for row in held_out if row.verdict == "admit" and not row.passed]
    false_rejects = [row for row in held_out if row.verdict != "admit" and row.passed]
    by_mean = sum(row.verdict == "admit" and row.mean > backtest.margin for row in held_out)
    return (
        f"Backtest: {agree} of {plural(len(held_out), 'held-out configuration')} agree "
        f"({percent(agree / len(held_out))}); "
        f"{sum(row.agrees for row in far)} of {len(far)} further than {percent(NEAR)} from their limit. False admits "
        f"{len(false_admits)} (by the mean loss alone {by_mean}; above {number(1 + NEAR)} times the limit "
        f"{sum(row.distance > NEAR for row in false_admits)}), false rejects {len(false_rejects)}. The "
        f"gate used {percent(backtest.gate_share)} of the trainings' rollouts."
    )


__all__ = ["COLUMNS", "NEAR", "NUMERIC", "rows", "summary"]
