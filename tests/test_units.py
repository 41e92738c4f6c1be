"""Numbers as people read them."""

import pytest

from opdcheck.units import number, percent, plural, quantity


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0424, "0.0424"),
        (0.00169999, "0.0017"),
        (0.02, "0.02"),
        (1, "1"),
        (9.999, "10"),
        (12.345, "12.3"),
        (123.4, "123"),
        (4096, "4,096"),
        (0.0000312, "3.1e-05"),
        (1.5e12, "1.5e+12"),
        (-0.0034, "-0.0034"),
        (0, "0"),
        (float("nan"), "not finite"),
        (float("inf"), "not finite"),
    ],
)
def test_number(value, text):
    assert number(value) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.43, "43 %"),
        (0.0042, "0.4 %"),
        (1e-9, "<0.1 %"),
        (0, "0 %"),
        (1.0, "100 %"),
        (-0.031, "-3 %"),
        (float("nan"), "-"),
    ],
)
def test_percent(share, text):
    assert percent(share) == text


def test_quantity_and_plural():
    assert (quantity("k3", 0.0424), quantity("tv", 0.1)) == ("0.0424 nats/token", "0.1")
    assert (plural(1, "prompt"), plural(4096, "token")) == ("1 prompt", "4,096 tokens")
