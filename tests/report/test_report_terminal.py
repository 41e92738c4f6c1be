# ruff: noqa: E501  (snapshots)
"""What a person sees: pinned as text at 80 columns, and readable at other widths, without colour, without Unicode."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from inline_snapshot import snapshot
from rich.console import Console
from samples import NormalGate, admitted, budget, inconclusive, measurement, rejected, report, sources

from opdcheck.measurement import Part, SourceShare
from opdcheck.report.advice import next_steps
from opdcheck.report.layout import Page
from opdcheck.report.markdown import escape, to_markdown
from opdcheck.report.terminal import position_summary, render, source_rows
from opdcheck.stats.gate import Gate


@pytest.fixture(autouse=True)
def simple_gate(monkeypatch):
    """Layout does not depend on how the interval is computed."""
    monkeypatch.setattr("opdcheck.verdict.Gate", NormalGate)


def printed(shown, *, width=80, encoding="utf-8", colour=False):
    buffer = io.TextIOWrapper(io.BytesIO(), encoding=encoding, newline="")
    Console(file=buffer, width=width, force_terminal=colour, no_color=not colour, highlight=False).print(render(shown))
    buffer.flush()
    return buffer.buffer.getvalue().decode(encoding)


def test_admit():
    assert printed(admitted()) == snapshot("""\
