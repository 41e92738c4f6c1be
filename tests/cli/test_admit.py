"""`opdcheck admit` as a user meets it: exit codes, files, caches, interruptions."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from opdcheck.rollouts import Prompt
from opdcheck.session import in_random_order

NOISE = "noise: {weights: 0.5}"


def test_the_unperturbed_student_is_admitted(project):
    ran, report = project.admit(project.candidate("clean"))
    assert ran.code == 0, ran.err
    assert report["verdict"]["decision"] == "admit"
    assert "ADMIT" in ran.out
    assert report["measurement"]["metrics"]["tv"]["mean"] < 1e-4  # float32, same weights: decode against prefill


def test_a_noisy_student_is_rejected_and_split_by_source(project):
    ran, report = project.admit(project.candidate("noisy", NOISE))
    assert ran.code == 1, ran.err
    assert "REJECT" in ran.out
    [share] = report["measurement"]["sources"]
    total = report["measurement"]["metrics"]["tv"]["mean"]
    assert share["source"] == "noise"
    # Noise is all there is: alone it must explain the total, up to decode against prefill in float32.
    assert share["tv"] == pytest.approx(total, rel=1e-3)
    assert abs(report["measurement"]["left_over"]) < 1e-3 * total


def test_stages_are_told_in_the_order_in_which_they_happen(project):
    candidate = project.candidate("noisy", NOISE)
    ran, _ = project.admit(candidate, "--fresh")
    stages = [line for line in ran.err.splitlines() if not line.startswith("prompts ")]
    assert stages == [
        "checking candidate and budget",
        "starting the rollout engine: transformers",
        "sampling rollouts",
        "loading the student as the trainer holds it",
        "scoring with the trainer",
        "splitting the mismatch by source",
        "source noise: scoring the student with this part alone",
    ]
    for file in (project.folder / "cache" / "splits").iterdir():
        file.unlink()
    again = project.admit(candidate)[0].err.splitlines()  # the rounds come from the cache, the split does not
    loading = again.index("loading the student as the trainer holds it")
    assert again[loading + 1 :] == stages[-2:]


def test_sources_are_split_on_request_only(project):
    assert project.admit(project.candidate("clean"))[1]["measurement"]["sources"] == []
    candidate = project.candidate("int8", "quantization: W8A8")
    shares = project.admit(candidate, "--sources")[1]["measurement"]["sources"]
    assert [share["source"] for share in shares] == ["weights", "activations"]


def test_the_verdict_stands_alike_in_json_screen_markdown_and_exit_code(project):
    summary = project.folder / "summary.md"
    summary.write_text("earlier step\n")
    project.monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    markdown = project.folder / "report.md"
    ran, report = project.admit(project.candidate("noisy", NOISE), "--markdown", markdown)
    assert (ran.code, report["verdict"]["exit_code"], report["verdict"]["decision"]) == (1, 1, "reject")
    assert "reject" in markdown.read_text().lower()
    assert summary.read_text().startswith("earlier step\n")
    assert markdown.read_text() in summary.read_text()


def test_json_on_stdout_is_json_and_nothing_else(project):
    ran = project.run("admit", project.candidate("clean"), "--json", "-")
    assert json.loads(ran.out)["verdict"]["decision"] == "admit"
    assert "ADMIT" in ran.err


def test_observe_exits_0_and_says_so(project):
    ran, report = project.admit(project.candidate("noisy", NOISE), "--observe")
    assert ran.code == 0
    assert report["verdict"]["decision"] == "reject"
    assert "observe" in ran.out.lower()


def test_too_few_prompts_are_inconclusive(project):
    # Near the limit the interval of four prompts covers it.
    candidate = project.candidate("near", "noise: {weights: 0.05}")
    limit = project.admit(candidate, "--fresh")[1]["measurement"]["metrics"]["k3"]["mean"]
    budget = (project.folder / "budget.yaml").read_text().replace("k3: 0.02", f"k3: {limit!r}")
    (project.folder / "budget.yaml").write_text(budget)
    ran, report = project.admit(candidate, "--max-prompts", "4")
    assert ran.code == 3
    assert report["verdict"]["decision"] == "inconclusive"


@pytest.mark.parametrize("flags", [[], ["--observe"], ["--max-prompts", "24"]])
def test_fewer_prompts_than_a_verdict_takes_are_found_before_the_student_is_loaded(project, flags):
    file = project.folder / "prompts.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:3]))
    project.monkeypatch.setattr("opdcheck.models.load_causal_lm", lambda *_, **__: pytest.fail("loaded"))
    ran, _ = project.admit(project.candidate("few"), *flags)
    assert ran.code == 2, ran.err
    assert "few.yaml:6: workload.prompts: expected at least decision.min_prompts (4) prompts, found 3: there" in ran.err


def test_as_many_prompts_as_a_verdict_takes_are_enough(project):
    file = project.folder / "prompts.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:4]))
    assert project.admit(project.candidate("four"))[1]["measurement"]["prompts"] == 4


SOON = ("--alpha", "0.5")
"""Decides on fewer than the 24 prompts that there are."""


def limit(project, **limits):
    """Changes the budget's limits."""
    from opdcheck.budget import load_budget, write_budget

    file = project.folder / "budget.yaml"
    budget = load_budget(file)
    write_budget(file, budget.model_copy(update={"limits": budget.limits.model_copy(update=limits), "floor": None}))


