"""Errors: one line for what an exception says."""

import pytest

from opdcheck.errors import one_line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("a\n  b\tc"), "a b c"),
        (ValueError(), "ValueError"),
        (ValueError(" \n"), "ValueError"),
        (ValueError("x" * 400), "x" * 297 + "..."),
    ],
)
def test_one_line(error, line):
    assert one_line(error) == line
