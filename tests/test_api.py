"""The public API: every name is what it says, also once the package's own modules have been imported."""

from __future__ import annotations

import inspect
import pkgutil

import pytest

import opdcheck
import opdcheck.calibration.calibrator


@pytest.mark.parametrize("name", ["admit", "backtest", "calibrate", "declare"])
def test_use_cases_are_functions(name: str) -> None:
    assert inspect.isfunction(getattr(opdcheck, name))


def test_no_module_hides_a_name() -> None:
    """Importing `opdcheck.x` sets the attribute `x` of the package, whatever it was before."""
    modules = {module.name for module in pkgutil.iter_modules(opdcheck.__path__)}
    assert not modules & set(opdcheck.__all__)


def test_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'admitt'"):
        opdcheck.admitt  # noqa: B018
