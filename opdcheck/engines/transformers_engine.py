"""Rollouts from a `transformers` model in this process: batched, with a KV cache, and with the whole distribution."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from opdcheck.batches import length_batches
from opdcheck.config import Sampling
from opdcheck.engines.base import Provenance
from opdcheck.errors import EngineError
from opdcheck.models import CausalLM, memory_explained, quiet_transformers
from opdcheck.rollouts import Rollout, RolloutRequest
from opdcheck.sampling import gumbel_noise, log_probabilities

# Logits, log-probabilities, noise and their temporaries at one decoding step, per logit.
_STEP_BYTES_PER_LOGIT = 40
_STEP_BYTES = 512 * 2**20


class TransformersEngine:
    """Samples from a policy, and keeps each token's final hidden state as it was when the token was drawn.

    Each token is argmax(logq + Gumbel noise), which is an exact sample from q. The noise is keyed by the request's seed
    and the token's position, so a rollout does not depend on its batch mates (beyond floating point), and two
    policies given the same requests are coupled.

    Args:
        policy: the rollout policy q, already perturbed.
        sampling: the transform that it is sampled under.
        max_completion_length: in tokens, the end token included.
        eos_token_ids: any of these ends a completion; empty: only the length does.
        pad_token_id: fills batches on the left, where it is masked. Default: any token.
        noise_logits: sigma of Gaussian noise on the logits, in nats; see `CausalLM.with_logit_noise`.
        noise_seed: of that noise.
        provenance: how the policy was made.
        max_batch_tokens: bound of sequences times their longest possible length, that is of the KV cache; one sequence
            is always allowed.
    """

    def __init__(
        self,
        policy: CausalLM,
        *,
        sampling: Sampling,
        max_completion_length: int,
        eos_token_ids: set[int],
        pad_token_id: int | None = None,
        noise_logits: float = 0.0,
        noise_seed: int = 0,
        provenance: Sequence[Provenance] = (),
        max_batch_tokens: int = 65536,
    ) -> None:
        self._policy: CausalLM | None = policy.with_logit_noise(noise_logits, noise_seed) if noise_logits else policy
        self._sampling = sampling
        self._max_completion_length = max_completion_length
        self._eos_token_ids = sorted(eos_token_ids)
        self._pad_token_id = pad_token_id if pad_token_id is not None else min(eos_token_ids, default=0)
        self._provenance = list(provenance)
        self._max_batch_tokens = max_batch_tokens
        self._device = policy.device

    @property
    def name(self) -> str:
        return f"transformers {transformers.__version__} ({self._device.type})"

    @property
    def provenance(self) -> list[Provenance]:
        return self._provenance

    @property
    def policy(self) -> CausalLM:
        """The rollout policy q, logit noise included.

        Raises:
            EngineError: the engine is closed.
        """
        if self._policy is None:
            raise EngineError("the transformers engine is closed")
        return self._policy

    def logits(self, final_hidden: Tensor) -> Tensor:
        """The policy's own logits, before sampling transforms. [tokens, hidden] -> float32 [tokens, vocab]."""
        return self.policy.logits(final_hidden)

    def generate(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        """Samples one rollout per request, in the order of the requests.

        Raises:
            EngineError: a prompt is empty or leaves no room in the model's context, or memory ran out.
        """
        for request in requests:
            self._check_length(request)
        rollouts: dict[int, Rollout] = {}
        for batch in self._batches(requests):
            sampled = self._generate_batch([requests[index] for index in batch])
            rollouts.update(zip(batch, sampled, strict=True))
        return [rollouts[index] for index in range(len(requests))]

    def close(self) -> None:
        """Lets go of the policy and its memory."""
        self._policy = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _check_length(self, request: RolloutRequest) -> None:
        length, limit = len(request.prompt.token_ids), self.policy.max_positions
        if length == 0:
            raise EngineError(f"prompt {request.prompt.index} has no tokens, so there is nothing to continue")
        if limit is not None and length + self._max_completion_length > limit:
            raise EngineError(
                f"prompt {request.prompt.index} has {length} tokens: with {self._max_completion_length} of completion "
                f"it does not fit the model's context of {limit}",
                hint="Lower `workload.max_completion_length` or shorten the prompt.",
            )

    def _batches(self, requests: Sequence[RolloutRequest]) -> Iterator[list[int]]:
        """Indices of the requests that are sampled together: similar prompt lengths, longest first."""
        most_rows = max(1, _STEP_BYTES // (self.policy.vocab_size * _STEP_BYTES_PER_LOGIT))
        lengths = [len(request.prompt.token_ids) + self._max_completion_length for request in requests]
        return length_batches(lengths, self._max_batch_tokens, most_rows)

    def _generate_batch(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        policy = self.policy
        sampler = _GumbelSampler(policy, self._sampling, [request.seed for request in requests])
        input_ids, mask = self._left_padded([request.prompt.token_ids for request in requests])
        with (
            torch.no_grad(),
            quiet_transformers(),
            memory_explained(f"sampling {len(requests)} rollouts at once"),
            _own_generation_config(policy.model),
            sampler.watching_head(),
        ):
            policy.model.generate(
                input_ids=input_ids,
                attention_mask=mask,
                generation_config=self._generation_config(),
                logits_processor=LogitsProcessorList([sampler]),
            )
        tokens, logq, hidden = sampler.recorded()
        return [self._rollout(request, *row) for request, *row in zip(requests, tokens, logq, hidden, strict=True)]

    def _generation_config(self) -> GenerationConfig:
        """Greedy over the scores that `_GumbelSampler` returns, and nothing else."""
        return GenerationConfig(
            do_sample=False,
            num_beams=1,
            max_new_tokens=self._max_completion_length,
            eos_token_id=self._eos_token_ids or None,
            pad_token_id=self._pad_token_id,
            use_cache=True,
        )

    def _left_padded(self, prompts: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
        """Token ids and attention mask, int64 [batch, tokens]."""
        longest = max(map(len, prompts))
        input_ids = torch.tensor([[self._pad_token_id] * (longest - len(ids)) + ids for ids in prompts])
        mask = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
        return input_ids.to(self._device), mask.to(self._device)

    def _rollout(self, request: RolloutRequest, token_ids: Tensor, logq: Tensor, hidden: Tensor) -> Rollout:
        """Cuts a row of the batch after its first end token."""
        ids = token_ids.numpy()
        ends = np.flatnonzero(np.isin(ids, self._eos_token_ids))
        length = int(ends[0]) + 1 if len(ends) else len(ids)
        return Rollout(
            prompt=request.prompt,
            sample=request.sample,
            token_ids=ids[:length].copy(),
            logq=logq[:length].double().numpy(),
            finish_reason="stop" if len(ends) else "length",
            final_hidden=hidden[:length].clone(),
        )


class _GumbelSampler(LogitsProcessor):
    """Turns logits into scores whose argmax is a sample, and records what was drawn, step by step."""

    def __init__(self, policy: CausalLM, sampling: Sampling, seeds: Sequence[int]) -> None:
        self._policy = policy
        self._sampling = sampling
        self._seeds = seeds
        self._last_hidden: Tensor | None = None
        self._tokens: list[Tensor] = []
        self._logq: list[Tensor] = []
        self._hidden: list[Tensor] = []

    @contextmanager
    def watching_head(self) -> Iterator[None]:
        """Sees what the head is given, [batch, 1 or more, hidden]."""

        def keep(_: Any, arguments: tuple[Tensor, ...]) -> None:
            self._last_hidden = arguments[0][:, -1]

        handle = self._policy.head.register_forward_pre_hook(keep)
        try:
            yield
        finally:
            handle.remove()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # noqa: ARG002 (the name is transformers')
        """float32 logits [batch, vocab] -> logq + Gumbel noise."""
        if self._last_hidden is None:
            raise EngineError(f"{type(self._policy.model).__name__} generates without calling its output head")
        position = len(self._tokens)
        logits = self._policy.add_logit_noise(scores, self._last_hidden)
        logq = log_probabilities(logits, self._sampling)
        noisy = gumbel_noise(self._seeds, position, logq.shape[-1], logq.device).add_(logq)
        chosen = noisy.argmax(dim=-1)
        self._tokens.append(chosen)
        self._logq.append(logq.gather(1, chosen[:, None])[:, 0])
        # A copy: the view would keep the whole prompt's hidden states alive.
        self._hidden.append(self._last_hidden.clone())
        return noisy

    def recorded(self) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens and logq, [batch, steps], and hidden states, [batch, steps, hidden]; on the CPU."""
        parts = (self._tokens, self._logq, self._hidden)
        tokens, logq, hidden = (torch.stack(part, dim=1).cpu() for part in parts)
        return tokens, logq, hidden


@contextmanager
def _own_generation_config(model: Any) -> Iterator[None]:
    """Hides the checkpoint's generation config, from which `generate` would fill in what ours leaves open
    (repetition_penalty, suppress_tokens, ...)."""
    hidden = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = hidden
