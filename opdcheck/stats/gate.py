"""The sequential verdict on one metric: is its mean over prompts at most the limit?

Clipping. An unbounded mean has no upper confidence bound without assumptions, so per-prompt values are clipped to
[0, clip], clip = min(bound, clip_multiple * limit), and the interval is for the mean of the *clipped* values.
- From above this lowers the mean. A reject stays valid. An admission could be wrong by what was cut off, so it also
  needs the plain mean of the unclipped values at or below the limit and no more than 1 % of the prompts clipped; tail
  limits guard the rest.
- From below (an unbiased estimate can be slightly negative) it raises the mean. An admission stays valid. A reject
  could be wrong by what was cut off, so it also needs the plain mean of the unclipped values above the limit.

The bias of the default clip of 5 limits, simulated with lognormal prompt means whose true mean is the limit, alpha 0.05
and a look after each of 256 prompts (2,000 gates; tests/stats/test_gate.py repeats it):

    coefficient of variation of prompt means      0.5       1       2
    mean of the clipped values / limit          1.000   0.982   0.879
    wrongly admitted                            0.0005  0.0225  0.0825

So the error level holds up to a coefficient of variation of about 1; with tails like the last column's the gate is off
by about a tenth of the limit (at 1.25 limits none of 300 was admitted), and the tail limits have to catch it. Median
prompts to admit half the limit: 39; to reject twice the limit: 8 (coefficient of variation 0.5). A clip of 3 limits
would need 21 prompts, but wrongly admits 0.076 at a coefficient of variation of 1; one of 10 limits needs 84.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

from opdcheck.stats.confidence_sequence import BettingSequence

GateState = Literal["undecided", "admit", "reject"]

MAX_CLIPPED_SHARE = 0.01


class Gate:
    """Takes per-prompt means of a non-negative metric, decides as soon as it can, and then stays decided.

    Admits when the interval's upper end and the plain mean are at or below the limit and few prompts are clipped;
    rejects when the lower end and the plain mean are above it; neither before `min_prompts`. Either is wrong with
    probability at most alpha / 2 (for the clipped mean), although it looks after every prompt.

    Args:
        limit: largest mean that is admitted, in the metric's unit.
        alpha: error level of the confidence sequence.
        min_prompts: no verdict before so many.
        clip_multiple: values count as at most so many limits.
        bound: largest possible value of the metric (tv: 1), if it has one.

    Raises:
        ValueError: an argument is out of range, or the limit is at or above `bound` and so admits everything.
    """

    def __init__(
        self,
        limit: float,
        alpha: float,
        min_prompts: int = 2,
        clip_multiple: float = 5.0,
        bound: float | None = None,
    ) -> None:
        if not (math.isfinite(limit) and limit > 0):
            raise ValueError(f"limit must be positive and finite, not {limit}")
        if bound is not None and not limit < bound:
            raise ValueError(f"limit {limit} admits everything: the metric is at most {bound}")
        if not (math.isfinite(clip_multiple) and clip_multiple > 1):
            raise ValueError(f"clip_multiple must be above 1 and finite, not {clip_multiple}")
        if min_prompts < 1:
            raise ValueError(f"min_prompts must be at least 1, not {min_prompts}")
        self.limit = limit
        self.alpha = alpha
        self.min_prompts = min_prompts
        self.clip = clip_multiple * limit if bound is None else min(bound, clip_multiple * limit)
        self.prompts = 0
        self.clipped = 0
        """Prompts whose value was above `clip` or not finite."""
        self._sum = 0.0
        self._state: GateState = "undecided"
        self._sequence = BettingSequence(self.clip, alpha, marks=[limit])

    @property
    def state(self) -> GateState:
        """The verdict so far."""
        return self._state

    @property
    def interval(self) -> tuple[float, float]:
        """Of the mean of the clipped values; (0, clip) at first. Goes on moving after the verdict."""
        return self._sequence.interval

    @property
    def mean(self) -> float:
        """Of the values as they came. NaN before the first; not finite once a value was not."""
        return self._sum / self.prompts if self.prompts else math.nan

    @property
    def heavy_tailed(self) -> bool:
        """Whether more than 1 % of the prompts are clipped: then the interval says too little about the mean."""
        return self.clipped > MAX_CLIPPED_SHARE * self.prompts

    def update(self, values: Iterable[float]) -> GateState:
        """Looks at the values one by one, in order.

        A NaN or infinite value counts as `clip` in the interval and rules out admission for good.
        """
        for value in values:
            self._take(float(value))
            if self._state == "undecided":
                self._state = self._decide()
        return self._state

    def _take(self, value: float) -> None:
        counted = min(max(value, 0.0), self.clip) if math.isfinite(value) else self.clip
        self.prompts += 1
        self.clipped += not -math.inf < value <= self.clip
        self._sum += value
        self._sequence.update(counted)

    def _decide(self) -> GateState:
        if self.prompts < self.min_prompts:
            return "undecided"
        lower, upper = self.interval
        if upper <= self.limit and math.isfinite(self.mean) and self.mean <= self.limit and not self.heavy_tailed:
            return "admit"
        if lower > self.limit and not self.mean <= self.limit:
            return "reject"
        return "undecided"
