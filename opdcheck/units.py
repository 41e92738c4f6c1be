"""How numbers and metrics are written for people: the same in verdicts, budgets and reports."""

from __future__ import annotations

import math

UNITS = {
    "tv": "",
    "kl": "nats/token",
    "k1": "nats/token",
    "k3": "nats/token",
    "abs_dlogp": "nats/token",
    "token_mult_prob_error": "",
    "probs_diff": "",
    "argmax_flip": "",
}
"""Unit of each metric's mean. Total variation, probability differences and ratios have none."""

LOST = {
    "final": "held-out KL lost at the end, nats/token",
    "auc": "held-out KL lost over the training, nats/token",
    "accuracy": "held-out accuracy lost at the end",
}
"""What a calibration's losses are, by its quality."""


def lost(quality: str, value: float) -> str:
    """A loss of quality with its unit: `0.0165 nats/token`, `0.028 of accuracy`."""
    return f"{number(value)} {'of accuracy' if quality == 'accuracy' else 'nats/token'}"


def number(value: float, digits: int = 3) -> str:
    """`value` with so many significant digits, trailing zeros dropped: 0.0424, 12.3, 4,096, 3.1e-05, `not finite`."""
    if not math.isfinite(value):
        return "not finite"
    if value == 0:
        return "0"
    magnitude = math.floor(math.log10(abs(float(f"{value:.{digits - 1}e}"))))
    if magnitude < -4 or magnitude >= 9:
        return f"{value:.{max(digits - 2, 0)}e}"
    decimals = max(digits - 1 - magnitude, 0)
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def percent(share: float) -> str:
    """A share of 1 as a whole percentage, with one digit below 1 %: `43 %`, `0.4 %`, `<0.1 %`."""
    if not math.isfinite(share):
        return "-"
    hundredths = share * 100
    if 0 < hundredths < 0.05:
        return "<0.1 %"
    return f"{hundredths:.1f} %" if 0 < abs(hundredths) < 0.95 else f"{hundredths:.0f} %"


def quantity(metric: str, value: float) -> str:
    """A metric's value with its unit: `0.0424 nats/token`, `0.061`."""
    return f"{number(value)} {UNITS.get(metric, '')}".rstrip()


def plural(count: int, noun: str) -> str:
    """`1 prompt`, `4,096 tokens`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
