"""What no candidate can undercut: the kernel floor and, below it, the trainer against itself.

`kernel`: the student as it is, at the trainer's dtype, in the candidate's engine. `trainer_null`: the trainer scored
against itself with another batch shape. Both depend on student and environment alone, so they are measured once and
kept with the budget.
"""

from __future__ import annotations

from collections.abc import Sequence

from opdcheck.config import Candidate, Rollout
from opdcheck.measure import measure_round
from opdcheck.mismatch.aggregate import Summary, summarize
from opdcheck.rollouts import Rollout as SampledRollout
from opdcheck.rounds import Round
from opdcheck.session import Session, in_rounds

FLOOR_METRICS = ("tv", "kl", "k3", "abs_dlogp")


def unperturbed(candidate: Candidate) -> Candidate:
    """The same student, engine, sampling and workload without quantization, noise, staleness or another dtype."""
    rollout = candidate.rollout
    clean = Rollout(
        engine=rollout.engine,
        dtype=candidate.student.dtype,
        sampling=rollout.sampling,
        logprobs=rollout.logprobs,
        engine_args={key: value for key, value in rollout.engine_args.items() if key != "quantization"},
    )
    return candidate.model_copy(update={"rollout": clean})


def kernel_floor(session: Session, max_prompts: int) -> list[Round]:
    """Measures the session's (unperturbed) candidate on its first prompts."""
    groups = in_rounds(session.prompts[:max_prompts], session.candidate.decision.round_prompts)
    return [measure_round(session, prompts) for prompts in groups]


def trainer_null(session: Session, rollouts: Sequence[SampledRollout]) -> Summary:
    """Mismatch of the trainer against itself: the same tokens scored in batches and one sequence at a time."""
    session.progress.stage("scoring the trainer against itself")
    scorer = session.scorer
    mismatch = scorer.compare(
        rollouts,
        scorer.final_hidden(rollouts),
        scorer.null_hidden(rollouts),
        session.trainer.logits,
        session.candidate.rollout.sampling,
    )
    return summarize(Round(list(rollouts), mismatch).by_prompt())


def means(summary: Summary) -> dict[str, float]:
    """The floor as the budget file stores it: mean per metric, in the metric's own unit."""
    return {name: summary.metrics[name].mean for name in FLOOR_METRICS}