def test_a_second_limited_metric_is_measured_until_it_is_decided(project):
    candidate = project.candidate("near", "noise: {weights: 0.05}")
    found = project.admit(candidate, "--min-prompts", "24", "--fresh")[1]["measurement"]["metrics"]
    k3, tv = found["k3"]["mean"], found["tv"]["mean"]
    limit(project, total={"k3": 100 * k3})
    assert project.admit(candidate, *SOON)[1]["measurement"]["prompts"] < 24
    limit(project, total={"k3": 100 * k3, "tv": tv})
    ran, report = project.admit(candidate, *SOON, "--metric", "k3")
    assert (ran.code, report["measurement"]["prompts"]) == (3, 24)
    [reason] = [reason for reason in report["verdict"]["reasons"] if reason["effect"] == "inconclusive"]
    assert reason["code"] == "other_total"


def test_a_limited_source_is_split_on_more_prompts_until_it_is_decided(project):
    candidate = project.candidate("near", "noise: {weights: 0.05}")
    k3 = project.admit(candidate, "--min-prompts", "24", "--fresh")[1]["measurement"]["metrics"]["k3"]["mean"]
    limit(project, total={"k3": 100 * k3}, per_source={"noise": {"k3": 50 * k3}})
    ran, report = project.admit(candidate, *SOON)
    few = report["measurement"]["prompts"]
    assert (ran.code, few < 24, report["measurement"]["sources_prompts"]) == (0, True, few)
    limit(project, total={"k3": 100 * k3}, per_source={"noise": {"k3": k3}})
    ran, report = project.admit(candidate, *SOON)
    assert ran.code == 3
    assert report["measurement"]["prompts"] == report["measurement"]["sources_prompts"] == 24
    assert len(report["measurement"]["sources"][0]["prompt_values"]) == 24


def test_prompts_are_measured_in_a_random_order_and_found_again(project):
    measured = project.admit(project.candidate("clean"), "--min-prompts", "24")[1]["measurement"]
    drawn = in_random_order([Prompt(row, []) for row in range(24)], seed=0)
    assert measured["prompt_rows"] == [prompt.index for prompt in drawn]


