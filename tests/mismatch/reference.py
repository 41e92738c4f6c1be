"""Reference values for the tests: the formulas of README's "Metrics", one token and one vocabulary entry at a time.

Slow and literal on purpose, in float64; shares no code with opdcheck. `q`, `p` are lists of log-probabilities over the
vocabulary.
"""

import math

INF = math.inf


def prob(logprob):
    return math.exp(logprob) if logprob > -INF else 0.0


def tv(q, p):
    return 0.5 * math.fsum(abs(prob(a) - prob(b)) for a, b in zip(q, p, strict=True))


def kl(q, p):
    terms = []
    for a, b in zip(q, p, strict=True):
        if a == -INF:
            continue
        if b == -INF:
            return INF
        terms.append(prob(a) * (a - b))
    return math.fsum(terms)


def argmax_flip(q, p):
    return float(max(range(len(q)), key=lambda a: q[a]) != max(range(len(p)), key=lambda a: p[a]))


def ratio(logq, logp):
    return math.exp(logp - logq)


def k1(logq, logp):
    return -(logp - logq)


def k3(logq, logp):
    return ratio(logq, logp) - 1 - (logp - logq)


def abs_dlogp(logq, logp):
    return abs(logp - logq)


def token_mult_prob_error(logq, logp):
    return math.exp(abs(logp - logq))


def probs_diff(logq, logp):
    return abs(math.exp(logp) - math.exp(logq))


def chi2_token(logq, logp):
    return math.fsum(ratio(a, b) ** 2 for a, b in zip(logq, logp, strict=True)) / len(logq) - 1


def ess(logq, logp):
    ratios = [ratio(a, b) for a, b in zip(logq, logp, strict=True)]
    mean = math.fsum(ratios) / len(ratios)
    return 1 / (math.fsum((r / mean) ** 2 for r in ratios) / len(ratios))


def coarsen(q, p, own):
    """Probabilities of the tokens `own` one by one and of all others together."""
    groups = [[a] for a in own] + [[a for a in range(len(q)) if a not in own]]
    return (
        [math.fsum(prob(q[a]) for a in group) for group in groups],
        [math.fsum(prob(p[a]) for a in group) for group in groups],
    )


def tv_lower(q, p, own):
    q_groups, p_groups = coarsen(q, p, own)
    return 0.5 * math.fsum(abs(a - b) for a, b in zip(q_groups, p_groups, strict=True))


def tv_upper(q, p, top):
    q_groups, p_groups = coarsen(q, p, top)
    known = math.fsum(abs(prob(q[a]) - prob(p[a])) for a in top)
    return 0.5 * known + 0.5 * (q_groups[-1] + p_groups[-1])


def kl_lower(q, p, own):
    q_groups, p_groups = coarsen(q, p, own)
    return math.fsum(a * math.log(a / b) for a, b in zip(q_groups, p_groups, strict=True) if a > 0)


def prompt_mean(completions):
    """Token mean over all completions of one prompt."""
    values = [value for completion in completions for value in completion]
    return math.fsum(values) / len(values)


def mean_over_prompts(prompts):
    means = [prompt_mean(prompt) for prompt in prompts]
    return math.fsum(means) / len(means)


def standard_error(prompts):
    means = [prompt_mean(prompt) for prompt in prompts]
    center = math.fsum(means) / len(means)
    return math.sqrt(math.fsum((m - center) ** 2 for m in means) / (len(means) - 1) / len(means))
