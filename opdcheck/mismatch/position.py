"""Whether the mismatch grows along a completion: one number per prompt, and a test over prompts.

Tokens of a completion are not independent (each stands on those before it), so a correlation over all tokens says
little about chance. Prompts are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from opdcheck.mismatch.tokens import TokenMismatch

MIN_PROMPTS = 3


@dataclass(frozen=True)
class PositionChange:
    """How tv changes from the first halves of the completions to the second."""

    mean: float
    """Over prompts, of `half_differences`."""
    p: float
    """Two-sided p-value of Student's t-test that it is 0. For one look: it is not anytime-valid."""


def half_differences(by_prompt: Sequence[Sequence[TokenMismatch]]) -> list[float]:
    """For each prompt: mean tv of the second halves of its completions minus that of their first halves.

    The token in the middle of an odd number belongs to neither half. A prompt is left out if all its completions have
    a single token.
    """
    differences = []
    for prompt in by_prompt:
        halves = [len(completion) // 2 for completion in prompt]
        if not any(halves):
            continue
        first = np.concatenate([one.tv[:half] for one, half in zip(prompt, halves, strict=True)])
        second = np.concatenate([one.tv[len(one) - half :] for one, half in zip(prompt, halves, strict=True)])
        differences.append(float(second.mean()) - float(first.mean()))
    return differences


def position_change(by_prompt: Sequence[Sequence[TokenMismatch]]) -> PositionChange | None:
    """The mean difference between the halves and its test; None for too few prompts, no spread, or NaN and infinity."""
    from scipy.special import stdtr  # takes a tenth of a second to import

    differences = np.array(half_differences(by_prompt))
    if len(differences) < MIN_PROMPTS or not np.isfinite(differences).all() or np.ptp(differences) == 0:
        return None
    mean = float(differences.mean())
    error = float(differences.std(ddof=1)) / math.sqrt(len(differences))
    return PositionChange(mean, 2 * float(stdtr(len(differences) - 1, -abs(mean) / error)))