@pytest.mark.parametrize("command", [["admit"], ["budget", "verify"]])
def test_without_vllm_the_first_thing_said_is_how_to_install_it(project, command):
    """And not that the budget was made with another engine."""
    import importlib.util

    find = importlib.util.find_spec
    project.monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "vllm" else find(name))
    candidate = project.candidate("vllm", **{"engine: transformers": "engine: vllm"})
    ran = project.run(*command, candidate)
    assert ran.code == 2
    assert "vllm.yaml:3: rollout.engine: it is vllm, but vLLM is not installed here" in ran.err
    assert "pip install" in ran.err


def test_a_stale_checkpoint_of_another_shape_is_pointed_at(project):
    from transformers import AutoConfig, LlamaForCausalLM

    config = AutoConfig.from_pretrained(project.student)
    config.intermediate_size = 64
    LlamaForCausalLM(config).save_pretrained(project.folder / "stale")
    ran, _ = project.admit(project.candidate("stale", "staleness:\n  checkpoint: ./stale"))
    assert ran.code == 2, ran.err
    assert ran.err.splitlines()[-1].startswith("error: ")
    assert "stale.yaml:6: rollout.staleness.checkpoint: ./stale has model.layers.0" in ran.err


@pytest.mark.parametrize("size", [200, 300])
@pytest.mark.parametrize(
    ("rollout", "line"),
    [
        ("model:\n  path: ./other", "5: rollout.model"),
        ("staleness:\n  checkpoint: ./other", "6: rollout.staleness.checkpoint"),
    ],
)
def test_another_vocabulary_is_found_before_any_weights_are_loaded(project, size, rollout, line):
    from transformers import AutoConfig, LlamaForCausalLM

    config = AutoConfig.from_pretrained(project.student)
    config.vocab_size = size
    LlamaForCausalLM(config).save_pretrained(project.folder / "other")
    project.monkeypatch.setattr("opdcheck.models.load_causal_lm", lambda *_, **__: pytest.fail("loaded"))
    ran, _ = project.admit(project.candidate("other", rollout))
    assert ran.code == 2, ran.err
    assert f"other.yaml:{line}: ./other has a vocabulary of {size} tokens, the student one of 260" in ran.err


def test_the_second_run_answers_from_the_cache(project):
    candidate = project.candidate("noisy", NOISE)
    first = project.admit(candidate)[1]
    second = project.admit(candidate)[1]
    assert (first["measurement"]["from_cache"], second["measurement"]["from_cache"]) == (False, True)
    assert first["verdict"] == second["verdict"]
    assert first["measurement"]["metrics"] == second["measurement"]["metrics"]


def test_fresh_measures_again(project):
    candidate = project.candidate("clean")
    project.admit(candidate)
    assert project.admit(candidate, "--fresh")[1]["measurement"]["from_cache"] is False


def test_changed_weights_make_the_budget_invalid(project):
    import torch
    from safetensors.torch import load_file, save_file

    other = project.folder / "other"
    shutil.copytree(project.student, other)
    tensors = load_file(other / "model.safetensors")
    name = next(iter(tensors))
    tensors[name] = tensors[name] + torch.finfo(torch.float32).eps
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    candidate = project.candidate("changed", **{str(project.student): str(other)})
    ran, report = project.admit(candidate)
    assert ran.code == 3
    assert report["verdict"] is None
    assert "student.weights" in ran.err

    ran, report = project.admit(candidate, "--accept-stale", "student.weights")
    assert ran.code == 0
    assert "student.weights" in json.dumps(report["verdict"])
    assert "student.weights" in ran.out


def test_a_candidate_without_a_budget_has_no_verdict(project):
    ran, _ = project.admit(project.candidate("none", **{"budget: budget.yaml": ""}))
    assert ran.code == 3
    assert "budget" in ran.err


