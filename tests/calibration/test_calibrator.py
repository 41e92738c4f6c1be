"""A whole calibration, reduced: killed, gone on with, repeated, shown, and used by `admit`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

import pytest
import torch
from addition import ADDITION

from opdcheck.admission import admit
from opdcheck.budget import load_budget
from opdcheck.calibration.backtest import backtest
from opdcheck.calibration.calibrator import Calibrator, plan
from opdcheck.calibration.file import load_calibration
from opdcheck.calibration.ladder import Level
from opdcheck.calibration.store import LevelMismatch
from opdcheck.config import ModelRef
from opdcheck.errors import ConfigError, EngineError
from opdcheck.models import load_causal_lm
from opdcheck.perturb.noise import add_weight_noise
from opdcheck.progress import Silent
from opdcheck.report.backtest import summary
from opdcheck.report.calibration import finding

TEXT = f"""
student: {{path: student, dtype: float32, device: cpu}}
teacher: {{path: {ADDITION}/teacher}}
rollout: {{engine: transformers, dtype: float32}}
method: {{learning_rate: 3.0e-4, beta: 0.5, steps: 14, batch_size: 12, schedule: linear}}
workload: {{prompts: {ADDITION}/train.jsonl, num_prompts: 64, max_completion_length: 34}}
evaluation: {{prompts: {ADDITION}/held_out.jsonl, num_prompts: 32, every: 14}}
verifier: {{pattern: ";([0-9]+)$"}}
ladder:
  noise: [0.03, 0.1, 0.6, 1.0]
  staleness: [2]
seeds: [0, 1, 2]
mismatch_prompts: 16
margin: 0.3
budget: budgets/pair.yaml
runs: runs
"""

CANDIDATE = f"""
student: {{path: student, dtype: float32, device: cpu}}
teacher: {{path: {ADDITION}/teacher}}
rollout: {{engine: transformers, dtype: float32, %s}}
workload: {{prompts: {ADDITION}/train.jsonl, num_prompts: 64, max_completion_length: 34}}
budget: budgets/pair.yaml
"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student that gains within a few steps: the teacher with noise on its weights."""
    folder = tmp_path_factory.mktemp("pair")
    model = load_causal_lm(ModelRef(path="teacher"), ADDITION, dtype="float32", device="cpu").model
    add_weight_noise(model, 0.3, 7)
    model.save_pretrained(folder / "student")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(ADDITION / "teacher" / name, folder / "student" / name)
    (folder / "calibration.yaml").write_text(TEXT)
    return folder


