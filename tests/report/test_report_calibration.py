"""The page of a calibrated budget."""

from samples import backtested, held_out_row, trained

from opdcheck.report.calibration import render_html


def test_a_budget_without_a_backtest_has_no_such_section():
    assert "<h2>Backtest</h2>" not in render_html(trained())


def test_a_backtest_is_said_drawn_and_tabulated():
    rows = [
        held_out_row("mild", limit=0.06, verdict="admit", passed=True),
        held_out_row("a <b> name", limit=0.06, verdict="admit", passed=False),
    ]
    page = render_html(trained().model_copy(update={"backtest": backtested(rows)}))
    section = page.partition("<h2>Backtest</h2>")[2]
    assert "1 of 2 held-out configurations agree (50 %)" in section
    assert "False admits 1" in section
    assert section.count("<svg") == 1
    assert "a &lt;b&gt; name" in section
    assert "NO" in section
