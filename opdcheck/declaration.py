"""`declare`: a budget that a team sets by hand. The limit is theirs; floor and fingerprints are measured."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from opdcheck import preflight
from opdcheck.admission import identify
from opdcheck.budget import Budget, Floor, Limits
from opdcheck.config import load_candidate
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
        ConfigError: the candidate file is wrong, or a limit lies below the trainer's own null.
        EngineError: the engine or the model failed.
    """
    progress = progress or Silent()
    located = load_candidate(Path(candidate_file), budget_must_exist=False)
    base = located.path.parent
    clean = located.replace(unperturbed(located.value))
    progress.stage("fingerprinting the student")
    subject = identify(clean.value, base)
    preflight.check(clean, base)
    with Session(clean.value, base, progress=progress) as session:
        rounds = kernel_floor(session, prompts)
        rollouts = [rollout for one in rounds for rollout in one.rollouts]
        null = trainer_null(session, rollouts)
    kernel = summarize([prompt for one in rounds for prompt in one.by_prompt()])
    floor = Floor(
        kernel=means(kernel),
        trainer_null=means(null),
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
