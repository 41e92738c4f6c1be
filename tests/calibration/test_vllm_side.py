"""Trainings through real vLLM: reloaded weights are the ones that were trained."""

from __future__ import annotations

from pathlib import Path

import pytest

from opdcheck.calibration.calibrator import Calibrator
from opdcheck.calibration.file import load_calibration
from opdcheck.calibration.ladder import as_candidate
from opdcheck.calibration.training import Training
from opdcheck.progress import Silent

pytest.importorskip("vllm")


@pytest.mark.vllm
@pytest.mark.parametrize("extra", ["", ", noise: {weights: 0.2}"])
def test_two_steps(calibration_file: Path, extra: str) -> None:
    """Without perturbation, the second step's rollouts still come from the trainer's weights: k3 is rounding. With
    noise on the weights it is not."""
    text = calibration_file.read_text()
    engine = "rollout: {engine: vllm, dtype: float32, engine_args: {max_model_len: 64, enforce_eager: true}}"
    calibration_file.write_text(text.replace("rollout: {engine: transformers, dtype: float32}", engine))
    calibrator = Calibrator(load_calibration(calibration_file), Silent())
    candidate = as_candidate(calibrator.calibration, calibrator.levels[0 if not extra else 3])
    with Training(calibrator.laboratory.setup, candidate, seed=0) as training:
        training.step()
        training.step()
    if extra:
        assert min(stats.k3 for stats in training.stats) > 1e-3
    else:
        assert max(abs(stats.k3) for stats in training.stats) < 1e-3