ADMIT  examples/smollm2/bf16.yaml

  ok    k3 0.0017 nats/token (95 % interval 0.0014 to 0.002) is within the limit
        0.015
  note  limit declared, not calibrated: its cost in quality was not measured for
        this student (reason given: prime-rl's acceptance rule for new models)

  0 ─────━●━──────────────────────────────────────────────────┃──────── 0.0172
                                                              ^ limit 0.015

Mismatch  32 prompts, 4,096 tokens, vllm 0.32.0 (cpu)
                            mean     s.e.     p99   p99.9     max  estimator
  tv                      0.0108  0.00065   0.054    0.13   0.275  topk
  kl                     0.00173   0.0001  0.0191  0.0458  0.0973  topk
  k1                     0.00167  0.00033  0.0317   0.076   0.161  sampled
  k3 *                    0.0017  0.00019  0.0272  0.0653   0.139  sampled
  abs_dlogp               0.0297   0.0018   0.148   0.356   0.757  sampled
  token_mult_prob_error     1.03    0.062    1.55    3.72     7.9  sampled
  probs_diff             0.00866  0.00052   0.052   0.125   0.265  sampled
  argmax_flip            0.00907  0.00054   0.898       1       1  exact
  * decides. kl, k1, k3, abs_dlogp in nats/token.
  Certain, whatever the engine hides: tv 0.0105 to 0.012, kl at least 0.0016.
  chi2_token 0.00442, effective sample size 100 % of the tokens (no truncation).
  Kernel floor 0.0017 nats/token: this candidate is not above it.
  21 of 32 completions cut at the length limit.

By position  tv 0.00756 (tokens 0-15) to 0.0136 (112-127), grows (p 0.0031)
  tv  ▅▅▆▆▇▇██
  kl  ▄▅▅▆▇▇██

Basis
  budget       smollm2-demo, declared 2026-12-01 (budgets/smollm2.yaml)
  student      students/smollm2, trainer in bfloat16
  environment  cpu, torch 2.13.0, transformers 5.19.0, vllm 0.32.0
  measured     2026-12-01T09:30:00+00:00 by opdcheck 0.1.0 in 48.2 s
""")


def test_reject():
    assert printed(rejected()) == snapshot("""\
REJECT  examples/smollm2/kv_fp8_e4m3.yaml

  reject  k3 0.0424 nats/token (95 % interval 0.035 to 0.0498) is above the
          limit 0.015
  note    limit declared, not calibrated: its cost in quality was not measured
          for this student (reason given: prime-rl's acceptance rule for new
          models)

  0 ─────────────────┃──────────────────────━━━━━━━━━●━━━━━━━━━──────── 0.0573
                     ^ limit 0.015

Mismatch  32 prompts, 4,096 tokens, vllm 0.32.0 (cpu)
                           mean    s.e.    p99  p99.9   max  estimator
  tv                     0.0539  0.0032   0.27  0.647     1  topk
  kl                     0.0432  0.0026  0.476   1.14  2.43  topk
  k1                     0.0416  0.0083  0.789   1.89  4.03  sampled
  k3 *                   0.0424  0.0047  0.678   1.63  3.46  sampled
  abs_dlogp               0.148  0.0089  0.741   1.78  3.78  sampled
  token_mult_prob_error    1.16    0.07   1.75   4.19  8.91  sampled
  probs_diff             0.0432  0.0026  0.259  0.623     1  sampled
  argmax_flip            0.0453  0.0027      1      1     1  exact
  * decides. kl, k1, k3, abs_dlogp in nats/token.
  Certain, whatever the engine hides: tv 0.0523 to 0.0599, kl at least 0.0399.
  chi2_token 0.11, effective sample size 90 % of the tokens (no truncation).
  Kernel floor 0.0017 nats/token: 4 % of the mean comes from the kernels alone.
  21 of 32 completions cut at the length limit.

By position  tv 0.0378 (tokens 0-15) to 0.068 (112-127), grows (p 0.0031)
  tv  ▅▅▆▆▇▇██
  kl  ▄▅▅▆▇▇██

Sources  each alone, on the same tokens, in tv
  kernel      0.0108   20 %  ██            real: floor, from the budget
  kv_cache    0.0412   76 %  █████████     simulated: fp8_e4m3, one scale of 1.0
                                           per tensor
  left over  0.00195    4 %                interaction, or not reproduced alone
  total       0.0539  100 %  ████████████

Candidate as measured
  kv_cache  real  fp8_e4m3 in vLLM's own kernels, scale 1.0

Basis
  budget       smollm2-demo, declared 2026-12-01 (budgets/smollm2.yaml)
  student      students/smollm2, trainer in bfloat16
  environment  cpu, torch 2.13.0, transformers 5.19.0, vllm 0.32.0
  measured     2026-12-01T09:30:00+00:00 by opdcheck 0.1.0 in 48.2 s

Next
  -  The largest source is kv_cache (76 % of the total tv). Try
     `kv_cache_dtype_skip_layers` for the most sensitive layers, or
     `kv_cache_dtype: auto`.
""")


def test_inconclusive_starts_with_that():
    assert printed(inconclusive()).splitlines()[:8] == snapshot(
        [
            "INCONCLUSIVE, so not admitted  examples/smollm2/kv_fp8_e4m3.yaml",
            "",
            "  open  k3 0.0149 nats/token (95 % interval 0.0122 to 0.0176): the limit 0.015",
            "        lies inside the interval after 16 prompts",
            "  note  limit declared, not calibrated: its cost in quality was not measured for",
            "        this student (reason given: prime-rl's acceptance rule for new models)",
            "",
            "  0 ────────────────────────────────────────━━━━━━━━━●━━━━━━━━━──────── 0.0203",
        ]
    )


def test_ascii():
    lines = printed(rejected(), encoding="ascii").splitlines()
    assert lines[7:9] == snapshot(
        ["", "  0 -----------------|----------------------=========o=========-------- 0.0573"]
    )
    assert [line for line in lines if line.startswith(("  tv  ", "  kv_cache  "))] == snapshot(
        [
            "  tv                     0.0539  0.0032   0.27  0.647     1  topk",
            "  tv  ==++**##",
            "  kv_cache    0.0412   76 %  #########     simulated: fp8_e4m3, one scale of 1.0",
            "  kv_cache  real  fp8_e4m3 in vLLM's own kernels, scale 1.0",
        ]
    )


def test_colour_adds_nothing_but_colour():
    import re

    coloured = printed(rejected(), colour=True)
    assert "\x1b[1;31mREJECT\x1b[0m" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == printed(rejected())


@pytest.mark.parametrize("make", [admitted, rejected, inconclusive])
@pytest.mark.parametrize("width", [50, 60, 80, 200])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_no_line_is_wider_than_the_terminal(make, width, encoding):
    lines = printed(make(), width=width, encoding=encoding).splitlines()
    assert max(map(len, lines)) <= min(width, 100)
    assert not any(line != line.rstrip() for line in lines)


def test_observe_says_so():
    shown = rejected()
    shown = shown.model_copy(update={"verdict": shown.verdict.model_copy(update={"observed": True, "exit_code": 0})})
    assert printed(shown).splitlines()[1] == snapshot(
        "  --observe: exit code 0 all the same; without it this run would not start."
    )


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_names_from_the_user_cannot_change_the_screen(encoding):
    text = printed(report(measurement(0.0017), file="a\x1b[2J\nREJECT [red]日本[/red].yaml"), encoding=encoding)
    assert "\x1b" not in text
    assert text.splitlines()[0].startswith("ADMIT  a\\x1b[2J REJECT [red]")


def split_on_half():
    """A reject whose sources were split on 16 of its 32 prompts, whose tv is 0.04 where all prompts' is 0.054."""
    measured = rejected().measurement
    tv = [*([0.04] * 16), *([0.068] * 16)]
    changed = {"sources_prompts": 16, "prompt_values": {**measured.prompt_values, "tv": tv}}
    return report(measured.model_copy(update=changed))


def test_the_total_beside_the_sources_is_of_the_prompts_that_they_were_split_on():
    shown = split_on_half()
    rows = source_rows(shown)
    assert rows[-1][:3] == ("total", pytest.approx(0.04), pytest.approx(1))
    assert rows[-1][4] == "of the first 16 prompts measured, as the sources; 0.0539 of all 32"
    assert {row[0]: row[2] for row in rows}["kv_cache"] == pytest.approx(0.0412 / 0.04)
    assert "of the first 16 prompts measured" in " ".join(printed(shown).split())
    assert "of the first 16 prompts measured" in to_markdown(shown)
    assert "103 % of the total tv" in next_steps(shown)[0]


def test_the_total_of_all_prompts_needs_no_words():
    assert source_rows(rejected())[-1][4] == ""


@pytest.mark.parametrize("shares", [{}, sources()])
def test_what_the_split_leaves_out_is_said(shares):
    note = "weights: engine_args.quantization: fp8 cannot be simulated"
    shown = report(measurement(0.0424, **shares, sources_notes=[note]))
    assert note in " ".join(printed(shown).split())
    assert f"- {escape(note)}\n" in to_markdown(shown)


def test_nothing_measured_well_still_prints():
    one = measurement(float("nan"), prompts=8, by_position=[], position_p=None, non_finite_tokens=3)
    text = printed(report(one))
    assert text.startswith("REJECT")
    assert "not finite" in text


@pytest.mark.parametrize(
    ("change", "p", "end"),
    [
        (0.01, 0.0004, ", grows (p < 0.001)"),
        (-0.01, 0.049, ", shrinks (p 0.049)"),
        (0.01, 0.05, ", no clear trend (p 0.05)"),
        (0.01, 1.0, ", no clear trend (p 1)"),
        (None, None, " (112-127)"),
    ],
)
def test_a_trend_is_only_what_a_test_over_prompts_finds(change, p, end):
    shown = position_summary(measurement(0.0017, position_change=change, position_p=p))
    assert shown.endswith(end)


def test_tiny_numbers_still_fit():
    lines = printed(report(measurement(4e-12, provenance=[]))).splitlines()
    assert [line for line in lines if line.startswith(("  token_mult", "  k3 *"))] == snapshot(
        [
            "  k3 *                   4.0e-12  4e-13  6.4e-11   1.5e-10   3.3e-10  sampled",
            "  token_mult_prob_error        1   0.06      1.5       3.6      7.65  sampled",
        ]
    )


def test_clipped_mean_lies_outside_of_the_interval():
    shown = report(measurement(0.1))
    verdict = shown.verdict.model_copy(update={"clipped": 30, "interval": (0.05, 0.07)})
    assert printed(shown.model_copy(update={"verdict": verdict}), encoding="ascii").splitlines()[6:10] == snapshot(
        [
            "          models)",
            "",
            "  0 --------|--------------------==============================o-------- 0.115",
            "            ^ limit 0.015",
        ]
    )


class TestBar:
    @given(
        st.floats(0, 100),
        st.floats(0, 100),
        st.floats(0, 1000),
        st.floats(1e-6, 100),
        st.integers(40, 120),
        st.booleans(),
    )
    def test_fits_and_shows_limit_and_mean(self, mean, below, above, limit, width, ascii_only):
        page = Page(width, ascii_only)
        lower = max(mean - below, 0)
        bar, label = (line.plain for line in page.interval(mean=mean, lower=lower, upper=mean + above, limit=limit))
        assert max(len(bar), len(label)) <= width
        assert bar.count(page.glyphs.mean) == 1
        assert "limit" in label
        arrow = bar[label.index("^")]
        assert arrow in (page.glyphs.limit, page.glyphs.mean)

    def test_an_interval_that_runs_out_of_the_picture(self):
        bar, _ = Page(60, True).interval(mean=0.01, lower=0.0, upper=5.0, limit=0.015)
        assert bar.plain == snapshot("  0 ============o=====|===========================> 0.0375")

    @pytest.mark.parametrize("values", [[], [0, 0], [1, float("nan"), 3], [-1, 2]])
    def test_sparkline_has_one_character_per_value(self, values):
        assert len(Page(80, True).sparkline(values)) == len(values)


class TestNextSteps:
    def share(self, source, tv):
        return SourceShare(source=source, how="simulated", tv=tv, kl=tv, prompt_values=[tv] * 8, detail="")

    @pytest.mark.parametrize(
        ("source", "advice"),
        [
            ("kv_cache", "kv_cache_dtype_skip_layers"),
            ("weights", "quantization.ignore"),
            ("activations", "W8A16"),
            ("staleness", "more often"),
            ("noise", "noise.weights"),
            ("dtype", "rollout.dtype: bfloat16"),
        ],
    )
    def test_reject_names_the_largest_source_and_a_thing_to_try(self, source, advice):
        shares = [self.share("noise" if source != "noise" else "dtype", 0.01), self.share(source, 0.03)]
        (step,) = next_steps(report(measurement(0.0424, sources=shares), quantization="FP8_DYNAMIC"))
        assert f"largest source is {source} (56 % of the total tv)" in step
        assert advice in step

    def test_e5m2_has_a_better_sibling(self):
        (step,) = next_steps(report(measurement(0.114, **sources(0.114)), kv_cache_dtype="fp8_e5m2"))
        assert "fp8_e4m3" in step

    def test_reject_without_sources(self):
        assert next_steps(report(measurement(0.0424))) == snapshot(
            ["`opdcheck admit --sources` says which part of the configuration is to blame."]
        )

    def test_reject_of_a_candidate_that_changes_nothing(self):
        """The split was made and found no source: it is the kernels, and `--sources` would say nothing new."""
        (step,) = next_steps(report(measurement(0.0424, sources_prompts=32)))
        assert step.startswith("The unperturbed student is already this far off in this engine")
        note = {"sources_notes": ["weights: engine_args.quantization: fp8 is vLLM's own"]}
        (step,) = next_steps(report(measurement(0.0424, sources_prompts=32, **note)))
        assert step.startswith("What remains of the configuration cannot be split")

    def test_inconclusive_estimates_how_many_prompts_decide(self):
        assert next_steps(report(measurement(0.0135, prompts=16))) == snapshot(
            ["Measure more prompts (`workload.num_prompts` and `decision.max_prompts`): about 48 might decide."]
        )

    def test_too_near_to_decide(self):
        assert next_steps(inconclusive()) == snapshot(
            [
                "The mean is so near the limit 0.015 that more prompts will hardly decide; a configuration with less mismatch will."
            ]
        )

    def test_clipped_prompts_are_to_be_looked_at(self):
        values = [0.0001] * 256
        values[::60] = [0.08] * 5
        measured = measurement(0.0017, prompts=256)
        changed = {"prompt_values": {**measured.prompt_values, "k3": values}}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("opdcheck.verdict.Gate", Gate)
            look, more = next_steps(report(measured.model_copy(update=changed)))
        assert "`prompt_rows`" in look
        assert "rarer than 1 %; `limits.tails`" in more

    def test_another_limited_metric_needs_more_prompts(self):
        against = budget(limits={"total": {"k3": 0.0017, "tv": 0.05}}, floor=None)
        (step,) = next_steps(report(measurement(0.0017, prompts=64), against=against))
        assert step.startswith("Measure more prompts")

    def test_not_applied(self):
        part = Part(part="activations", how="not applied", detail="int8")
        assert next_steps(report(measurement(0.0017, provenance=[part]))) == snapshot(
            [
                "Measure the candidate as it would run: a GPU engine that has these kernels, or `engine: transformers`, which simulates every part."
            ]
        )

    def test_unmeasured_source(self):
        limited = budget(limits={"total": {"k3": 0.015}, "per_source": {"kv_cache": {"k3": 0.01}}})
        assert next_steps(report(measurement(0.0017), against=limited)) == snapshot(
            ["Run again with `--sources`; per-source limits must be on the decision metric."]
        )

    def test_admitted_needs_nothing(self):
        assert next_steps(admitted()) == []