def opdcheck(*arguments: str, folder: Path) -> subprocess.Popen[str]:
    environment = {**os.environ, "OPDCHECK_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
    return subprocess.Popen(
        [sys.executable, "-m", "opdcheck", *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def is_running(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def trainings(folder: Path) -> list[Path]:
    return sorted((folder / "runs").glob("*-seed*.json"))


@pytest.fixture(scope="module")
def budget_file(pair: Path) -> Path:
    """Calibrated by a command that was killed once, and then by the same command, two trainings at a time."""
    killed = opdcheck("calibrate", "calibration.yaml", "--jobs", "2", folder=pair)
    deadline = time.monotonic() + 600
    while not trainings(pair) and time.monotonic() < deadline:
        time.sleep(0.2)
    helpers = Path(f"/proc/{killed.pid}/task/{killed.pid}/children").read_text().split()
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert helpers
    while any(map(is_running, helpers)) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not any(map(is_running, helpers)), "processes of a killed calibration go on"
    kept = {path.name: path.read_bytes() for path in trainings(pair)}
    assert kept
    assert len(kept) < 18
    again = opdcheck("calibrate", "calibration.yaml", "--jobs", "2", folder=pair)
    out, log = again.communicate()
    assert again.returncode == 0, log
    assert "of 18, about" in log
    assert "Limit tv" in out
    for name, content in kept.items():
        assert (pair / "runs" / name).read_bytes() == content, "a finished training was done again"
    return pair / "budgets" / "pair.yaml"


@pytest.mark.slow
class TestCalibrate:
    def test_budget(self, budget_file: Path) -> None:
        budget = load_budget(budget_file)
        assert budget.provenance == "calibrated"
        assert budget.fit is not None
        assert budget.fit.gain_lower > 0
        limit = budget.limits.total["tv"]
        levels = {one.level: one.mismatch["tv"] for one in budget.evidence}
        assert levels["unperturbed"] < 1e-6
        assert 0 < limit < levels["noise 1"]  # a policy with that much noise teaches this student less
        assert len(budget.evidence) == 6
        assert all(len(one.final_kl) == 3 for one in budget.evidence)
        assert budget.method is not None
        assert budget.method.steps == 14
        assert finding(budget).startswith("Limit tv")

    def test_picture_and_page_stand_beside_it(self, budget_file: Path) -> None:
        assert budget_file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
        page = budget_file.with_suffix(".html").read_text()
        assert "<svg" in page
        assert "http://" not in page.split("</svg>")[1]
        assert "<script" not in page
        assert "noise 0.6" in page

    def test_the_same_trainings_give_the_same_bytes(self, pair: Path, budget_file: Path) -> None:
        """Two trainings are lost and done again: the same numbers, so the same file."""
        before = budget_file.read_bytes()
        for path in trainings(pair)[:2]:
            path.unlink()
        again = opdcheck("calibrate", "calibration.yaml", folder=pair)
        assert again.wait() == 0
        assert budget_file.read_bytes() == before

    @pytest.mark.usefixtures("budget_file")
    def test_dry_run_knows_what_is_left(self, pair: Path) -> None:
        planned = plan(pair / "calibration.yaml")
        assert (planned.trainings, planned.finished) == (18, 18)
        trainings(pair)[0].rename(pair / "kept.json")
        try:
            run = opdcheck("calibrate", "calibration.yaml", "--dry-run", folder=pair)
            out, _ = run.communicate()
            assert run.returncode == 0
            assert "18 trainings: 6 levels x 3 seeds" in out
            assert "finished already: 17" in out
            assert "time left: about" in out
        finally:
            (pair / "kept.json").rename(next(iter(self._name(pair))))

    @staticmethod
    def _name(pair: Path) -> list[Path]:
        stored = json.loads((pair / "kept.json").read_text())
        slug = stored["level"].replace(" ", "-")
        return [pair / "runs" / f"{slug}-seed{stored['seed']}-{stored['key'][:8]}.json"]

    @pytest.mark.usefixtures("budget_file")
    def test_show(self, pair: Path) -> None:
        shown = opdcheck("budget", "show", "budgets/pair.yaml", folder=pair)
        out, _ = shown.communicate()
        assert shown.returncode == 0
        assert "calibrated budget" in out
        assert "noise 0.6" in out
        assert max(map(len, out.splitlines())) <= 80

    def test_admit_takes_the_steps_of_a_lag(
        self, pair: Path, budget_file: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("OPDCHECK_CACHE", str(pair / "cache"))
        torch.set_num_threads(1)
        (pair / "lag.yaml").write_text(CANDIDATE % "staleness: {lag: 2}")
        report = admit(pair / "lag.yaml")
        evidence = next(one for one in load_budget(budget_file).evidence if one.level == "staleness 2")
        assert report.measurement.metrics["tv"].mean > 0
        assert report.measurement.metrics["tv"].mean == pytest.approx(evidence.mismatch["tv"], rel=0.5)
        (part,) = [part for part in report.measurement.provenance if part.part == "staleness"]
        assert part.detail == (
            "2 optimizer steps behind, taken by opdcheck: learning rate 0.0003, batch 12, beta 0.5, after 10 others"
        )

    def test_a_lag_may_be_longer_than_the_calibrations_trainings(
        self, pair: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("OPDCHECK_CACHE", str(pair / "cache"))
        torch.set_num_threads(1)
        (pair / "long.yaml").write_text(CANDIDATE % "staleness: {lag: 16}")
        assert admit(pair / "long.yaml").measurement.metrics["tv"].mean > 0

    @pytest.mark.usefixtures("budget_file")
    def test_backtest_trains_only_what_it_can_and_as_the_budget_was_calibrated(self, pair: Path) -> None:
        configs = pair / "refused"
        configs.mkdir()
        text = CANDIDATE.replace("path: student", "path: ../student").replace("budgets/", "../budgets/")
        (configs / "other.yaml").write_text(text % "model: {path: ../student}")
        with pytest.raises(ConfigError, match=r"other\.yaml: rollout\.model: no training can sample from"):
            backtest(pair / "budgets" / "pair.yaml", configs, seeds=2)
        changed = pair / "changed.yaml"
        changed.write_text(TEXT.replace("steps: 14", "steps: 15"))
        with pytest.raises(ConfigError, match="changed since budget pair was calibrated: steps 14 -> 15"):
            backtest(pair / "budgets" / "pair.yaml", configs, seeds=2, calibration_file=changed)

    def test_backtest(self, pair: Path, budget_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("OPDCHECK_CACHE", str(pair / "cache"))
        configs = pair / "configs"
        configs.mkdir(exist_ok=True)
        text = CANDIDATE.replace("path: student", "path: ../student").replace("budgets/", "../budgets/")
        (configs / "mild.yaml").write_text(text % "noise: {weights: 0.003, seed: 3}")
        (configs / "wild.yaml").write_text(text % "noise: {weights: 1.5, seed: 3}")
        (configs / "stale.yaml").write_text(text % "staleness: {lag: 2}")
        result = backtest(budget_file, configs, seeds=2)
        verdicts = {row.name: row.verdict for row in result.rows}
        assert (verdicts["mild"], verdicts["wild"]) == ("admit", "reject")
        assert result.seeds == [3, 4]
        assert not {row.name: row.passed for row in result.rows}["wild"]
        assert "held-out configurations agree" in summary(result)
        # 14 steps of 12 completions, 2 seeds, 3 configurations; 10 steps until a training is on its way, then the lag
        asked = sum(row.prompts for row in result.rows) + (10 + 2) * 12
        assert result.gate_share == pytest.approx(asked / (14 * 12 * 2 * 3))


def test_a_full_disk_keeps_what_is_finished(calibration_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calibrator = Calibrator(load_calibration(calibration_file), Silent())

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("opdcheck.calibration.store.write_atomically", full)
    with pytest.raises(EngineError, match="No space left on device") as caught:
        calibrator.mismatch(calibrator.levels[0])
    assert "the same command goes on" in str(caught.value)


def test_a_mismatch_that_lacks_a_metric_is_measured_again(
    calibration_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrator = Calibrator(load_calibration(calibration_file), Silent())
    measured = []

    def measure(level: Level, key: str) -> LevelMismatch:
        measured.append(key)
        return LevelMismatch(key=key, level=level.name, metrics={}, prompts=16, tokens=512)

    monkeypatch.setattr(calibrator, "_measure", measure)
    for _ in range(2):
        calibrator.mismatch(calibrator.levels[0])
    assert len(measured) == 1
    monkeypatch.setattr("opdcheck.calibration.calibrator.Metric", Literal["tv", "kl", "k3", "abs_dlogp", "new"])
    calibrator.mismatch(calibrator.levels[0])
    assert len(set(measured)) == 2


def test_a_teacher_with_another_vocabulary(calibration_file: Path, tiny_student: Path) -> None:
    text = calibration_file.read_text().replace(
        f"teacher: {{path: {ADDITION}/teacher}}", f"teacher: {{path: {tiny_student}}}"
    )
    calibration_file.write_text(text)
    calibrator = Calibrator(load_calibration(calibration_file), Silent())
    with pytest.raises(ConfigError, match="its vocabulary is not the student's") as caught:
        calibrator.laboratory.teacher  # noqa: B018
    assert "same family" in str(caught.value)


def test_a_declared_budget_cannot_be_backtested(tmp_path: Path) -> None:
    stored = Path(__file__).parents[2] / "budgets" / "smollm2-135m.yaml"
    with pytest.raises(ConfigError, match="was declared, so there are no trainings"):
        backtest(stored, tmp_path)


def test_two_levels_of_one_name_are_refused(calibration_file: Path) -> None:
    """Such as two schemes that differ in what a short name leaves out."""
    text = calibration_file.read_text()
    schemes = "ladder:\n  quantization:\n" + "".join(
        f"    - config_groups: {{w: {{targets: [{target}], weights: {{num_bits: 8, type: int}}}}}}\n"
        for target in ("Linear", "'re:.*mlp.*'")
    )
    calibration_file.write_text(text.replace("ladder:\n", schemes))
    with pytest.raises(ConfigError, match=r"ladder: expected levels of different names, found two called `8-bit int"):
        plan(calibration_file)
