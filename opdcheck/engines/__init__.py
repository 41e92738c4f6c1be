"""Who samples. `open_engine` turns a candidate into a running engine; each engine has a module of its own."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import assert_never

from opdcheck.config import Candidate
from opdcheck.engines.base import Provenance, ReloadableEngine, RolloutEngine, RolloutRequest
from opdcheck.files import scratch_folder
from opdcheck.rollouts import Prompt, Rollout


def open_engine(
    candidate: Candidate, base: Path, prompts: Sequence[Prompt], calibration_ids: list[list[int]]
) -> RolloutEngine:
    """Starts the candidate's engine with the candidate's perturbations in place.

    Args:
        prompts: all that will be sampled from; the longest sets the engine's context length.
        calibration_ids: token ids that static activation scales are set from.

    Raises:
        ConfigError: the engine cannot run this candidate.
        EngineError: it did not start.
    """
    match candidate.rollout.engine:
        case "transformers":
            return _open_transformers(candidate, base, calibration_ids)
        case "vllm":
            return _open_vllm(candidate, base, prompts, calibration_ids)
        case _:
            assert_never(candidate.rollout.engine)


def _open_transformers(candidate: Candidate, base: Path, calibration_ids: list[list[int]]) -> RolloutEngine:
    from opdcheck.engines.transformers_engine import TransformersEngine
    from opdcheck.models import end_token_ids
    from opdcheck.perturb.policy import active_parts, build_policy, describe

    rollout = candidate.rollout
    policy = build_policy(candidate, base, active_parts(candidate), calibration_ids=calibration_ids)
    return TransformersEngine(
        policy,
        sampling=rollout.sampling,
        max_completion_length=candidate.workload.max_completion_length,
        eos_token_ids=end_token_ids(candidate.student, base),
        noise_logits=rollout.noise.logits if rollout.noise else 0.0,
        noise_seed=rollout.noise.seed if rollout.noise else 0,
        provenance=describe(candidate, engine="transformers"),
    )


def _open_vllm(
    candidate: Candidate, base: Path, prompts: Sequence[Prompt], calibration_ids: list[list[int]]
) -> RolloutEngine:
    from opdcheck.engines.vllm_engine import open_vllm
    from opdcheck.models import end_token_ids, source_folder
    from opdcheck.perturb.checkpoint import needs_checkpoint, write_checkpoint
    from opdcheck.perturb.policy import describe

    rollout = candidate.rollout
    with ExitStack() as stack:
        source = rollout.model or candidate.student
        model = source_folder(source, base)
        provenance: list[Provenance] = []
        if needs_checkpoint(candidate):
            folder = stack.enter_context(scratch_folder()) / "policy"
            write_checkpoint(candidate, base, folder, calibration_ids=calibration_ids)
            provenance = describe(candidate, engine="vllm")
            model = str(folder)
        # vLLM has read the weights when this returns: the temporary checkpoint goes at the end of the block.
        return open_vllm(
            model=model,
            dtype=rollout.dtype,
            kv_cache_dtype=rollout.kv_cache_dtype,
            kv_cache_dtype_skip_layers=rollout.kv_cache_dtype_skip_layers,
            sampling=rollout.sampling,
            max_completion_length=candidate.workload.max_completion_length,
            max_prompt_length=max(len(prompt.token_ids) for prompt in prompts),
            eos_token_ids=end_token_ids(candidate.student, base),
            logprobs=rollout.logprobs,
            trust_remote_code=source.trust_remote_code,
            seed=candidate.workload.seed,
            engine_args=rollout.engine_args,
            provenance=provenance,
        )


__all__ = ["Provenance", "ReloadableEngine", "Rollout", "RolloutEngine", "RolloutRequest", "open_engine"]
