"""The calibration file: a student, a teacher, how they are trained, and the ladder of mismatch. No torch here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from opdcheck import yamlfile
from opdcheck.config import (
    KVCacheDType,
    Metric,
    ModelRef,
    Problem,
    QuantizationChoice,
    Rollout,
    Section,
    Student,
    Workload,
    folder_problems,
    model_problems,
    prompt_file_problems,
    rollout_problems,
)
from opdcheck.yamlfile import Located

MIN_LEVELS = 5
"""Besides the unperturbed one, which makes six."""
MIN_SEEDS = 3
MIN_SOURCES = 2


def _regex(pattern: str) -> str:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"expected a regular expression, found {pattern!r}: {error}") from None
    if compiled.groups != 1:
        raise ValueError(
            f"expected exactly one group, which catches the answer; found {compiled.groups} in {pattern!r}"
        )
    return pattern


def _ascending(values: list[float]) -> list[float]:
    if values != sorted(set(values)):
        raise ValueError(f"expected rising values, found {values}")
    return values


Positive = Annotated[float, Field(gt=0)]
QualityName = Literal["final", "auc", "accuracy"]
"""What a limit protects: the last held-out KL, its mean over the training, or the verifier's accuracy at the end."""


class Method(Section):
    """How the student is trained. The budget keeps it: a limit holds for this method alone."""

    kind: Literal["opd", "rl"] = "opd"
    """`opd`: towards the teacher, on the student's rollouts. `rl`: GRPO with the verifier's reward, for contrast."""
    loss: Literal["full", "sampled"] = "full"
    """OPD: `full`: divergence of the whole distributions. `sampled`: policy gradient of the reverse KL."""
    beta: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Of the generalized Jensen-Shannon divergence: 0 forward KL, 1 reverse KL, 0.5 Jensen-Shannon; as in TRL."""
    lmbda: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of the completions that the student samples; the teacher samples the others. OPD only."""
    learning_rate: Positive
    steps: Annotated[int, Field(ge=1)]
    """Optimizer steps of one training."""
    batch_size: Annotated[int, Field(ge=1)] = 16
    """Completions per optimizer step."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """RL: completions per prompt, among which the rewards are compared."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Over which the learning rate rises from 0."""
    schedule: Literal["constant", "linear"] = "constant"
    """After the warm-up: constant, or falling in a line that would reach 0 one step after the last."""
    max_grad_norm: Positive = 1.0
    weight_decay: Annotated[float, Field(ge=0)] = 0.0


class Verifier(Section):
    """Whether a completion is right, by a regular expression and the row's own answer. No code of the user's runs."""

    pattern: Annotated[str, AfterValidator(_regex)]
    """Its one group, at its last match in the completion's text, is the student's answer."""
    answer: str = "answer"
    """Key of the prompt file's rows that holds the right one."""


class Evaluation(Section):
    """Held-out quality: KL(student || teacher) on rollouts of the unperturbed student, and the verifier's accuracy."""

    prompts: str
    """JSONL or Parquet file, relative to this file; prompts that are not trained on."""
    num_prompts: Annotated[int, Field(ge=2)] | None = None
    """The first so many rows; default all."""
    every: Annotated[int, Field(ge=1)] = 10
    """Optimizer steps between two evaluations; there is always one at the end."""
    seed: Annotated[int, Field(ge=0)] = 1
    """Of the sampling: the same for all runs, so that differences between runs are not luck."""


class Ladder(Section):
    """The levels of mismatch that are trained under, by source. Each entry is one level."""

    noise: Annotated[list[Positive], AfterValidator(_ascending)] = []
    """Sigma relative to each weight tensor's RMS."""
    logit_noise: Annotated[list[Positive], AfterValidator(_ascending)] = []
    """Sigma in nats. Engine `transformers` only."""
    staleness: Annotated[list[Annotated[int, Field(ge=1)]], AfterValidator(_ascending)] = []
    """Optimizer steps that the rollout weights are behind."""
    quantization: list[QuantizationChoice] = []
    """As `rollout.quantization`."""
    kv_cache_dtype: list[KVCacheDType] = []
    """As `rollout.kv_cache_dtype`."""


class Calibration(Section):
    """How to find a student's budget: `opdcheck calibrate calibration.yaml`."""

    student: Student
    teacher: ModelRef
    rollout: Rollout = Rollout(engine="transformers")
    """The unperturbed rollout configuration: engine, dtype, sampling, engine_args."""
    method: Method
    workload: Workload
    """Prompts to train on; completions; the seed of the mismatch measurement."""
    evaluation: Evaluation
    verifier: Verifier | None = None
    ladder: Ladder
    seeds: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] = [0, 1, 2, 3, 4]
    """One training per level and seed. A seed is a data order; runs of one seed are paired."""
    metric: Metric = "tv"
    """Scale of the mismatch, and of the limit."""
    mismatch_prompts: Annotated[int, Field(ge=2)] = 64
    """Prompts on which each level's mismatch is measured."""
    quality: QualityName = "final"
    """What the limit protects: the held-out KL at the end, its mean over the evaluations, or the verifier's accuracy at
    the end. `kind: rl` has no teacher to come closer to, so there it is `accuracy`."""
    margin: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Largest loss of quality that counts as none, as a share of the unperturbed run's gain (its lower bound)."""
    alpha: Annotated[float, Field(gt=0, lt=0.5)] = 0.05
    """Error level of the tests and bounds."""
    budget: str
    """Budget file to write, relative to this file."""
    runs: str | None = None
    """Folder that finished trainings are kept in, relative to this file. Default: in the cache."""


