"""Pairs of next-token distributions for the tests, as hypothesis strategies."""

import numpy as np
from hypothesis import strategies as st

KINDS = ("peaked", "flat", "near", "far", "zeros")


def log_normalize(logits):
    """Log-probabilities in float64; -inf stays -inf."""
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def make_pair(seed, vocab, kind):
    """`(logq, logp)`, float64 [vocab]. `zeros`: some tokens are outside the support of q, p or both."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=vocab) * {"peaked": 6.0, "flat": 0.01, "near": 2.0, "far": 4.0, "zeros": 2.0}[kind]
    step = rng.normal(size=vocab) * {"peaked": 0.3, "flat": 0.02, "near": 1e-4, "far": 4.0, "zeros": 0.3}[kind]
    other = logits + step
    if kind == "zeros" and vocab > 2:
        logits[rng.integers(vocab, size=vocab // 3)] = -np.inf
        gone = rng.integers(vocab, size=vocab // 3)
        other[gone[np.isinf(logits[gone])]] = -np.inf  # p = 0 only where q = 0, else KL is infinite
        logits[int(np.argmax(np.isfinite(other)))] = 0.0
    return log_normalize(logits), log_normalize(other)


vocab_sizes = st.one_of(st.integers(1, 4), st.integers(5, 60))
seeds = st.integers(0, 2**32 - 1)
pairs = st.builds(make_pair, seeds, vocab_sizes, st.sampled_from(KINDS))
supported_pairs = st.builds(make_pair, seeds, vocab_sizes, st.sampled_from([k for k in KINDS if k != "zeros"]))
