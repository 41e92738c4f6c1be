"""The candidate file: a rollout configuration under test. The only place that knows its syntax.

Nothing here imports torch: `opdcheck schema` and every configuration error answer at once.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, assert_never

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError

from opdcheck import yamlfile
from opdcheck.complaints import complaints, describe, one_of
from opdcheck.errors import ConfigError
from opdcheck.kinds import CANDIDATE
from opdcheck.yamlfile import Located

DType = Literal["bfloat16", "float16", "float32"]
Metric = Literal["tv", "kl", "k3", "abs_dlogp"]
EngineName = Literal["transformers", "vllm"]

# `vllm.config.cache.CacheDType` of vLLM 0.32.0, which cannot be imported here; a test compares the two.
KVCacheDType = Literal[
    "auto",
    "float16",
    "bfloat16",
    "fp8",
    "fp8_e4m3",
    "fp8_e5m2",
    "fp8_inc",
    "fp8_ds_mla",
    "nvfp4_ds_mla",
    "turboquant_k8v4",
    "turboquant_4bit_nc",
    "turboquant_k3v4_nc",
    "turboquant_3bit_nc",
    "ultraquant_4bit",
    "int4_per_token_head",
    "int8_per_token_head",
    "fp8_per_token_head",
    "nvfp4",
    "nvfp4_4over6",
]

# The keys of `compressed_tensors.quantization.PRESET_SCHEMES` (0.17.0), whose import would load torch; a test compares.
PRESET_SCHEMES = (
    "UNQUANTIZED",
    "W8A16",
    "W4A16",
    "W4A16_ASYM",
    "W8A8",
    "INT8",
    "W4A8",
    "W4AFP8",
    "FP8",
    "FP8_DYNAMIC",
    "FP8_BLOCK",
    "NVFP4A16",
    "NVFP4",
    "MXFP4A16",
    "MXFP4",
    "MXFP8A16",
    "MXFP8",
)

# vLLM arguments that the candidate file has a key for, and that key.
OWN_KEYS = {
    "model": "rollout.model or student.path",
    "dtype": "rollout.dtype",
    "kv_cache_dtype": "rollout.kv_cache_dtype",
    "kv_cache_dtype_skip_layers": "rollout.kv_cache_dtype_skip_layers",
    "seed": "workload.seed",
    "max_logprobs": "rollout.logprobs",
    "tokenizer": "student.path",
    "tokenizer_revision": "student.revision",
    "revision": "student.revision or rollout.model.revision",
    "code_revision": "student.revision or rollout.model.revision",
    "trust_remote_code": "student.trust_remote_code",
    "allow_deprecated_quantization": "rollout.quantization",
}
# vLLM arguments without which the measurement would not be one.
FIXED_ARGS = {
    "logprobs_mode": "it must describe the distribution that was sampled from",
    "logits_processors": "the trainer's side cannot apply them",
    "skip_tokenizer_init": "only token ids are passed",
    "runner": "rollouts are generated text",
    "convert": "rollouts are generated text",
    "override_generation_config": "`rollout.sampling` says how to sample",
}

# Arguments of `apply_chat_template` that are no business of the template.
TOKENIZATION_ARGS = (
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "max_length",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "tokenize",
    "tokenizer_kwargs",
    "truncation",
)

_DEVICE = re.compile(r"auto|cpu|mps|(cuda|xpu)(:[0-9]{1,4})?")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
"""What a hub's model id looks like: `name` or `owner/name`."""

VLLM_MIN_TEMPERATURE = 0.01
"""`vllm.sampling_params._MAX_TEMP` of vLLM 0.32.0: lower temperatures are raised to it."""


def _preset(name: str) -> str:
    """A preset's name as compressed-tensors spells it; case does not matter there either."""
    if name.upper() not in PRESET_SCHEMES:
        raise ValueError(one_of(PRESET_SCHEMES, name))
    return name.upper()


def _device(name: str) -> str:
    if not _DEVICE.fullmatch(name):
        raise ValueError(f"expected `auto`, `cpu`, `cuda`, `cuda:1`, `mps` or `xpu`, found {describe(name)}")
    return name


