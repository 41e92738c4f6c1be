"""An anytime-valid confidence sequence for a bounded mean, by betting.

Source: Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting" (arXiv 2010.09686), the
hedged capital process; the mixture over bets is Cover's universal portfolio, as in Orabona and Jun (arXiv 2110.14099).

For each candidate mean m a gambler bets against "the mean is m". Betting that the mean is higher, with a fixed share c
of what can be staked without debt (lambda = c / m, values x in [0, 1]),

    K_n(m, c) = prod_i (1 + (c / m) (x_i - m)) = prod_i ((1 - c) + c x_i / m)

is a non-negative martingale of mean 1 when the conditional mean of every x_i is m. So is any fixed mixture
K_n(m) = sum_j w_j K_n(m, c_j), and by Ville's inequality K_n(m) ever reaches 1 / a with probability at most a: looking
after every value costs nothing. Candidates with K_n(m) >= 2 / alpha are dropped for good (the running intersection).
Betting that the mean is lower is the same game on 1 - x and 1 - m.

Why a mixture instead of the paper's predictable plug-in bets: there is nothing to tune and no warm-up, and it pays at
most log(1 / w_j) against the best single share c_j in hindsight. Each factor is monotone in m, so the candidates that
survive form an interval and a grid of candidates is enough: an end is the last *dropped* grid point, which lies outside
of the exact interval or on its end. The interval is never too short.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

Floats = np.ndarray[Any, np.dtype[np.float64]]

GRID_POINTS = 400
"""Candidate means between 0 and `bound`: the interval's ends are resolved to 1/400 of it."""

SHARES = np.array([0.1, 0.3, 0.6, 0.9, 0.99])
WEIGHTS = np.array([1, 1, 1, 1, 2]) / 6
"""Shares of the largest possible bet and their weights in the mixture. Small shares win where values are very noisy,
large ones where they rarely come near the far end of the range, as prompt means rarely come near the clip; 0.99 has
double weight for that reason. None is 1: a single value at the far end would ruin that gambler for good. The choice
costs little either way: seven shares or equal weights move the median sample size by less than a tenth."""


class _Side:
    """Betting that the mean of values in [0, 1] is higher than each candidate.

    Args:
        candidates: means in (0, 1), strictly monotone.
        labels: what each candidate is called outside.
    """

    def __init__(self, candidates: Floats, labels: Floats, threshold: float) -> None:
        self._labels = labels
        self._threshold = threshold
        self._kept = (1 - SHARES)[:, None]
        self._staked = SHARES[:, None] / candidates
        self._capital = np.ones_like(self._staked)  # [shares, candidates]

    def update(self, value: float) -> Floats:
        """Plays one round; returns the labels of the candidates it drops."""
        self._capital *= self._staked * value + self._kept
        dropped = WEIGHTS @ self._capital >= self._threshold
        if not dropped.any():
            return self._labels[:0]
        labels, self._labels = self._labels[dropped], self._labels[~dropped]
        self._staked, self._capital = self._staked[:, ~dropped], self._capital[:, ~dropped]
        return labels


class BettingSequence:
    """Running confidence interval for the mean of values in [0, bound], valid at all times together.

    P(the mean is outside `interval` at any time) <= alpha, alpha / 2 on each side, for values whose conditional mean
    given the past is constant (independent prompts from one population, for instance). No other assumption. Costs the
    same for every value however many came before.

    Args:
        bound: largest possible value.
        alpha: error level.
        marks: candidates that must be on the grid exactly, such as a limit the ends are compared with.

    Raises:
        ValueError: bound or alpha is out of range, or a mark is outside (0, bound).
    """

    def __init__(self, bound: float, alpha: float, *, marks: Sequence[float] = ()) -> None:
        if not (math.isfinite(bound) and bound > 0):
            raise ValueError(f"bound must be positive and finite, not {bound}")
        if not 0 < alpha < 1:
            raise ValueError(f"alpha must be between 0 and 1, not {alpha}")
        if not all(0 < mark < bound for mark in marks):
            raise ValueError(f"marks must lie between 0 and the bound {bound}, not {list(marks)}")
        self.bound = bound
        self.alpha = alpha
        inner = np.linspace(0, bound, GRID_POINTS + 1)[1:-1]
        labels = np.unique(np.concatenate([inner, np.asarray(marks, np.float64)]))
        self._higher = _Side(labels / bound, labels, 2 / alpha)
        self._lower = _Side((bound - labels) / bound, labels, 2 / alpha)
        self._interval = (0.0, float(bound))

    def update(self, value: float) -> None:
        """Takes the next value into account.

        Raises:
            ValueError: value is not in [0, bound].
        """
        if not 0 <= value <= self.bound:
            raise ValueError(f"value {value} is outside [0, {self.bound}]")
        lower, upper = self._interval
        below = self._higher.update(value / self.bound)
        above = self._lower.update((self.bound - value) / self.bound)
        self._interval = (max([lower, *below.tolist()]), min([upper, *above.tolist()]))

    @property
    def interval(self) -> tuple[float, float]:
        """(lower, upper). Lower above upper has probability at most alpha, else the mean is not constant."""
        return self._interval
