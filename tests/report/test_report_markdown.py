# ruff: noqa: E501  (snapshots)
"""The summary for CI."""

import re

import pytest
from inline_snapshot import snapshot
from samples import NormalGate, admitted, inconclusive, measurement, rejected, report

from opdcheck.measurement import Part
from opdcheck.report.markdown import code, escape, to_markdown


@pytest.fixture(autouse=True)
def simple_gate(monkeypatch):
    monkeypatch.setattr("opdcheck.verdict.Gate", NormalGate)


def test_reject():
    assert to_markdown(rejected()) == snapshot("""\
## opdcheck: REJECT

Candidate `examples/smollm2/kv_fp8_e4m3.yaml`

|  | reason |
|---|---|
| **reject** | k3 0.0424 nats/token (95 % interval 0.035 to 0.0498) is above the limit 0.015 |
| **note** | limit declared, not calibrated: its cost in quality was not measured for this student (reason given: prime-rl's acceptance rule for new models) |

### Next

- The largest source is kv\\_cache (76 % of the total tv). Try `kv_cache_dtype_skip_layers` for the most sensitive layers, or `kv_cache_dtype: auto`.

### Sources, each alone, on the same tokens

| source | tv | share | how |  |
|---|---:|---:|---|---|
| kernel | 0.0108 | 20 % | real | floor, from the budget |
| kv\\_cache | 0.0412 | 76 % | simulated | fp8\\_e4m3, one scale of 1.0 per tensor |
| left over | 0.00195 | 4 % |  | interaction, or not reproduced alone |
| total | 0.0539 | 100 % |  |  |

### Mismatch

32 prompts, 4,096 tokens, vllm 0.32.0 (cpu)

| metric | mean | s.e. | p99 | p99.9 | max | estimator |
|---|---:|---:|---:|---:|---:|---|
| tv | 0.0539 | 0.0032 | 0.27 | 0.647 | 1 | topk |
| kl | 0.0432 | 0.0026 | 0.476 | 1.14 | 2.43 | topk |
| k1 | 0.0416 | 0.0083 | 0.789 | 1.89 | 4.03 | sampled |
| **k3** \\* | 0.0424 | 0.0047 | 0.678 | 1.63 | 3.46 | sampled |
| abs\\_dlogp | 0.148 | 0.0089 | 0.741 | 1.78 | 3.78 | sampled |
| token\\_mult\\_prob\\_error | 1.16 | 0.07 | 1.75 | 4.19 | 8.91 | sampled |
| probs\\_diff | 0.0432 | 0.0026 | 0.259 | 0.623 | 1 | sampled |
| argmax\\_flip | 0.0453 | 0.0027 | 1 | 1 | 1 | exact |

- \\* decides. kl, k1, k3, abs\\_dlogp in nats/token.
- Certain, whatever the engine hides: tv 0.0523 to 0.0599, kl at least 0.0399.
- chi2\\_token 0.11, effective sample size 90 % of the tokens (no truncation).
- Kernel floor 0.0017 nats/token: 4 % of the mean comes from the kernels alone.
- 21 of 32 completions cut at the length limit.
- By position: tv 0.0378 (tokens 0-15) to 0.068 (112-127), grows (p 0.0031)

| part | how |  |
|---|---|---|
| kv\\_cache | **real** | fp8\\_e4m3 in vLLM's own kernels, scale 1.0 |

### Basis

|  |  |
|---|---|
| budget | smollm2-demo, declared 2026-12-01 (budgets/smollm2.yaml) |
| student | students/smollm2, trainer in bfloat16 |
| environment | cpu, torch 2.13.0, transformers 5.19.0, vllm 0.32.0 |
| measured | 2026-12-01T09:30:00+00:00 by opdcheck 0.1.0 in 48.2 s |

""")


@pytest.mark.parametrize("make", [admitted, rejected, inconclusive])
def test_every_table_row_has_as_many_cells_as_its_header(make):
    counts = []
    for line in to_markdown(make()).splitlines():
        if not line.startswith("|"):
            counts = []
            continue
        counts.append(len(re.findall(r"(?<!\\)\|", line)))
        assert counts[0] == counts[-1], line


@pytest.mark.parametrize(
    "name", ["a|b`c``d.yaml", "<script>x</script>", "# heading\n\n- list", "[link](http://x)", "@me"]
)
def test_names_cannot_break_out(name):
    part = Part(part="weights", how="simulated", detail=name)
    text = to_markdown(report(measurement(0.0017, provenance=[part]), file=name))
    outside_code = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", text)
    for dangerous in ("<script>", "\n# heading", "\n- list", "[link](", " @me"):
        assert dangerous not in outside_code


def test_escape():
    assert escape("a_b*c|d\ne") == r"a\_b\*c\|d e"


def test_characters_that_a_page_would_obey_are_replaced():
    name = "a\x1b[2J\u202eb\udce9.yaml"
    part = Part(part="weights", how="simulated", detail=name)
    text = to_markdown(report(measurement(0.0017, provenance=[part]), file=name))
    assert "`a\ufffd[2J\ufffdb\ufffd.yaml`" in text
    assert "a\ufffd\\[2J\ufffdb\ufffd.yaml |" in text
    text.encode()  # and can be written


def test_code_uses_longer_fences():
    assert code("plain") == "`plain`"
    assert code("a`b") == "`` a`b ``"
    assert code("a|b") == r"`a\|b`"
