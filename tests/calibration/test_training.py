"""Steps and trainings on the addition pair."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from opdcheck.calibration.calibrator import Calibrator
from opdcheck.calibration.file import Method, load_calibration
from opdcheck.calibration.ladder import Level, as_candidate
from opdcheck.calibration.optimizer import MasterAdamW, learning_rate
from opdcheck.calibration.step import Trainer
from opdcheck.calibration.training import Setup, Training, prompt_order, train
from opdcheck.config import Noise, Staleness
from opdcheck.errors import EngineError
from opdcheck.perturb.live import snapshot
from opdcheck.progress import Silent
from opdcheck.rollouts import Rollout


@pytest.fixture
def calibrator(calibration_file: Path) -> Calibrator:
    return Calibrator(load_calibration(calibration_file), Silent())


def candidate(calibrator: Calibrator, **rollout: object):
    changed = calibrator.calibration.rollout.model_copy(update=rollout)
    return as_candidate(calibrator.calibration, Level("test", "noise", changed))


def gradients_of(setup: Setup, rollouts: list[Rollout], **sizes: int) -> dict[str, torch.Tensor]:
    """The gradients that one step computes, taken before the optimizer sees them."""
    student = setup.new_student()
    trainer = Trainer(student, setup.teacher, setup.method, temperature=1.0, **sizes)
    found: dict[str, torch.Tensor] = {}

    def keep() -> float:
        found.update({name: parameter.grad.clone() for name, parameter in student.model.named_parameters()})
        return 0.0

    trainer._optimizer.step = keep  # type: ignore[method-assign]
    trainer.step(rollouts)
    return found


def test_the_rollouts_of_the_unperturbed_side_match_the_trainer(calibrator: Calibrator) -> None:
    """Same weights, same dtype: k3 of what is trained on is rounding."""
    with Training(calibrator.laboratory.setup, candidate(calibrator), seed=0) as training:
        training.step()
    assert 0 <= training.stats[0].k3 < 1e-6
    assert training.stats[0].loss > 0


def test_the_teachers_completions_say_nothing_of_mismatch(calibrator: Calibrator) -> None:
    """Teacher and student differ; that is what is trained away, not mismatch of the student's rollouts."""
    method = calibrator.laboratory.setup.method.model_copy(update={"lmbda": 0.5})
    setup = dataclasses.replace(calibrator.laboratory.setup, method=method)
    with Training(setup, candidate(calibrator), seed=0) as training:
        for _ in range(3):
            training.step()
    own, all_tokens = (sum(getattr(stats, name) for stats in training.stats) for name in ("k3_tokens", "tokens"))
    assert 0 < own < all_tokens
    assert all(0 <= stats.k3 < 1e-6 for stats in training.stats)


def test_a_lag_leaves_the_rollout_weights_behind(calibrator: Calibrator) -> None:
    stale = candidate(calibrator, staleness=Staleness(lag=2))
    with Training(calibrator.laboratory.setup, stale, seed=0) as training:
        for _ in range(3):
            training.step()
    first, second, third = (stats.k3 for stats in training.stats)
    assert first < 1e-6  # nothing is older than the start
    assert min(second, third) > 1e-6


def test_same_seed_same_result_and_paired_prompts(calibrator: Calibrator) -> None:
    setup = calibrator.laboratory.setup
    one, again = (train(setup, candidate(calibrator), 1) for _ in range(2))
    assert one.model_dump(exclude={"seconds"}) == again.model_dump(exclude={"seconds"})
    noisy = train(setup, candidate(calibrator, noise=Noise(weights=0.3)), 1)
    assert noisy.evaluations[0] == one.evaluations[0]
    assert noisy.final != one.final
    assert [evaluation.step for evaluation in one.evaluations] == [0, 2, 3]


def test_training_does_not_touch_the_students_of_other_runs(calibrator: Calibrator) -> None:
    setup = calibrator.laboratory.setup
    before = snapshot(setup.new_student().model)
    train(setup, candidate(calibrator), 0)
    after = snapshot(setup.new_student().model)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_gradients_do_not_depend_on_chunks_and_batches(calibrator: Calibrator) -> None:
    """The head a few rows at a time, the decoder a few sequences at a time: the same step."""
    setup = calibrator.laboratory.setup
    with Training(setup, candidate(calibrator), seed=0) as training:
        training._side.push(training.student)
        rollouts = training._sampler.batch(0).rollouts
    whole, pieces = (gradients_of(setup, rollouts, **sizes) for sizes in ({}, {"chunk_bytes": 1, "batch_tokens": 1}))
    for name, gradient in whole.items():
        torch.testing.assert_close(gradient, pieces[name], rtol=1e-3, atol=1e-6)


def test_the_step_is_the_gradient_of_the_mean_divergence(calibrator: Calibrator) -> None:
    """Against plain autograd over whole logits."""
    setup = calibrator.laboratory.setup
    with Training(setup, candidate(calibrator), seed=0) as training:
        training._side.push(training.student)
        rollouts = training._sampler.batch(0).rollouts
    gradients = gradients_of(setup, rollouts)
    plain = setup.new_student().model.requires_grad_(True)
    total, tokens = torch.zeros(()), 0
    for rollout in rollouts:
        ids = torch.tensor([[*rollout.prompt.token_ids, *rollout.token_ids.tolist()]])
        rows = slice(len(rollout.prompt.token_ids) - 1, -1)
        logp = plain(input_ids=ids).logits[0, rows].log_softmax(-1)
        with torch.no_grad():
            logt = setup.teacher.model(input_ids=ids).logits[0, rows].log_softmax(-1)
        mixture = torch.log((logp.exp() + logt.exp()) / 2)
        jsd = 0.5 * (logt.exp() * (logt - mixture)).sum() + 0.5 * (logp.exp() * (logp - mixture)).sum()
        total, tokens = total + jsd, tokens + len(rollout)
    (total / tokens).backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-3, atol=1e-6)


def test_master_weights_keep_what_bfloat16_would_lose() -> None:
    model = torch.nn.Linear(4, 4, bias=False).to(torch.bfloat16)
    torch.nn.init.constant_(model.weight, 1.0)
    optimizer = MasterAdamW(model, Method(learning_rate=1e-4, steps=100))
    for _ in range(60):
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
    # 60 steps of 1e-4 each: one such step is less than half of bfloat16's spacing below 1, their sum is not.
    assert model.weight.detach().float().max() == pytest.approx(1 - 60e-4, abs=2**-8)
    assert model.weight.detach().float().max() < 1


def test_learning_rate() -> None:
    method = Method(learning_rate=1.0, steps=10, warmup_steps=2, schedule="linear")
    rates = [learning_rate(method, step) for step in range(10)]
    assert rates[0] == 0.5
    assert rates[1] == 1.0
    assert rates[-1] == pytest.approx(1 / 8)
    assert learning_rate(Method(learning_rate=1.0, steps=10), 9) == 1.0


def test_nan_gradients_stop_the_training(calibrator: Calibrator) -> None:
    setup = calibrator.laboratory.setup
    with Training(setup, candidate(calibrator), seed=0) as training:
        with torch.no_grad():
            next(iter(training.student.model.parameters())).fill_(float("nan"))
        with pytest.raises(EngineError, match="training failed at step 1"):
            training.step()


def test_prompt_order_is_passes_over_all() -> None:
    order = prompt_order(5, 12, seed=3)
    assert sorted(order[:5]) == sorted(order[5:10]) == list(range(5))
    assert order == prompt_order(5, 12, seed=3)
    assert order != prompt_order(5, 12, seed=4)
    assert np.unique(order).size == 5
