"""What can be known to be wrong before a model is loaded: engine arguments, kernels, vocabularies, shapes, layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import assert_never

from opdcheck.config import Candidate, Quantization
from opdcheck.yamlfile import Located


def check(located: Located[Candidate], base: Path) -> None:
    """Checks a candidate against the engine's and the model's own rules.

    Raises:
        ConfigError: with file, line and key of what does not fit.
    """
    engine = located.value.rollout.engine
    match engine:
        case "vllm":
            _check_vllm(located)
        case "transformers":
            pass
        case _:
            assert_never(engine)
    _check_vocabularies(located, base)
    _check_layers(located, base)


def check_prompts(located: Located[Candidate], base: Path) -> None:
    """Counts the prompt file's rows, as far as needed, without a tokenizer.

    Raises:
        ConfigError: there are fewer than a verdict takes, or one of them cannot be read.
    """
    from opdcheck.workload import prompt_rows

    needed = located.value.decision.min_prompts
    found = sum(1 for _ in islice(prompt_rows(located.value.workload, base), needed))
    if found < needed:
        raise located.error(
            "workload.prompts",
            f"expected at least decision.min_prompts ({needed}) prompts, found {found}: there could be no verdict",
            hint="Add prompts, or lower `decision.min_prompts`.",
        )


def _check_vllm(located: Located[Candidate]) -> None:
    from opdcheck.engines import vllm_engine

    rollout = located.value.rollout
    vllm_engine.require()
    for key, message in vllm_engine.check_engine_args(rollout.engine_args):
        raise located.error(f"rollout.engine_args.{key}", message)
    scheme = None if rollout.simulate else _scheme_name(rollout.quantization)
    for key, problem in (
        ("rollout.quantization", vllm_engine.check_runnable(scheme, "auto")),
        ("rollout.kv_cache_dtype", vllm_engine.check_runnable(None, rollout.kv_cache_dtype)),
    ):
        if problem:
            raise located.error(key, problem)


def _scheme_name(quantization: object) -> str | None:
    if isinstance(quantization, Quantization):
        return quantization.scheme
    return quantization if isinstance(quantization, str) else None


def _check_vocabularies(located: Located[Candidate], base: Path) -> None:
    """Token ids and distributions are compared one by one, so both sides must have the same tokens."""
    from opdcheck.models import vocabulary_size

    student, rollout = located.value.student, located.value.rollout
    stale = rollout.staleness.as_model() if rollout.staleness else None
    if stale is not None:  # older weights of the student: its code is theirs
        stale = stale.model_copy(update={"trust_remote_code": student.trust_remote_code})
    for key, model in (("rollout.model", rollout.model), ("rollout.staleness.checkpoint", stale)):
        if model is None:
            continue
        found, wanted = vocabulary_size(model, base), vocabulary_size(student, base)
        if found is not None and wanted is not None and found != wanted:
            raise located.error(
                key,
                f"{model.path} has a vocabulary of {found:,} tokens, the student one of {wanted:,}; expected the same",
            )


def _check_layers(located: Located[Candidate], base: Path) -> None:
    from opdcheck.models import meta_model
    from opdcheck.perturb.fit import check_fits
    from opdcheck.perturb.kv_cache import check_kv_cache, check_skip_layers
    from opdcheck.perturb.schemes import to_quantization_config

    rollout = located.value.rollout
    skeleton = meta_model(located.value.student, base)
    with _at(located, "rollout.quantization"):
        if rollout.quantization is not None:
            fused = rollout.engine == "vllm" and not rollout.simulate
            check_fits(to_quantization_config(rollout.quantization), skeleton, fused=fused)
    with _at(located, "rollout.kv_cache_dtype"):
        check_kv_cache(rollout.kv_cache_dtype, engine=rollout.engine)
    with _at(located, "rollout.kv_cache_dtype_skip_layers"):
        check_skip_layers(rollout.kv_cache_dtype_skip_layers, skeleton)


@contextmanager
def _at(located: Located[Candidate], key: str) -> Iterator[None]:
    """What is found wrong inside is reported with the file and line of `key`."""
    try:
        yield
    except ValueError as error:
        raise located.error(key, str(error)) from error