def _unique(indices: list[int]) -> list[int]:
    for position, index in enumerate(indices):
        if index in indices[:position]:
            raise ValueError(f"expected each layer once, found {index} twice")
    return indices


def _has_groups(config: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(config["config_groups"], dict) or not config["config_groups"]:
        raise ValueError("expected `config_groups` to map group names to schemes, as in compressed-tensors")
    return config


PresetName = Annotated[str, AfterValidator(_preset), Field(json_schema_extra={"enum": list(PRESET_SCHEMES)})]
LayerIndex = Annotated[int, Field(ge=0)]


class Model(BaseModel):
    """Base of all file models: unknown keys are errors, values do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class Section(Model):
    """Base of the candidate file's sections: besides, numbers are finite."""

    model_config = ConfigDict(allow_inf_nan=False)


class ModelRef(Section):
    """A model on disk or on a hub."""

    path: Annotated[str, Field(min_length=1)]
    """Folder (relative to this file, `~` allowed) or hub id such as `HuggingFaceTB/SmolLM2-135M-Instruct`."""
    revision: str | None = None
    """Hub revision (branch, tag or commit)."""
    trust_remote_code: bool = False
    """Run the modelling code that a hub repository ships. Off unless asked for."""


class Student(ModelRef):
    """The model that is trained, as the trainer holds it."""

    dtype: DType = "bfloat16"
    """Compute dtype of the trainer, in which `logp` is scored."""
    device: Annotated[str, AfterValidator(_device)] = "auto"
    """`auto` (first GPU if there is one), `cpu`, `cuda:1`, ..."""


class Quantization(Section):
    """A compressed-tensors scheme applied to some of the student's layers."""

    scheme: PresetName
    """Preset name: `FP8_DYNAMIC`, `FP8`, `FP8_BLOCK`, `W8A8`, `W4A16`, `NVFP4`, `MXFP8`, ..."""
    targets: list[str] = ["Linear"]
    """Module classes, names, or `re:` patterns, as in compressed-tensors."""
    ignore: list[str] = ["lm_head"]
    """Modules left in the rollout dtype; names or `re:` patterns."""
    group_size: Annotated[int, Field(ge=1)] | None = None
    """Instead of the preset's group size (W4A16: 128)."""


def _quantization_form(value: Any) -> str | None:
    """Which of its three forms `quantization` has, so that an error speaks of that form only."""
    if isinstance(value, str):
        return "<name>"
    if isinstance(value, Quantization):
        return "<scheme>"
    if isinstance(value, Mapping):
        return "<full>" if "config_groups" in value else "<scheme>"
    return None


QuantizationChoice = Annotated[
    Annotated[PresetName, Tag("<name>")]
    | Annotated[Quantization, Tag("<scheme>")]
    | Annotated[
        dict[str, Any],
        AfterValidator(_has_groups),
        Field(json_schema_extra={"required": ["config_groups"]}),
        Tag("<full>"),
    ],
    Discriminator(
        _quantization_form,
        custom_error_type="quantization_form",
        custom_error_message="expected a scheme name, or a mapping with `scheme` or `config_groups`",
    ),
]


class Sampling(Section):
    """How the rollout policy is sampled. Both sides are measured under the same transform."""

    temperature: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """Both sides' logits are divided by it."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Smallest set of tokens with this mass; 1 keeps all."""
    top_k: Annotated[int, Field(ge=-1)] = -1
    """-1 (or 0) keeps all tokens, as in vLLM."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Tokens at least this share of the most probable one; 0 keeps all."""

    @property
    def truncates(self) -> bool:
        """Whether the support is smaller than the vocabulary."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


class Staleness(Section):
    """The rollout policy holds weights that are `lag` optimizer steps older than the trainer's."""

    checkpoint: Annotated[str, Field(min_length=1)] | None = None
    """Folder or hub id of the older weights. Without it `admit` trains the student with the
    method settings of a calibrated budget, past its warm-up, and compares weights that are `lag` steps apart. Needs
    `teacher`."""
    revision: str | None = None
    """Hub revision, such as a training step's branch."""
    lag: Annotated[int, Field(ge=1)] | None = None
    """Optimizer steps between the two. With a checkpoint: for the record."""

    def as_model(self) -> ModelRef | None:
        """The older weights as a model to load; None without a checkpoint."""
        return None if self.checkpoint is None else ModelRef(path=self.checkpoint, revision=self.revision)

    def describe(self) -> str:
        """For reports."""
        return f"weights of {self.checkpoint}" + ("" if self.lag is None else f", {self.lag} optimizer steps old")


class Noise(Section):
    """Gaussian noise on the rollout policy."""

    weights: Annotated[float, Field(ge=0, le=1000)] = 0.0
    """Sigma relative to each weight tensor's RMS."""
    logits: Annotated[float, Field(ge=0, le=1000)] = 0.0
    """Sigma on every logit, in nats, drawn anew at each position. Engine `transformers` only."""
    seed: int = 0
    """Of the noise."""


Source = Literal["quantization", "noise", "staleness"]
"""Why a rollout policy differs from the trainer's besides its kernels; the KV cache's dtype is `quantization`."""


class Rollout(Section):
    """The candidate: who samples, and in what state."""

    engine: EngineName = "vllm"
    """`vllm` (real kernels) or `transformers` (simulated quantization, whole distributions)."""
    model: ModelRef | None = None
    """Another checkpoint to sample from, e.g. one already quantized by llm-compressor. Default: the student."""
    dtype: DType = "bfloat16"
    """Compute dtype of the rollout engine."""
    quantization: QuantizationChoice | None = None
    """A compressed-tensors preset name, `{scheme, targets, ignore, group_size}`, or a full `quantization_config`
    with `config_groups`."""
    kv_cache_dtype: KVCacheDType = "auto"
    """vLLM's names: `auto`, `bfloat16`, `fp8`, `fp8_e4m3`, `fp8_e5m2`, `fp8_per_token_head`, ..."""
    kv_cache_dtype_skip_layers: Annotated[list[LayerIndex], AfterValidator(_unique)] = []
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

    @property
    def sources(self) -> list[Source]:
        """What this configuration adds to the kernels' own mismatch. Another checkpoint counts as quantization."""
        present: dict[Source, bool] = {
            "quantization": self.quantization is not None
            or self.kv_cache_dtype not in ("auto", self.dtype)
            or self.model is not None
            or any(self.engine_args.get(name) for name in ("quantization", "quantization_config")),
            "noise": self.noise is not None and (self.noise.weights > 0 or self.noise.logits > 0),
            "staleness": self.staleness is not None,
        }
        return [name for name, there in present.items() if there]


class Workload(Section):
    """The prompts that rollouts start from."""

    prompts: str
    """JSONL or Parquet file, relative to this file; one `prompt` (text) or `messages` (chat) per row."""
    num_prompts: Annotated[int, Field(ge=1)] | None = None
    """The first so many rows; default all."""
    samples_per_prompt: Annotated[int, Field(ge=1, le=4096)] = 1
    """Completions per prompt; they count as one prompt in every interval."""
    max_completion_length: Annotated[int, Field(ge=1)] = 128
    """In tokens."""
    chat_template_kwargs: dict[str, Any] = {}
    """Handed to the tokenizer's chat template, e.g. `{enable_thinking: false}`."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Of the sampling; each completion has a seed of its own, derived from it."""


class Decision(Section):
    """How the verdict is reached."""

    metric: Metric | None = None
    """Scale that decides, and that the report draws. Default: the one the budget limits (`tv` where it limits several).
    The split by source is always in `tv` and `kl`."""
    alpha: Annotated[float, Field(gt=0, lt=1)] = 0.05
    """Error level of the anytime-valid confidence sequence."""
    min_prompts: Annotated[int, Field(ge=2)] = 8
    """No verdict before so many prompts."""
    max_prompts: Annotated[int, Field(ge=2)] | None = None
    """Inconclusive when so many prompts do not decide. Default: all of the workload."""
    round_prompts: Annotated[int, Field(ge=1)] = 16
    """Prompts sampled and scored between two looks at the interval."""


class Candidate(Section):
    """A rollout configuration under test: `opdcheck admit candidate.yaml`."""

    student: Student
    teacher: ModelRef | None = None
    """A budget belongs to a student-teacher pair. `admit` uses its fingerprint alone, unless `staleness.lag` asks for
    distillation steps."""
    rollout: Rollout
    workload: Workload
    budget: str | None = None
    """Budget file, relative to this file."""
    decision: Decision = Decision()


def resolve(path: str, base: Path) -> Path:
    """`path` as the file at `base` means it: `~` expanded, relative to the file's folder.

    Raises:
        ConfigError: no operating system could have such a path, or `~name` names no user.
    """
    try:
        return (base / Path(path).expanduser()).resolve()
    except (RuntimeError, ValueError, OSError) as error:
        raise ConfigError(f"not a usable path: {path!r}: {error}") from None


def is_local(path: str, base: Path) -> bool:
    """Whether a model's `path` means a folder on disk rather than a hub id."""
    return path.startswith((".", "/", "~")) or resolve(path, base).exists()


def load_candidate(
    path: Path,
    overrides: Mapping[str, Any] | None = None,
    *,
    flags: Mapping[str, str] | None = None,
    budget_must_exist: bool = True,
) -> Located[Candidate]:
    """Reads a candidate file and makes every check that needs no model and no engine.

    Args:
        path: the file; relative paths in it start from its folder.
        overrides, flags: as for `override`, applied before files are looked for.
        budget_must_exist: False where the budget is about to be written.

    Raises:
        ConfigError: one line per mistake, in file order, each `FILE:LINE: key.path: expected ..., found ...`.
    """
    located = yamlfile.load_located(path, Candidate, CANDIDATE)
    return override(located, overrides or {}, flags=flags, budget_must_exist=budget_must_exist)


def override(
    located: Located[Candidate],
    values: Mapping[str, Any],
    *,
    flags: Mapping[str, str] | None = None,
    budget_must_exist: bool = True,
) -> Located[Candidate]:
    """The candidate with some keys set by flags or variables, checked again as a whole.

    Args:
        located: a loaded candidate.
        values: dotted key -> value, e.g. `{"decision.alpha": 0.1}`; None means "not given". A `Path` is relative to the
            current folder, as flags are, and not to the file.
        flags: dotted key -> what the user wrote, for messages. Default `--alpha` for `decision.alpha`.

    Raises:
        ConfigError: naming the flag whose value is wrong, or file and line of what no longer fits.
    """
    given = {key: value for key, value in values.items() if value is not None}
    names = {key: (flags or {}).get(key, default_flag(key)) for key in given}
    changed = located.replace(located.value, names)
    if given:
        changed = changed.replace(_validated(changed, given))
    problems = [*rule_problems(changed.value), *file_problems(changed.value, changed.path.parent)]
    if problems := [problem for problem in problems if budget_must_exist or problem[0] != "budget"]:
        raise changed.errors(problems)
    return changed


def default_flag(key: str) -> str:
    """`--max-prompts` for `decision.max_prompts`."""
    return "--" + key.rpartition(".")[2].replace("_", "-")


def _validated(located: Located[Candidate], given: Mapping[str, Any]) -> Candidate:
    data = located.value.model_dump(mode="json", exclude_unset=True)
    for key, value in given.items():
        *parents, name = key.split(".")
        section = data
        for parent in parents:
            if not isinstance(section.get(parent), dict):
                section[parent] = {}
            section = section[parent]
        section[name] = str(value.absolute()) if isinstance(value, Path) else value
    try:
        return Candidate.model_validate(data, strict=True)
    except ValidationError as error:
        found = [(complaint.key, complaint.message) for complaint in complaints(error, Candidate, data)]
        raise located.errors(found) from None


Problem = tuple[str, str]
"""Dotted key, and what is wrong with its value."""


def rule_problems(candidate: Candidate) -> Iterator[Problem]:
    """What is wrong between keys; no file is touched."""
    yield from rollout_problems(candidate.rollout)
    yield from _prompt_count_problems(candidate.workload, candidate.decision)
    for name in candidate.workload.chat_template_kwargs:
        if name in TOKENIZATION_ARGS:
            yield f"workload.chat_template_kwargs.{name}", "cannot be set: opdcheck decides how prompts are tokenized"
    if _takes_steps(candidate.rollout) and candidate.teacher is None:
        yield "rollout.staleness.lag", "needs `teacher`: the optimizer steps are distillation steps"


def rollout_problems(rollout: Rollout) -> Iterator[Problem]:
    """What is wrong between the keys of `rollout`; no file is touched."""
    yield from _engine_problems(rollout)
    stale = rollout.staleness
    if stale is None:
        return
    if rollout.model is not None:
        yield "rollout.staleness", "`rollout.model` names the weights to sample from already; use one of the two"
    if stale.checkpoint is None and stale.lag is None:
        yield "rollout.staleness", "expected `checkpoint` (older weights) or `lag` (optimizer steps to take)"
    if stale.checkpoint is None and stale.revision is not None:
        yield "rollout.staleness.revision", "of which checkpoint? `staleness.checkpoint` is not set"


def _takes_steps(rollout: Rollout) -> bool:
    return rollout.staleness is not None and rollout.staleness.checkpoint is None


def file_problems(candidate: Candidate, base: Path) -> Iterator[Problem]:
    """What is wrong with the files and models that a candidate names. Nothing is read and no hub is asked."""
    rollout = candidate.rollout
    stale = rollout.staleness.as_model() if rollout.staleness else None
    yield from model_problems("student", "path", candidate.student, base)
    yield from model_problems("teacher", "path", candidate.teacher, base)
    yield from model_problems("rollout.model", "path", rollout.model, base)
    yield from model_problems("rollout.staleness", "checkpoint", stale, base)
    yield from prompt_file_problems("workload.prompts", candidate.workload.prompts, base)
    if candidate.budget is not None:
        for key, message in _file_problems("budget", candidate.budget, base, ()):
            how = "; `opdcheck budget declare` or `calibrate` makes one" if message.startswith("no such file") else ""
            yield key, message + how


def _engine_problems(rollout: Rollout) -> Iterator[Problem]:
    match rollout.engine:
        case "vllm":
            if rollout.noise and rollout.noise.logits:
                yield "rollout.noise.logits", "only `engine: transformers` can put noise on logits"
            yield from _vllm_sampling_problems(rollout)
            yield from _vllm_args_problems(rollout)
        case "transformers":
            yield from _transformers_problems(rollout)
        case _:
            assert_never(rollout.engine)


def _transformers_problems(rollout: Rollout) -> Iterator[Problem]:
    if rollout.simulate:
        yield (
            "rollout.simulate",
            "only for `engine: vllm`; `engine: transformers` simulates quantization always",
        )
    if "logprobs" in rollout.model_fields_set:
        yield "rollout.logprobs", "only for `engine: vllm`; `engine: transformers` gives the whole distribution"
    if rollout.engine_args:
        yield "rollout.engine_args", "only for `engine: vllm`, whose arguments these are"


def _vllm_sampling_problems(rollout: Rollout) -> Iterator[Problem]:
    """Where vLLM would quietly sample from another distribution than the trainer is scored under, or hide it."""
    sampling = rollout.sampling
    if sampling.temperature < VLLM_MIN_TEMPERATURE:
        yield (
            "rollout.sampling.temperature",
            f"expected at least {VLLM_MIN_TEMPERATURE} for `engine: vllm`, found {sampling.temperature:g}, "
            f"which vLLM would raise to {VLLM_MIN_TEMPERATURE} without an error",
        )
    truncated = [name for name in ("top_p", "min_p") if getattr(sampling, name) != Sampling.model_fields[name].default]
    if truncated and not rollout.logprobs:
        yield (
            f"rollout.sampling.{truncated[0]}",
            "needs `rollout.logprobs` of at least 1 with `engine: vllm`: the tokens that can be sampled must be "
            "visible, up to 0.01 % of their mass; 20 is the default",
        )
    if sampling.top_k > rollout.logprobs:
        yield (
            "rollout.sampling.top_k",
            f"expected at most rollout.logprobs ({rollout.logprobs}), found {sampling.top_k}: the tokens that can be "
            f"sampled must be visible; raise `rollout.logprobs` to {sampling.top_k}",
        )


def _vllm_args_problems(rollout: Rollout) -> Iterator[Problem]:
    for name in rollout.engine_args:
        argument = name.replace("-", "_")
        key = f"rollout.engine_args.{name}"
        if argument in OWN_KEYS:
            yield key, f"the candidate file has its own key for it: {OWN_KEYS[argument]}"
        elif argument in FIXED_ARGS:
            yield key, f"cannot be set: {FIXED_ARGS[argument]}"
        elif argument in ("quantization", "quantization_config") and rollout.quantization is not None:
            yield key, "`rollout.quantization` is set as well; use one of the two"


def _prompt_count_problems(workload: Workload, decision: Decision) -> Iterator[Problem]:
    if decision.max_prompts is not None and decision.max_prompts < decision.min_prompts:
        yield (
            "decision.max_prompts",
            f"expected at least decision.min_prompts ({decision.min_prompts}), found {decision.max_prompts}",
        )
    if workload.num_prompts is not None and workload.num_prompts < decision.min_prompts:
        yield (
            "workload.num_prompts",
            f"expected at least decision.min_prompts ({decision.min_prompts}), found {workload.num_prompts}: "
            "there could be no verdict",
        )


def model_problems(key: str, name: str, model: ModelRef | None, base: Path) -> Iterator[Problem]:
    """What is wrong with a model's folder or hub id, as far as the disk tells."""
    if model is None:
        return
    try:
        local, folder = is_local(model.path, base), resolve(model.path, base)
    except ConfigError as error:
        yield f"{key}.{name}", error.message
        return
    if not local:
        if not HUB_ID.fullmatch(model.path):
            yield f"{key}.{name}", f"no such folder, and no hub id (`owner/name`) either: {model.path}"
    elif not folder.exists():
        yield f"{key}.{name}", f"no such folder: {folder}"
    elif not folder.is_dir():
        yield f"{key}.{name}", f"expected a model folder (config.json and safetensors), found a file: {folder}"
    elif not (folder / "config.json").is_file():
        yield f"{key}.{name}", f"no config.json in this folder, so it holds no model: {folder}"
    elif model.revision is not None:
        yield f"{key}.revision", f"only for a hub id; `{name}` is a folder on disk"


def prompt_file_problems(key: str, path: str, base: Path) -> Iterator[Problem]:
    """What is wrong with the name of a prompt file."""
    yield from _file_problems(key, path, base, (".jsonl", ".ndjson", ".parquet"))


def folder_problems(key: str, path: str, base: Path) -> Iterator[Problem]:
    """What is wrong with the name of a file to be written."""
    try:
        file = resolve(path, base)
    except ConfigError as error:
        yield key, error.message
        return
    if file.is_dir():
        yield key, f"expected a file to write, found a folder: {file}"


def _file_problems(key: str, path: str, base: Path, suffixes: tuple[str, ...]) -> Iterator[Problem]:
    try:
        file = resolve(path, base)
    except ConfigError as error:
        yield key, error.message
        return
    if not file.exists():
        yield key, f"no such file: {file}{_nearest_file(file)}"
    elif not file.is_file():
        yield key, f"expected a file, found a folder: {file}"
    elif suffixes and file.suffix.lower() not in suffixes:
        yield key, f"expected a file that ends in {' or '.join(suffixes)}, found {file.name}"


def _nearest_file(file: Path) -> str:
    try:
        names = [entry.name for entry in file.parent.iterdir()]
    except OSError:
        return ""
    near = difflib.get_close_matches(file.name, names, n=1, cutoff=0.7)
    return f" (did you mean `{near[0]}`?)" if near else ""
