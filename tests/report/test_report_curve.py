"""Pictures of calibrations: the same budget gives the same bytes, and what cannot be drawn is said."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from samples import backtested, budget, held_out_row, trained

from opdcheck.cli.budget import curve
from opdcheck.errors import ConfigError
from opdcheck.report.curve import draw, draw_backtest, draw_side_by_side, losses
from opdcheck.yamlfile import dump


def text_of(svg: bytes) -> str:
    """What an SVG says; matplotlib keeps each text as a comment beside its outlines."""
    parser = ElementTree.XMLParser(target=ElementTree.TreeBuilder(insert_comments=True))
    root = ElementTree.fromstring(svg, parser)
    return "\n".join(element.text or "" for element in root.iter() if element.tag is ElementTree.Comment)


def test_losses_are_paired_by_seed() -> None:
    (first, lost), *_ = losses(trained().evidence, "final")
    clean = trained().evidence[0]
    assert first.source != "none"
    assert lost == pytest.approx([a - b for a, b in zip(first.final_kl, clean.final_kl, strict=True)])


def test_the_same_bytes() -> None:
    assert draw(trained()) == draw(trained())
    assert draw(trained()).startswith(b"\x89PNG")
    assert draw(trained(), format="svg") == draw(trained(), format="svg")


def test_one_limit_or_one_for_each_source() -> None:
    together = text_of(draw(trained(), format="svg"))
    assert "limit 0.08" in together
    assert "hinge" in together
    apart = text_of(draw(trained(sources_differ=True), format="svg"))
    assert "hinge, noise" in apart
    assert "hinge, staleness" in apart


def test_side_by_side_is_in_shares_of_the_gain() -> None:
    said = text_of(draw_side_by_side([trained(), trained(sources_differ=True)], format="svg"))
    assert "share of the unperturbed run's gain" in said
    assert "margin 0.09" in said  # a tenth of the gain's lower bound, over the gain


def test_a_backtest_has_a_legend_entry_for_each_verdict_that_occurred() -> None:
    rows = [
        held_out_row("mild", limit=0.06, verdict="admit", passed=True),
        held_out_row("near", limit=0.06, verdict="admit", passed=True),
        held_out_row("no limit", limit=None, verdict="reject", passed=False),
    ]
    said = text_of(draw_backtest(backtested(rows), format="svg"))
    assert "admit (2)" in said
    assert "inconclusive" not in said
    assert "reject" not in said  # nothing was measured for it, so it has no place on the axis
    assert "margin 0.02" in said


def test_what_cannot_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no calibration to draw"):
        draw(budget())
    other = trained()
    assert other.fit is not None
    on_k3 = other.model_copy(update={"fit": other.fit.model_copy(update={"metric": "k3"})})
    with pytest.raises(ValueError, match="same scale, found k3, tv"):
        draw_side_by_side([other, on_k3])
    file = tmp_path / "declared.yaml"
    file.write_text(dump(budget()))
    with pytest.raises(ConfigError, match="no calibration to draw"):
        curve([file], tmp_path / "out.png")
    with pytest.raises(ConfigError, match=r"ends in \.png or \.svg"):
        curve([file], tmp_path / "out.jpg")
    assert not list(tmp_path.glob("out*"))


def test_the_command(tmp_path: Path) -> None:
    file = tmp_path / "addition.yaml"
    file.write_text(dump(trained()))
    curve([file, file], tmp_path / "out.svg")
    assert (tmp_path / "out.svg").read_bytes() == draw_side_by_side([trained()] * 2, format="svg")
