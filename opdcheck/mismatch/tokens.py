"""Per-token mismatch of one completion: the common result of the three estimators."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from opdcheck.measurement import Estimator

Floats = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True)
class TokenMismatch:
    """All arrays are float64 [tokens]. `logq`, `logp`: log-probability of the sampled token under rollout and trainer.

    `tv` and `kl` are unbiased for the token's total variation and KL(q||p) (equal to them for `exact`); `tv_lower`,
    `tv_upper` and `kl_lower` hold for certain given the engine's top-k (equal to `tv`, `kl` for `exact`; 0, 1 and 0
    for `sampled`).
    """

    estimator: Estimator
    logq: Floats
    logp: Floats
    tv: Floats
    tv_lower: Floats
    tv_upper: Floats
    kl: Floats
    kl_lower: Floats
    argmax_flip: Floats = field(repr=False)  # 1.0 where argmax q != argmax p; NaN where the engine does not tell

    def __len__(self) -> int:
        return len(self.logq)
