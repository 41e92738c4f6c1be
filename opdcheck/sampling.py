"""From logits to the distribution that is sampled, and noise that a seed reproduces on any device.

The sampling transform is vLLM's (`vllm/v1/sample/sampler.py` and `ops/topk_topp_sampler.py`, 0.32): temperature, then
min-p, then top-k, then top-p; ties at the k-th logit are all kept.

The noise is counter based (SplitMix64, Steele et al. 2014, https://doi.org/10.1145/2714064.2660195): each token's
number depends on a key and the token id alone, never on what else is drawn, in which order, or on which device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from opdcheck.config import Sampling

_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_MASK_64 = 2**64 - 1
_LARGEST_BELOW_ONE = 1 - 2**-24  # in float32


# --- distributions ----------------------------------------------------------------------------------------------------


def log_probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Natural-log probabilities under the sampling transform, -inf outside its support.

    Args:
        logits: float32 [tokens, vocab]; not changed.

    Returns:
        float32 [tokens, vocab]. A row with NaN logits is NaN throughout.
    """
    return _truncate(_heat(logits, sampling.temperature), sampling).log_softmax(dim=-1)


def log_probabilities_on_support(logits: Tensor, temperature: float, support_mask: Tensor) -> Tensor:
    """Natural-log probabilities renormalised over a given support: the other side of `log_probabilities`.

    Args:
        logits: float32 [tokens, vocab]; not changed.
        support_mask: bool [tokens, vocab], true where the rollout policy can sample.

    Returns:
        float32 [tokens, vocab], -inf outside the support.
    """
    return _heat(logits, temperature).masked_fill(~support_mask, -torch.inf).log_softmax(dim=-1)


def _heat(logits: Tensor, temperature: float) -> Tensor:
    return logits if temperature == 1 else logits / temperature


def _truncate(logits: Tensor, sampling: Sampling) -> Tensor:
    if sampling.min_p > 0:
        probabilities = logits.softmax(dim=-1)
        threshold = probabilities.amax(dim=-1, keepdim=True) * sampling.min_p
        logits = logits.masked_fill(probabilities < threshold, -torch.inf)
    top_k = sampling.top_k if 0 < sampling.top_k < logits.shape[-1] else 0
    if top_k:
        kth_logit = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth_logit, -torch.inf)
    return _truncate_top_p(logits, sampling.top_p) if sampling.top_p < 1 else logits


def _truncate_top_p(logits: Tensor, top_p: float) -> Tensor:
    """Drops the least probable tokens as long as their summed probability is at most 1 - top_p."""
    ascending, token_ids = logits.sort(dim=-1)
    cumulated = ascending.softmax(dim=-1).cumsum_(dim=-1)
    dropped = cumulated <= 1 - top_p
    dropped[..., -1] = False
    return torch.empty_like(logits).scatter_(-1, token_ids, ascending.masked_fill_(dropped, -torch.inf))


# --- noise ------------------------------------------------------------------------------------------------------------


def gumbel_noise(seeds: Sequence[int], position: int, vocab_size: int, device: torch.device | str = "cpu") -> Tensor:
    """Standard Gumbel noise keyed by request and position: argmax(logq + noise) is an exact sample from q.

    Two policies that use the same seeds are coupled: where their distributions agree they sample the same token
    (the Gumbel-max trick with common random numbers).

    Args:
        seeds: of each request, [batch].
        position: of the token in its completion, the same for the whole batch.

    Returns:
        float32 [batch, vocab], finite, in about (-2.9, 22.9).
    """
    keys = torch.tensor([_signed(_mix(_mix(seed) + position)) for seed in seeds], dtype=torch.int64, device=device)
    uniform = _uniform(keys, vocab_size).clamp_(max=_LARGEST_BELOW_ONE)
    # -log1p(-u) and not -log(u): the winner comes from the smallest exponential, where this keeps full precision.
    return uniform.neg_().log1p_().neg_().log_().neg_()


def normal_noise(keys: Tensor, vocab_size: int) -> Tensor:
    """Standard normal noise, float32 [tokens, vocab], that depends on int64 keys [tokens] and the token id alone.

    By inversion from 32-bit uniforms in float32: the tails end at about 5.4.
    """
    centred = _uniform(keys, vocab_size).mul_(2).sub_(1).clamp_(-_LARGEST_BELOW_ONE, _LARGEST_BELOW_ONE)
    return centred.erfinv_().mul_(2**0.5)


def state_keys(hidden: Tensor, seed: int) -> Tensor:
    """A 64-bit hash of each row's bits and `seed`: int64 [tokens] from a floating-point [tokens, hidden]."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[hidden.element_size()]
    bits = hidden.contiguous().view(integers).to(torch.int64)
    bits += _counters(hidden.shape[-1], hidden.device)
    return _mix_tensor(_mix_tensor(bits).sum(dim=-1) + _signed(_mix(seed)))


def _uniform(keys: Tensor, vocab_size: int) -> Tensor:
    """float32 [n, vocab] in (0, 1]: the upper 32 bits of SplitMix64's output for key and token."""
    bits = _mix_tensor(keys[:, None] + _counters(vocab_size, keys.device))
    bits = bits.bitwise_right_shift_(32).bitwise_and_(2**32 - 1)
    return bits.to(torch.float32).add_(0.5).mul_(2.0**-32)


def _counters(count: int, device: torch.device) -> Tensor:
    return torch.arange(1, count + 1, device=device) * _signed(_GOLDEN_GAMMA)


def _mix_tensor(state: Tensor) -> Tensor:
    """SplitMix64's output function, in place on int64 (which wraps as unsigned arithmetic does)."""
    for shift, factor in ((30, _MIX_1), (27, _MIX_2), (31, 1)):
        # torch shifts int64 arithmetically; the mask makes the shift logical.
        state ^= (state >> shift).bitwise_and_(2 ** (64 - shift) - 1)
        if factor != 1:
            state *= _signed(factor)
    return state


def _mix(state: int) -> int:
    """SplitMix64's next output from `state`, as an unsigned Python integer."""
    state = (state + _GOLDEN_GAMMA) & _MASK_64
    state = ((state ^ (state >> 30)) * _MIX_1) & _MASK_64
    state = ((state ^ (state >> 27)) * _MIX_2) & _MASK_64
    return state ^ (state >> 31)


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    return value - 2**64 if value >= 2**63 else value
