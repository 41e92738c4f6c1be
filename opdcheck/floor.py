"""What no candidate can undercut: the kernel floor and, below it, the trainer against itself.

`kernel`: the student as it is, at the trainer's dtype, in the candidate's engine. `trainer_null`: the trainer scored
against itself with another batch shape. Both depend on student and environment alone, so they are measured once and
kept with the budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

from opdcheck.config import Candidate, Metric, Rollout
from opdcheck.measure import measure_round
from opdcheck.mismatch.aggregate import Summary, summarize
from opdcheck.rollouts import Rollout as SampledRollout
from opdcheck.rounds import Round
from opdcheck.session import Session, in_rounds

FLOOR_METRICS: tuple[Metric, ...] = get_args(Metric)

# vLLM arguments that leave the kernels' numbers to its own choice: sizes, memory, scheduling, parallelism, eager mode.
# A list of what stays, because what changes numbers (quantization, hf_overrides, load_format, speculative_config, ...)
# grows with every release.
NEUTRAL_ENGINE_ARGS = (
    "async_scheduling",
    "block_size",
    "cpu_offload_gb",
    "data_parallel_backend",
    "data_parallel_size",
    "device_ids",
    "disable_custom_all_reduce",
    "disable_log_stats",
    "distributed_executor_backend",
    "download_dir",
    "enable_chunked_prefill",
    "enable_expert_parallel",
    "enable_prefix_caching",
    "enable_sleep_mode",
    "enforce_eager",
    "gpu_memory_utilization",
    "hf_token",
    "kv_cache_memory_bytes",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_scheduled_tokens",
    "max_num_seqs",
    "max_parallel_loading_workers",
    "num_gpu_blocks_override",
    "numa_bind",
    "pipeline_parallel_size",
    "tensor_parallel_size",
)


def unperturbed(candidate: Candidate) -> Candidate:
    """The same student, engine, sampling and workload without quantization, noise, staleness or another dtype.

    Of `engine_args` only `NEUTRAL_ENGINE_ARGS` stay.
    """
    rollout = candidate.rollout
    clean = Rollout(
        engine=rollout.engine,
        dtype=candidate.student.dtype,
        sampling=rollout.sampling,
        logprobs=rollout.logprobs,
        engine_args={key: value for key, value in rollout.engine_args.items() if key in NEUTRAL_ENGINE_ARGS},
    )
    return candidate.model_copy(update={"rollout": clean})


def kernel_floor(session: Session, max_prompts: int) -> list[Round]:
    """Measures the session's (unperturbed) candidate on the prompts that are drawn first."""
    groups = in_rounds(session.drawn_prompts[:max_prompts], session.candidate.decision.round_prompts)
    return [measure_round(session, prompts) for prompts in groups]


def trainer_null(session: Session, rollouts: Sequence[SampledRollout]) -> Summary:
    """Mismatch of the trainer against itself: the same tokens scored in batches and one sequence at a time."""
    scorer = session.scorer  # loads the trainer, a stage of its own, where nothing has needed it so far
    session.progress.stage("scoring the trainer against itself")
    mismatch = scorer.compare(
        rollouts,
        scorer.final_hidden(rollouts),
        scorer.null_hidden(rollouts),
        session.trainer.logits,
        session.candidate.rollout.sampling,
    )
    return summarize(Round(list(rollouts), mismatch).by_prompt())


def means(summary: Summary) -> dict[str, float]:
    """The floor as the budget file stores it: mean per metric, in the metric's own unit."""
    return {name: summary.metrics[name].mean for name in FLOOR_METRICS}