@pytest.mark.parametrize(
    ("rollout", "line", "part"),
    [
        ("kv_cache_dtyp: fp8", 5, "kv_cache_dtype"),
        ("kv_cache_dtype: fp9", 5, "fp8"),
        ("quantization: FP8_DYNAMICS", 5, "FP8_DYNAMIC"),
        ("quantization: {scheme: W4A16, group_size: 96}", 5, "group"),
        ("quantization: {scheme: W8A8, ignore: ['re:(']}", 5, "not a regular expression"),
        ("quantization: {config_groups: {g: {targets: [Linear], weights: {num_bits: 1}}}}", 5, "at least 2"),
        ("quantization: {config_groups: {g: {targets: [Linear]}}}", 5, "quantizes nothing"),
        ("kv_cache_dtype: fp8\nkv_cache_dtype_skip_layers: [7]", 6, "layer"),
        ("noise: {weights: -1}", 5, "weights"),
        ("engine_args: {enforce_eager: true}", 5, "vllm"),
    ],
)
def test_a_wrong_key_or_value_names_file_line_and_what_was_expected(project, rollout, line, part):
    candidate = project.candidate("wrong", rollout)
    ran, report = project.admit(candidate)
    assert ran.code == 2, ran.err
    assert f"wrong.yaml:{line}: " in ran.err
    assert part in ran.err
    assert "Traceback" not in ran.err
    assert (ran.out, report["verdict"]) == ("", None)


@pytest.mark.parametrize("flags", [["--alpha", "2"], ["--metric", "k4"], ["--max-prompts", "0"], ["--nonsense"]])
def test_wrong_flags_exit_2(project, flags):
    assert project.admit(project.candidate("clean"), *flags)[0].code == 2


def test_a_missing_file_exits_2(project):
    ran = project.run("admit", project.folder / "nowhere.yaml")
    assert ran.code == 2
    assert "nowhere.yaml" in ran.err


def test_an_unwritable_report_is_found_before_the_measurement(project):
    project.monkeypatch.setattr("opdcheck.admission.admit", lambda *_, **__: pytest.fail("measured"))
    ran = project.run("admit", project.candidate("clean"), "--json", project.folder)
    assert ran.code == 2
    assert "--json" in ran.err


def test_an_unexpected_exception_exits_4_and_is_no_verdict(project):
    def crash(*_, **__):
        raise RuntimeError("kernel panic")

    project.monkeypatch.setattr("opdcheck.admission.admit", crash)
    ran = project.run("admit", project.candidate("clean"))
    assert ran.code == 4
    assert "kernel panic" in ran.err
    assert ran.out == ""


def test_an_interrupted_run_goes_on_where_it_stopped(project):
    from opdcheck import measure

    candidate = project.candidate("noisy", NOISE)
    measured = []
    real = measure.measure_round

    def interrupted_after_one(session, prompts):
        if measured:
            raise KeyboardInterrupt
        measured.append([prompt.index for prompt in prompts])
        return real(session, prompts)

    with project.monkeypatch.context() as patch:
        patch.setattr(measure, "measure_round", interrupted_after_one)
        ran, report = project.admit(candidate, "--min-prompts", "8")
    assert ran.code == 130
    assert report["verdict"] is None
    with project.monkeypatch.context() as patch:
        patch.setattr(measure, "measure_round", lambda *a: measured.append([p.index for p in a[1]]) or real(*a))
        assert project.admit(candidate, "--min-prompts", "8")[0].code == 1
    drawn = [prompt.index for prompt in in_random_order([Prompt(row, []) for row in range(24)], seed=0)]
    assert measured[:2] == [drawn[:4], drawn[4:8]]


@pytest.mark.slow
def test_kill_9_loses_at_most_the_round_in_flight(project):
    candidate = project.candidate("noisy", NOISE)
    command = [sys.executable, "-m", "opdcheck", "admit", str(candidate), "--min-prompts", "24"]
    rounds = project.folder / "cache" / "rounds"
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        while len(list(rounds.glob("*.npz"))) < 2 and process.poll() is None:
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    kept = {file: file.read_bytes() for file in rounds.glob("*.npz")}
    assert len(kept) >= 2
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 1, done.stderr
    assert len(list(rounds.glob("*.npz"))) == 6
    assert {file: file.read_bytes() for file in kept} == kept
