"""Measures rounds of prompts until every limited total is decided, by a gate of its own that looks after each round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from opdcheck.measure import rounds, summarize_rounds
from opdcheck.measurement import Measurement
from opdcheck.mismatch.aggregate import prompt_means
from opdcheck.progress import Progress
from opdcheck.rounds import Round, RoundStore
from opdcheck.session import Session
from opdcheck.verdict import Target, new_gate


class Gathering:
    """The measured rounds of one candidate so far, and what the gates make of them.

    Args:
        session: measures; its candidate's `decision` says how many prompts at most.
        aims: the limited totals; the first is the decision metric, which the progress display shows.
        key: what the numbers depend on besides the prompts.
        fresh: measure again what the cache holds.
        progress: shown the interval after each round.
    """

    def __init__(
        self, session: Session, aims: Sequence[Target], key: Mapping[str, Any], *, fresh: bool, progress: Progress
    ) -> None:
        decision = session.candidate.decision
        self.rounds: list[Round] = []
        self.max_prompts = min(decision.max_prompts or len(session.prompts), len(session.prompts))
        self._shown = aims[0].metric
        self._gates = {aim.metric: new_gate(aim, decision) for aim in aims}
        self._progress = progress
        self._all_cached = True
        self._coming = rounds(
            session, key=key, max_prompts=self.max_prompts, store=RoundStore(), fresh=fresh, on_cached=self._note
        )

    @property
    def prompts(self) -> int:
        """How many prompts have been measured."""
        return self._gates[self._shown].prompts

    @property
    def decided(self) -> bool:
        """Whether more prompts cannot change the verdict on the totals: all gates admit, or one rejects."""
        states = {gate.state for gate in self._gates.values()}
        return "reject" in states or "undecided" not in states

    def until_decided(self) -> None:
        """Measures until `decided`, or until the prompts are used up."""
        while not self.decided and self._measure_round():
            pass

    def double(self) -> bool:
        """Measures as many prompts again as there are so far, or all that are left; False if none was left."""
        before = self.prompts
        while self.prompts < 2 * before and self._measure_round():
            pass
        return self.prompts > before

    def summary(self) -> Measurement:
        """All rounds as one record."""
        return summarize_rounds(self.rounds, cached=self._all_cached)

    def _measure_round(self) -> bool:
        measured = next(self._coming, None)
        if measured is None:
            return False
        self.rounds.append(measured)
        by_prompt = measured.by_prompt()
        for metric, gate in self._gates.items():
            gate.update(prompt_means(by_prompt, metric))
        self._progress.look(self._gates[self._shown], metric=self._shown, max_prompts=self.max_prompts)
        return True

    def _note(self, cached: bool) -> None:
        self._all_cached = self._all_cached and cached
