"""The split of a mismatch by source: each source alone, on the same tokens, on one scale."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from opdcheck.config import Candidate
from opdcheck.measurement import SourceName, SourceShare
from opdcheck.mismatch.aggregate import summarize
from opdcheck.perturb.policy import active_parts, build_policy, describe, free
from opdcheck.rollouts import Rollout
from opdcheck.rounds import Round
from opdcheck.scoring import Scorer

_EXACT = {"tv": "tv", "kl": "kl", "k3": "kl"}
"""Metric of a limit on one source -> the sum over the vocabulary that is its mean. The rollouts' tokens were drawn by
the whole candidate, so a sampled estimate on them would be of something else than the part alone."""

if TYPE_CHECKING:
    from torch import Tensor

    from opdcheck.mismatch.tokens import TokenMismatch
    from opdcheck.models import CausalLM


def split(
    candidate: Candidate,
    base: Path,
    rollouts: Sequence[Rollout],
    scorer: Scorer,
    hidden_p: Sequence[Tensor],
    *,
    metric: str,
    calibration_ids: list[list[int]] | None,
    progress: Callable[[str], None] | None = None,
) -> list[SourceShare]:
    """Measures every source the candidate has, each alone, at one scoring pass per source.

    The student with only this perturbation is teacher-forced over the rollouts and compared with the trainer, whole
    distribution against whole distribution (estimator `exact`). Kernels are not part of it: see the budget's floor.

    Args:
        rollouts: completions of the whole candidate; they choose the prefixes, their `logq` is not used.
        scorer: of the trainer.
        hidden_p: the trainer's final hidden states on `rollouts`, [tokens, hidden] each.
        metric: decision metric, for `prompt_values`. They are means under the part's own distribution, summed over the
            vocabulary: KL(part || trainer) is that of k3. `abs_dlogp` has no such sum here, and then there are none.
        calibration_ids: token ids that static activation and KV scales are set from.
        progress: told what is being measured.

    Returns:
        One share per active source, in the order of `PARTS`.

    Raises:
        ConfigError: a part does not fit the model.
        EngineError: out of memory.
    """
    shares = []
    for part in active_parts(candidate):
        if progress is not None:
            progress(f"source {part}: scoring the student with this part alone")
        mismatch = _measure_alone(candidate, base, part, rollouts, scorer, hidden_p, calibration_ids)
        shares.append(_share(candidate, part, rollouts, mismatch, metric))
    return shares


def not_simulated(candidate: Candidate) -> list[str]:
    """What the candidate asks of its engine and no live model imitates, as sentences for the report."""
    args = candidate.rollout.engine_args
    asked = {name: args[name] for name in ("quantization", "quantization_config") if args.get(name)}
    if not asked or asked.get("quantization") == "compressed-tensors":  # the format of the checkpoint, loaded here too
        return []
    shown = ", ".join(f"engine_args.{name}: {value}" for name, value in asked.items())
    cannot = "vLLM's online quantization, which cannot be simulated: it is part of what is left over"
    return [f"weights: {shown} is {cannot}"]


def _measure_alone(
    candidate: Candidate,
    base: Path,
    part: SourceName,
    rollouts: Sequence[Rollout],
    scorer: Scorer,
    hidden_p: Sequence[Tensor],
    calibration_ids: list[list[int]] | None,
) -> list[TokenMismatch]:
    sampling = candidate.rollout.sampling
    sigma = candidate.rollout.noise.logits if part == "noise" and candidate.rollout.noise else 0.0
    if sigma and not _changes_model(candidate, part):
        # Logit noise alone needs no model of its own, and no pass of the decoder.
        noisy = _with_logit_noise(scorer.model, candidate, sigma)
        return scorer.compare(rollouts, hidden_p, hidden_p, noisy.logits, sampling)
    policy = build_policy(candidate, base, [part], calibration_ids=calibration_ids)
    try:
        alone = Scorer(policy, chunk_bytes=scorer.chunk_bytes, batch_tokens=scorer.batch_tokens)
        noisy = _with_logit_noise(policy, candidate, sigma)
        return scorer.compare(rollouts, hidden_p, alone.final_hidden(rollouts), noisy.logits, sampling)
    finally:
        free(policy)


def _changes_model(candidate: Candidate, part: SourceName) -> bool:
    noise = candidate.rollout.noise
    return part != "noise" or (noise is not None and noise.weights > 0)


def _with_logit_noise(policy: CausalLM, candidate: Candidate, sigma: float) -> CausalLM:
    noise = candidate.rollout.noise
    return policy if not sigma or noise is None else policy.with_logit_noise(sigma, noise.seed)


def _share(
    candidate: Candidate,
    part: SourceName,
    rollouts: Sequence[Rollout],
    mismatch: list[TokenMismatch],
    metric: str,
) -> SourceShare:
    summary = summarize(Round(list(rollouts), mismatch).by_prompt())
    details = [
        provenance.detail for provenance in describe(candidate, engine="transformers") if provenance.part == part
    ]
    return SourceShare(
        source=part,
        how="simulated",
        tv=summary.metrics["tv"].mean,
        kl=summary.metrics["kl"].mean,
        prompt_values=summary.prompt_values[_EXACT[metric]] if metric in _EXACT else [],
        detail="; ".join(details),
    )


__all__ = ["not_simulated", "split"]