def load_calibration(path: Path) -> Located[Calibration]:
    """Reads a calibration file and makes every check that needs no model.

    Raises:
        ConfigError: one line per mistake, each `FILE:LINE: key.path: expected ..., found ...`.
    """
    located = yamlfile.load_located(path, Calibration)
    problems = [*_rule_problems(located.value), *_file_problems(located.value, path.parent)]
    if problems:
        raise located.errors(problems)
    return located


def _rule_problems(calibration: Calibration) -> Iterator[Problem]:
    yield from rollout_problems(calibration.rollout)
    yield from _unperturbed_problems(calibration.rollout)
    yield from _ladder_problems(calibration.ladder, calibration.rollout)
    yield from _method_problems(calibration)
    seeds = calibration.seeds
    if len(set(seeds)) < MIN_SEEDS:
        yield "seeds", f"expected at least {MIN_SEEDS} different seeds, found {seeds}: no bound could be had from fewer"
    if len(set(seeds)) < len(seeds):
        yield "seeds", f"expected each seed once, found {seeds}"


def _unperturbed_problems(rollout: Rollout) -> Iterator[Problem]:
    for key, found in (
        ("quantization", rollout.quantization is not None),
        ("kv_cache_dtype", rollout.kv_cache_dtype != "auto"),
        ("kv_cache_dtype_skip_layers", bool(rollout.kv_cache_dtype_skip_layers)),
        ("noise", rollout.noise is not None),
        ("staleness", rollout.staleness is not None),
        ("model", rollout.model is not None),
    ):
        if found:
            yield f"rollout.{key}", "not here: this is the unperturbed side; levels of mismatch belong in `ladder`"


def _ladder_problems(ladder: Ladder, rollout: Rollout) -> Iterator[Problem]:
    by_source = {
        "noise": len(ladder.noise) + len(ladder.logit_noise),
        "staleness": len(ladder.staleness),
        "quantization": len(ladder.quantization),
        "kv_cache_dtype": len(ladder.kv_cache_dtype),
    }
    levels, sources = sum(by_source.values()), sum(count > 0 for count in by_source.values())
    if levels < MIN_LEVELS:
        yield "ladder", f"expected at least {MIN_LEVELS} levels of mismatch besides the unperturbed one, found {levels}"
    if sources < MIN_SOURCES:
        yield (
            "ladder",
            f"expected levels of at least {MIN_SOURCES} sources (noise, staleness, quantization, kv_cache_dtype), "
            f"found {sources}: whether one scale serves all could not be told",
        )
    if ladder.logit_noise and rollout.engine != "transformers":
        yield "ladder.logit_noise", "only `engine: transformers` can put noise on logits"
    for index, dtype in enumerate(ladder.kv_cache_dtype):
        if dtype in ("auto", rollout.dtype):
            yield f"ladder.kv_cache_dtype[{index}]", f"`{dtype}` is the unperturbed one, which is always trained"


def _method_problems(calibration: Calibration) -> Iterator[Problem]:
    method = calibration.method
    if calibration.quality == "accuracy" and calibration.verifier is None:
        yield "verifier", "needed by `quality: accuracy`, which it measures"
    if method.kind == "rl":
        if calibration.verifier is None:
            yield "verifier", "needed by `method.kind: rl`, whose reward it is"
        if calibration.quality != "accuracy":
            yield "quality", "expected `accuracy` with `method.kind: rl`: it does not train towards the teacher"
        if method.batch_size % method.group_size:
            yield (
                "method.batch_size",
                f"expected a multiple of method.group_size ({method.group_size}), found {method.batch_size}",
            )
        for name in ("loss", "beta", "lmbda"):
            if name in method.model_fields_set:
                yield f"method.{name}", "only for `kind: opd`"
    elif "group_size" in method.model_fields_set:
        yield "method.group_size", "only for `kind: rl`"
    if calibration.rollout.sampling.truncates:
        yield "rollout.sampling", "expected plain sampling (temperature only): training needs the whole distribution"
    for lag in calibration.ladder.staleness:
        if lag >= method.steps:
            yield "ladder.staleness", f"expected lags below method.steps ({method.steps}), found {lag:g}"


def _file_problems(calibration: Calibration, base: Path) -> Iterator[Problem]:
    yield from model_problems("student", "path", calibration.student, base)
    yield from model_problems("teacher", "path", calibration.teacher, base)
    yield from prompt_file_problems("workload.prompts", calibration.workload.prompts, base)
    yield from prompt_file_problems("evaluation.prompts", calibration.evaluation.prompts, base)
    yield from folder_problems("budget", calibration.budget, base)
    if not calibration.budget.endswith((".yaml", ".yml")):  # a picture and a page stand beside it
        yield "budget", f"expected a file that ends in .yaml, found {calibration.budget}"


__all__ = ["Calibration", "Evaluation", "Ladder", "Method", "QualityName", "Verifier", "load_calibration"]
