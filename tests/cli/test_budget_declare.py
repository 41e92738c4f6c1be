"""`opdcheck budget declare` as a user meets it."""

import math

import pytest


def declare(project, *limits):
    flags = [part for limit in limits for part in ("--limit", limit)]
    out = project.folder / "declared.yaml"
    ran = project.run(
        "budget", "declare", project.candidate("any"), *flags, "--out", out, "--reason", "r", "--prompts", 2
    )
    return ran, out


def test_a_budget_is_written(project):
    ran, out = declare(project, "k3=0.5", "tv=0.9")
    assert ran.code == 0, ran.err
    assert "tv: 0.9" in out.read_text()


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (["k3"], "--limit: expected METRIC=VALUE such as k3=0.015, found 'k3'"),
        (["k3=much"], "--limit: expected METRIC=VALUE"),
        (["k3=0.1", "k3=0.2"], "--limit: k3 is given twice"),
        (["k4=0.1"], "--limit: expected one of"),
        (["tv=1"], "--limit tv=1: total variation is at most 1"),
        (["k3=1e-310"], "--limit k3=1e-310: expected at least 1e-12"),
        (["k3=nan"], "--limit k3=nan: expected a finite number above 0"),
    ],
)
def test_a_wrong_limit_exits_2_before_anything_is_measured(project, limits, message):
    project.monkeypatch.setattr("opdcheck.declaration.declare", lambda *_, **__: pytest.fail("measured"))
    ran, out = declare(project, *limits)
    assert (ran.code, out.exists()) == (2, False)
    assert ran.err.startswith(f"error: {message}")


def test_a_floor_that_is_not_finite_exits_4(project):
    project.monkeypatch.setattr("opdcheck.declaration.means", lambda _: {"tv": math.nan, "k3": 0.1})
    ran, out = declare(project, "k3=0.5")
    assert (ran.code, out.exists()) == (4, False)
    assert ran.err.splitlines()[-2].startswith("error: the kernel floor is not finite in tv")
