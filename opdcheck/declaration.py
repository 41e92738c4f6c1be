"""`declare`: a budget that a team sets by hand. The limit is theirs; floor and fingerprints are measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import get_args

from opdcheck import preflight
from opdcheck.admission import identify
from opdcheck.budget import SMALLEST_LIMIT, Budget, Floor, Limits
from opdcheck.complaints import one_of
from opdcheck.config import Metric, load_candidate
from opdcheck.errors import ConfigError, EngineError
from opdcheck.floor import kernel_floor, means, trainer_null, unperturbed
from opdcheck.mismatch.aggregate import summarize
from opdcheck.progress import Progress, Silent
from opdcheck.session import Session


def declare(
    candidate_file: str | Path,
    *,
    total: Mapping[str, float],
    reason: str,
    name: str | None = None,
    prompts: int = 16,
    progress: Progress | None = None,
) -> Budget:
    """Measures the floor of the candidate's student in this environment and puts the declared limits above it.

    Args:
        candidate_file: names student, teacher, engine and workload; its perturbations are left out.
        total: limit per metric, e.g. `{"k3": 0.015}` (nats/token for kl and k3; none for tv).
        reason: why these limits; shown in every verdict.
        name: of the budget; default: the student's.
        prompts: how many prompts the floor is measured on.

    Raises:
        ConfigError: a limit or the candidate file is wrong, or a limit lies below the trainer's own null.
        EngineError: the engine or the model failed, or the floor is not finite.
    """
    check_limits(total)
    progress = progress or Silent()
    located = load_candidate(Path(candidate_file), budget_must_exist=False)
    base = located.path.parent
    clean = located.replace(unperturbed(located.value))
    progress.stage("fingerprinting the student")
    with clean.pointing():
        subject = identify(clean.value, base)
    preflight.check(clean, base)
    with clean.pointing(), Session(clean.value, base, progress=progress) as session:
        rounds = kernel_floor(session, prompts)
        rollouts = [rollout for one in rounds for rollout in one.rollouts]
        null = trainer_null(session, rollouts)
    kernel = summarize([prompt for one in rounds for prompt in one.by_prompt()])
    floor = Floor(
        kernel=_finite("kernel floor", means(kernel)),
        trainer_null=_finite("trainer's mismatch with itself", means(null)),
        prompts=len(kernel.prompt_values["tv"]),
        tokens=sum(map(len, rollouts)),
    )
    return Budget.checked(
        name=name or subject.student.name,
        provenance="declared",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        reason=reason,
        student=subject.student,
        teacher=subject.teacher,
        environment=subject.environment,
        limits=Limits(total=dict(total)),
        floor=floor,
    )


def check_limits(total: Mapping[str, float]) -> None:
    """Finds out before anything is measured that a limit could not be decided on.

    Raises:
        ConfigError: naming the flag, and what it takes.
    """
    form = "--limit takes METRIC=VALUE such as k3=0.015."
    if not total:
        raise ConfigError("--limit: expected at least one limit, found none", hint=form)
    for metric, limit in total.items():
        if metric not in get_args(Metric):
            raise ConfigError(f"--limit: {one_of(get_args(Metric), metric)}", hint=form)
        if not (math.isfinite(limit) and limit > 0):
            raise ConfigError(f"--limit {metric}={limit:g}: expected a finite number above 0", hint=form)
        if limit < SMALLEST_LIMIT:
            raise ConfigError(
                f"--limit {metric}={limit:g}: expected at least {SMALLEST_LIMIT:g}; no measurement tells so little",
                hint=form,
            )
        if metric == "tv" and limit >= 1:
            raise ConfigError(f"--limit tv={limit:g}: total variation is at most 1, so this limits nothing", hint=form)


def _finite(what: str, means: dict[str, float]) -> dict[str, float]:
    bad = [metric for metric, mean in means.items() if not math.isfinite(mean)]
    if bad:
        raise EngineError(
            f"the {what} is not finite in {', '.join(bad)}: the unperturbed student gives NaN or infinite "
            "log-probabilities, so there is nothing to measure a mismatch from",
            hint="Check the student's weights and dtype (float16 overflows where bfloat16 does not).",
        )
    return means
