"""`budget declare`: a wrong limit is found before anything is measured, a floor that is no number after it."""

import math

import pytest

from opdcheck import declaration
from opdcheck.errors import ConfigError, EngineError


@pytest.mark.parametrize(
    ("total", "message"),
    [
        ({}, "--limit: expected at least one limit"),
        ({"k4": 0.1}, "--limit: expected one of `tv`, `kl`, `k3`, `abs_dlogp`"),
        ({"k3": -0.1}, "--limit k3=-0.1: expected a finite number above 0"),
        ({"k3": 0.0}, "--limit k3=0: expected a finite number above 0"),
        ({"k3": 1e-310}, "--limit k3=1e-310: expected at least 1e-12"),
        ({"k3": math.nan}, "--limit k3=nan: expected a finite number above 0"),
        ({"k3": math.inf}, "--limit k3=inf: expected a finite number above 0"),
        ({"k3": 0.01, "tv": 1.0}, "--limit tv=1: total variation is at most 1, so this limits nothing"),
    ],
)
def test_a_wrong_limit_is_found_before_anything_is_read(tmp_path, total, message):
    with pytest.raises(ConfigError) as caught:
        declaration.declare(tmp_path / "no such file.yaml", total=total, reason="none")
    assert caught.value.message.startswith(message)
    assert caught.value.hint == "--limit takes METRIC=VALUE such as k3=0.015."


def test_a_floor_that_is_not_finite_is_the_models_failure():
    assert declaration._finite("kernel floor", {"tv": 0.1}) == {"tv": 0.1}
    with pytest.raises(EngineError, match="the kernel floor is not finite in k3, kl: the unperturbed student"):
        declaration._finite("kernel floor", {"tv": 0.1, "k3": math.nan, "kl": math.inf})
