"""The split by source: nothing where nothing was done, and one source alone is the whole."""

from pathlib import Path
from typing import Any

import pytest
from candidates import CALIBRATION, candidate, random_rollouts

from opdcheck.mismatch.aggregate import summarize
from opdcheck.perturb.policy import active_parts, build_policy
from opdcheck.rounds import Round
from opdcheck.scoring import Scorer
from opdcheck.sources import not_simulated, split


def shares(student: Path, metric: str = "tv", **rollout: Any) -> Any:
    asked = candidate(student, **rollout)
    scorer = Scorer(build_policy(asked, Path(), []))
    rollouts = random_rollouts()
    hidden = scorer.final_hidden(rollouts)
    return split(asked, Path(), rollouts, scorer, hidden, metric=metric, calibration_ids=CALIBRATION)


def test_a_candidate_without_sources_has_no_shares(tiny_student: Path) -> None:
    assert shares(tiny_student) == []


def test_a_source_that_changes_nothing_is_exactly_zero(tiny_student: Path) -> None:
    (share,) = shares(tiny_student, staleness={"checkpoint": str(tiny_student), "lag": 1})
    assert (share.source, share.tv, share.kl) == ("staleness", 0.0, 0.0)
    assert share.prompt_values == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("metric", "exact"), [("tv", "tv"), ("kl", "kl"), ("k3", "kl")])
def test_one_source_alone_is_the_whole(tiny_student: Path, metric: str, exact: str) -> None:
    """k3's mean under the part's own distribution is KL; the tokens were drawn by the whole candidate, not by it."""
    asked = candidate(tiny_student, quantization="W4A16")
    (share,) = shares(tiny_student, metric, quantization="W4A16")
    trainer, policy = (Scorer(build_policy(asked, Path(), parts)) for parts in ([], active_parts(asked)))
    rollouts = random_rollouts()
    mismatch = trainer.compare(
        rollouts,
        trainer.final_hidden(rollouts),
        policy.final_hidden(rollouts),
        policy.model.logits,
        asked.rollout.sampling,
    )
    total = summarize(Round(rollouts, mismatch).by_prompt())
    assert share.source == "weights"
    assert share.tv == total.metrics["tv"].mean > 0
    assert share.kl == total.metrics["kl"].mean > 0
    assert share.prompt_values == total.prompt_values[exact]


def test_abs_dlogp_of_a_part_is_not_known(tiny_student: Path) -> None:
    (share,) = shares(tiny_student, "abs_dlogp", quantization="W4A16")
    assert share.prompt_values == []
    assert share.tv > 0


def test_every_source_in_order(tiny_student: Path) -> None:
    told: list[str] = []
    asked = candidate(
        tiny_student,
        dtype="bfloat16",
        quantization="FP8",
        kv_cache_dtype="fp8",
        noise={"weights": 0.05, "logits": 0.1},
    )
    scorer = Scorer(build_policy(asked, Path(), []))
    rollouts = random_rollouts()
    hidden = scorer.final_hidden(rollouts)
    found = split(
        asked,
        Path(),
        rollouts,
        scorer,
        hidden,
        metric="tv",
        calibration_ids=CALIBRATION,
        progress=told.append,
    )
    assert [share.source for share in found] == ["noise", "weights", "activations", "kv_cache", "dtype"]
    assert all(share.tv > 0 and share.kl > 0 and share.how == "simulated" and share.detail for share in found)
    assert len(told) == 5
    # The trainer's model must be untouched by all this.
    assert all((a == b).all() for a, b in zip(scorer.final_hidden(rollouts), hidden, strict=True))


def test_logit_noise_alone(tiny_student: Path) -> None:
    """KL of Gaussian noise on logits is about sigma^2 / 2 times 1 - sum p^2, for small sigma."""
    (small,) = shares(tiny_student, "kl", noise={"logits": 0.1})
    (large,) = shares(tiny_student, "kl", noise={"logits": 0.2})
    assert 0 < small.kl < 0.005
    assert large.kl == pytest.approx(4 * small.kl, rel=0.1)


@pytest.mark.parametrize(
    ("engine_args", "noted"),
    [({}, False), ({"quantization": "compressed-tensors"}, False), ({"quantization": "fp8"}, True)],
)
def test_online_quantization_is_noted_as_not_simulated(
    tiny_student: Path, engine_args: dict[str, Any], noted: bool
) -> None:
    notes = not_simulated(candidate(tiny_student, engine="vllm", engine_args=engine_args))
    assert bool(notes) == noted
    assert all(note.startswith("weights: engine_args.quantization: fp8 is vLLM's online") for note in notes)
