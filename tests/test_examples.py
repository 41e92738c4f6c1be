"""The files under examples/: they load, and what is held out was not calibrated or trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from opdcheck.calibration.file import Calibration, load_calibration
from opdcheck.calibration.ladder import levels
from opdcheck.config import Candidate, load_candidate
from opdcheck.yamlfile import load

EXAMPLES = Path(__file__).parents[1] / "examples"
ADDITION = EXAMPLES / "addition"
PRUNED = EXAMPLES / "smollm2-pruned"
HELD_OUT = sorted((ADDITION / "configs").glob("*.yaml"))


def rows(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("name", ["calibration.yaml", "calibration-rl.yaml", "calibration-accuracy.yaml"])
def test_calibrations_of_the_addition_pair(name):
    calibration = load_calibration(ADDITION / name).value
    assert len(levels(calibration)) >= 6
    assert len({level.source for level in levels(calibration)} - {"none"}) >= 3


def test_the_methods_climb_the_same_ladder():
    ours, rl = (load_calibration(ADDITION / name).value for name in ("calibration.yaml", "calibration-rl.yaml"))
    assert rl.method.kind == "rl"
    assert rl.ladder == ours.ladder
    assert (rl.student, rl.rollout, rl.workload) == (ours.student, ours.rollout, ours.workload)


@pytest.mark.parametrize("file", HELD_OUT, ids=lambda file: file.stem)
def test_held_out_configurations_load(file):
    assert load_candidate(file).value.budget is not None


def test_held_out_configurations_are_many_and_no_level_of_the_ladder():
    calibration = load_calibration(ADDITION / "calibration.yaml").value
    calibrated = [level.rollout for level in levels(calibration)]
    held_out = [load(file, Candidate).rollout for file in HELD_OUT]
    assert len(held_out) >= 30
    assert not [file.name for file, rollout in zip(HELD_OUT, held_out, strict=True) if rollout in calibrated]
    sources = [rollout.sources for rollout in held_out]
    assert {source for one in sources for source in one} == {"quantization", "noise", "staleness"}
    assert sum(len(one) > 1 for one in sources) >= 10  # mixtures


@pytest.mark.parametrize("pair", [ADDITION, PRUNED], ids=lambda pair: pair.name)
def test_prompts_to_judge_on_are_not_trained_on(pair):
    calibration = load(pair / "calibration.yaml", Calibration)

    def texts(file: str, count: int | None) -> set[str]:
        return {json.dumps(row.get("prompt", row.get("messages"))) for row in rows(pair / file)[:count]}

    trained = texts(calibration.workload.prompts, calibration.workload.num_prompts)
    held_out = texts(calibration.evaluation.prompts, calibration.evaluation.num_prompts)
    assert trained
    assert held_out
    assert not trained & held_out


@pytest.mark.smollm2
def test_the_pruned_pairs_calibration():
    pytest.importorskip("torch")
    calibration = load_calibration(PRUNED / "calibration.yaml").value
    assert len({level.source for level in levels(calibration)} - {"none"}) >= 2
