"""From prompts to per-token mismatch, round by round: sample with the engine, score with the trainer, compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from opdcheck.engines.base import ExactEngine
from opdcheck.errors import EngineError
from opdcheck.measurement import Measurement, Part
from opdcheck.mismatch.aggregate import summarize
from opdcheck.mismatch.sampled import sampled_mismatch
from opdcheck.mismatch.tokens import TokenMismatch
from opdcheck.mismatch.topk import topk_mismatch
from opdcheck.rollouts import Prompt, Rollout
from opdcheck.rounds import Round, RoundStore, round_key
from opdcheck.session import Session, in_rounds


def rounds(
    session: Session,
    *,
    key: Mapping[str, Any],
    max_prompts: int,
    store: RoundStore,
    fresh: bool = False,
    on_cached: Callable[[bool], None] | None = None,
) -> Iterator[Round]:
    """Yields measured rounds, in the order in which prompts are drawn, until `max_prompts` prompts are done.

    Each is kept in `store` before it is yielded.

    Args:
        key: everything but the prompts that the numbers depend on; see `opdcheck.rounds`.
        fresh: measure again even what the store holds.
        on_cached: told for each round whether it came from the store.

    Raises:
        EngineError: the engine failed or gave unusable rollouts.
    """
    for prompts in in_rounds(session.drawn_prompts[:max_prompts], session.candidate.decision.round_prompts):
        name = round_key(key, prompts)
        stored = None if fresh else store.load(name, prompts)
        if on_cached is not None:
            on_cached(stored is not None)
        if stored is None:
            stored = measure_round(session, prompts)
            store.save(name, stored)
        yield stored


def measure_round(session: Session, prompts: Sequence[Prompt]) -> Round:
    """Samples and scores some prompts. The engine's distributions are dropped once they are compared."""
    engine = session.engine
    session.progress.stage("sampling rollouts")
    rollouts = engine.generate(session.requests(prompts))
    if any(len(rollout) == 0 for rollout in rollouts):
        raise EngineError(
            f"{engine.name} returned a completion without tokens",
            hint="A prompt that ends in the end-of-sequence token can cause this; check the chat template.",
        )
    _ = session.trainer  # loaded when first needed, which is a stage of its own and comes before the scoring
    session.progress.stage("scoring with the trainer")
    mismatch = compare(session, rollouts)
    bare = [replace(rollout, final_hidden=None, top_ids=None, top_logq=None) for rollout in rollouts]
    provenance = tuple(Part(part=part.part, how=part.how, detail=part.detail) for part in engine.provenance)
    return Round(bare, mismatch, engine=engine.name, provenance=provenance)


def compare(session: Session, rollouts: Sequence[Rollout]) -> list[TokenMismatch]:
    """Per-token mismatch by the best estimator that the engine's answers allow: exact, topk, sampled."""
    sampling = session.candidate.rollout.sampling
    if isinstance(session.engine, ExactEngine):
        hidden_q = [rollout.final_hidden for rollout in rollouts]
        return session.scorer.compare(
            rollouts, session.trainer_hidden(rollouts), hidden_q, session.engine.logits, sampling
        )
    scores = session.scorer.score(rollouts, sampling)
    return [
        sampled_mismatch(rollout.logq, score.logp)
        if rollout.top_ids is None or rollout.top_logq is None or score.top_logp is None
        else topk_mismatch(
            rollout.token_ids,
            rollout.logq,
            score.logp,
            rollout.top_ids,
            rollout.top_logq,
            score.top_logp,
            score.argmax_p,
        )
        for rollout, score in zip(rollouts, scores, strict=True)
    ]


def summarize_rounds(measured: Sequence[Round], *, cached: bool) -> Measurement:
    """All rounds as one record.

    Raises:
        ValueError: no rounds.
    """
    if not measured:
        raise ValueError("no rounds to summarize")
    by_prompt = [prompt for one in measured for prompt in one.by_prompt()]
    rollouts = [rollout for one in measured for rollout in one.rollouts]
    summary = summarize(by_prompt)
    return Measurement(
        engine=measured[0].engine,
        estimator=measured[0].mismatch[0].estimator,
        prompts=len(by_prompt),
        completions=len(rollouts),
        tokens=sum(map(len, rollouts)),
        truncated=sum(rollout.finish_reason == "length" for rollout in rollouts),
        metrics=summary.metrics,
        chi2_token=summary.chi2_token,
        ess=summary.ess,
        prompt_values=summary.prompt_values,
        prompt_rows=list(dict.fromkeys(rollout.prompt.index for rollout in rollouts)),
        by_position=summary.by_position,
        position_change=summary.position_change and summary.position_change.mean,
        position_p=summary.position_change and summary.position_change.p,
        provenance=list(measured[0].provenance),
        non_finite_tokens=summary.non_finite_tokens,
        from_cache=cached,
    )
