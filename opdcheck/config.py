"""The candidate file: a rollout configuration under test. The only place that knows its syntax.

Nothing here imports torch: `opdcheck schema` and every configuration error answer at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

DType = Literal["bfloat16", "float16", "float32"]
Metric = Literal["tv", "kl", "k3", "abs_dlogp"]
EngineName = Literal["transformers", "vllm"]


class Model(BaseModel):
    """Base of all file models: unknown keys are errors, values do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ModelRef(Model):
    """A model on disk or on a hub."""

    path: str
    """Folder (relative to this file, `~` allowed) or hub id such as `HuggingFaceTB/SmolLM2-135M-Instruct`."""
    revision: str | None = None
    """Hub revision (branch, tag or commit)."""
    trust_remote_code: bool = False
    """Run the modelling code that a hub repository ships. Off unless asked for."""


class Student(ModelRef):
    """The model that is trained, as the trainer holds it."""

    dtype: DType = "bfloat16"
    """Compute dtype of the trainer, in which `logp` is scored."""
    device: str = "auto"
    """`auto` (first GPU if there is one), `cpu`, `cuda:1`, ..."""


class Quantization(Model):
    """A compressed-tensors scheme applied to some of the student's layers."""

    scheme: str
    """Preset name: `FP8_DYNAMIC`, `FP8`, `FP8_BLOCK`, `W8A8`, `W4A16`, `NVFP4`, `MXFP8`, ..."""
    targets: list[str] = ["Linear"]
    """Module classes, names, or `re:` patterns, as in compressed-tensors."""
    ignore: list[str] = ["lm_head"]
    """Modules left in the rollout dtype; names or `re:` patterns."""
    group_size: Annotated[int, Field(ge=1)] | None = None
    """Instead of the preset's group size (W4A16: 128)."""


class Sampling(Model):
    """How the rollout policy is sampled. Both sides are measured under the same transform."""

    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Both sides' logits are divided by it."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    """-1 (or 0) keeps all tokens, as in vLLM."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0

    @property
    def truncates(self) -> bool:
        """Whether the support is smaller than the vocabulary."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


class Staleness(Model):
    """The rollout policy holds weights that are `lag` optimizer steps older than the trainer's."""

    checkpoint: str
    """Folder or hub id of the older weights."""
    lag: Annotated[int, Field(ge=0)] | None = None
    """Optimizer steps between the two; for the record."""


class Noise(Model):
    """Gaussian noise on the rollout policy."""

    weights: Annotated[float, Field(ge=0)] = 0.0
    """Sigma relative to each weight tensor's RMS."""
    logits: Annotated[float, Field(ge=0)] = 0.0
    """Sigma on every logit, in nats, drawn anew at each position."""
    seed: int = 0


class Rollout(Model):
    """The candidate: who samples, and in what state."""

    engine: EngineName = "vllm"
    model: ModelRef | None = None
    """Another checkpoint to sample from, e.g. one already quantized by llm-compressor. Default: the student."""
    dtype: DType = "bfloat16"
    quantization: str | Quantization | dict[str, Any] | None = None
    """A compressed-tensors preset name, `{scheme, targets, ignore, group_size}`, or a full `quantization_config`
    with `config_groups`."""
    kv_cache_dtype: str = "auto"
    """vLLM's names: `auto`, `bfloat16`, `fp8`, `fp8_e4m3`, `fp8_e5m2`, `fp8_per_token_head`, ..."""
    kv_cache_dtype_skip_layers: list[int] = []
    """Layers whose KV cache stays in the rollout dtype."""
    simulate: bool = False
    """Let fake quantization stand in for what the engine cannot run here. Every report says so."""
    sampling: Sampling = Sampling()
    staleness: Staleness | None = None
    noise: Noise | None = None
    logprobs: Annotated[int, Field(ge=0)] = 20
    """vLLM only: how many top log-probabilities to ask for per token (0: only the sampled token's)."""
    engine_args: dict[str, Any] = {}
    """Handed to vLLM's `LLM(...)` as they are, after a check against its own argument list."""


class Workload(Model):
    """The prompts that calibration rollouts start from."""

    prompts: str
    """JSONL or Parquet file, relative to this file; one `prompt` (text) or `messages` (chat) per row."""
    num_prompts: Annotated[int, Field(ge=1)] | None = None
    """The first so many rows; default all."""
    samples_per_prompt: Annotated[int, Field(ge=1)] = 1
    max_completion_length: Annotated[int, Field(ge=1)] = 128
    """In tokens."""
    chat_template_kwargs: dict[str, Any] = {}
    """Handed to the tokenizer's chat template, e.g. `{enable_thinking: false}`."""
    seed: int = 0


class Decision(Model):
    """How the verdict is reached."""

    metric: Metric | None = None
    """Scale of the decision. Default: the one the budget limits (`tv` where it limits several)."""
    alpha: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Error level of the anytime-valid confidence sequence."""
    min_prompts: Annotated[int, Field(ge=2)] = 8
    """No verdict before so many prompts."""
    max_prompts: Annotated[int, Field(ge=2)] | None = None
    """Inconclusive when so many prompts do not decide. Default: all of the workload."""
    round_prompts: Annotated[int, Field(ge=1)] = 8
    """Prompts sampled and scored between two looks at the interval."""


class Candidate(Model):
    """A rollout configuration under test: `opdcheck admit candidate.yaml`."""

    student: Student
    teacher: ModelRef | None = None
    """Only its fingerprint is used by `admit`: a budget belongs to a student-teacher pair."""
    rollout: Rollout
    workload: Workload
    budget: str | None = None
    """Budget file, relative to this file."""
    decision: Decision = Decision()


def resolve(path: str, base: Path) -> Path:
    """`path` as the file at `base` means it: `~` expanded, relative to the file's folder."""
    return (base / Path(path).expanduser()).resolve()
