"""How far the rollout policy q is from the trainer policy p, token by token: pure functions on arrays.

Symbols as in README's section "Metrics": `logq`, `logp` are natural log-probabilities of the same token at the same
prefix and `r = p/q = exp(logp - logq)`. Import from the modules: `metrics`, the three estimators `exact`, `topk` and
`sampled` (each gives a `tokens.TokenMismatch`), and `aggregate`. Only `exact` imports torch, so nothing is re-exported
here.
"""
