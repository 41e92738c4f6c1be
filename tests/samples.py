"""Made-up records with believable numbers, for tests of verdicts and reports."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

from opdcheck.budget import Budget, Environment, Floor, Limits
from opdcheck.calibration.calibrator import limits_of
from opdcheck.calibration.fit import LevelLosses, calibrate_limits
from opdcheck.calibration.records import Backtest, BacktestRow, BudgetMethod, Evidence, Fitted
from opdcheck.config import Candidate, Rollout
from opdcheck.fingerprint import ModelFingerprint
from opdcheck.measurement import Measurement, MetricSummary, Part, PositionBin, SourceShare
from opdcheck.report.curve import losses
from opdcheck.report.record import Report, budget_summary
from opdcheck.verdict import reach

STUDENT = ModelFingerprint(
    name="students/smollm2",
    weights="blake3:" + "1a" * 32,
    tokenizer="blake3:" + "2b" * 32,
    chat_template="blake3:" + "3c" * 32,
)
ENVIRONMENT = Environment(
    engine="vllm",
    torch="2.13.0",
    transformers="5.19.0",
    vllm="0.32.0",
    compressed_tensors="0.17.0",
    device="cpu",
    trainer_dtype="bfloat16",
    python="3.11.9",
    cpu_capability="AVX512",
)


class NormalGate:
    """Stands in for the gate where a test is about layout: mean -+ 2 standard errors, which nobody should peek at."""

    def __init__(self, limit: float, *, min_prompts: int, **_: Any) -> None:
        self.limit, self.min_prompts, self.values = limit, min_prompts, list[float]()
        self.clipped = 0
        self.heavy_tailed = False

    def update(self, values: Sequence[float]) -> str:
        self.values += values
        return self.state

    @property
    def prompts(self) -> int:
        return len(self.values)

    @property
    def interval(self) -> tuple[float, float]:
        n = len(self.values)
        mean = sum(self.values) / n
        half = 2 * math.sqrt(sum((value - mean) ** 2 for value in self.values) / (n * (n - 1)))
        return max(mean - half, 0.0), mean + half

    @property
    def state(self) -> str:
        if self.prompts < self.min_prompts:
            return "undecided"
        lower, upper = self.interval
        return "reject" if lower > self.limit else "admit" if upper <= self.limit else "undecided"


def budget(**changes: Any) -> Budget:
    """A declared budget: k3 0.015."""
    fields: dict[str, Any] = {
        "name": "smollm2-demo",
        "provenance": "declared",
        "created": "2026-12-01T08:00:00+00:00",
        "reason": "prime-rl's acceptance rule for new models",
        "student": STUDENT,
        "environment": ENVIRONMENT,
        "limits": Limits(total={"k3": 0.015}),
        "floor": Floor(
            kernel={"tv": 0.0108, "kl": 0.00172, "k3": 0.0017, "abs_dlogp": 0.0313},
            trainer_null={"tv": 0.0061, "kl": 0.00051, "k3": 0.00049, "abs_dlogp": 0.0171},
            prompts=16,
            tokens=2048,
        ),
    }
    return Budget.checked(**{**fields, **changes})


METHOD = {"learning_rate": 1e-5, "steps": 100, "batch_size": 16, "temperature": 1.0, "max_completion_length": 512}
FIT = {
    "metric": "k3",
    "quality": "final",
    "margin_share": 0.1,
    "alpha": 0.05,
    "gain": 0.2,
    "gain_lower": 0.18,
    "total": {
        "margin": 0.018,
        "tests": [{"name": "noise 0.1", "mismatch": 0.015, "mean": 0.001, "upper": 0.01, "passed": True}],
        "certified": 0.015,
        "threshold": 0.012,
        "slope": 1.5,
        "benchmark_dose": 0.03,
        "bmdl": 0.02,
        "censored": False,
        "limit": 0.015,
    },
}


def calibrated(**changes: Any) -> Budget:
    """The same limit, found by trainings."""
    return budget(**{"provenance": "calibrated", "reason": None, "method": METHOD, "fit": FIT, **changes})


def prompt_means(mean: float, prompts: int, *, cv: float = 0.4, seed: int = 0) -> list[float]:
    """Lognormal values whose sample mean is exactly `mean`."""
    draw = random.Random(seed)
    sigma = math.sqrt(math.log(1 + cv * cv))
    raw = [math.exp(draw.gauss(0, sigma)) for _ in range(prompts)]
    return [value * mean * prompts / sum(raw) for value in raw]


def summary(
    mean: float, *, tail: float = 8.0, error: float = 0.06, top: float = math.inf, **changes: Any
) -> MetricSummary:
    fields: dict[str, Any] = {
        "mean": mean,
        "standard_error": mean * error,
        "lower": mean,
        "upper": mean,
        "p99": min(mean * tail, top),
        "p99_9": min(mean * tail * 2.4, top),
        "max": min(mean * tail * 5.1, top),
        "estimator": "exact",
    }
    return MetricSummary(**{**fields, **changes})


def measurement(k3: float, *, prompts: int = 32, tokens: int = 4096, cv: float = 0.4, **changes: Any) -> Measurement:
    """A candidate whose mean k3 is `k3` and whose other metrics are in proportion."""
    tv = 0.262 * math.sqrt(k3)
    sampled = {"lower": None, "upper": None, "estimator": "sampled"}
    fields: dict[str, Any] = {
        "engine": "vllm 0.32.0 (cpu)",
        "estimator": "topk",
        "prompts": prompts,
        "completions": prompts,
        "tokens": tokens,
        "truncated": prompts * 2 // 3,
        "metrics": {
            "tv": summary(tv, tail=5, top=1, lower=tv * 0.97, upper=tv * 1.11, estimator="topk"),
            "kl": summary(k3 * 1.02, tail=11, lower=k3 * 0.94, upper=None, estimator="topk"),
            "k1": summary(k3 * 0.98, tail=19, error=0.2, **sampled),
            "k3": summary(k3, tail=16, error=0.11, **sampled),
            "abs_dlogp": summary(0.72 * math.sqrt(k3), tail=5, **sampled),
            "token_mult_prob_error": summary(1 + 0.8 * math.sqrt(k3), tail=1.5, **sampled),
            "probs_diff": summary(0.21 * math.sqrt(k3), tail=6, top=1, **sampled),
            "argmax_flip": summary(0.22 * math.sqrt(k3), tail=99, top=1, lower=None, upper=None),
        },
        "chi2_token": 2.6 * k3,
        "ess": 1 / (1 + 2.6 * k3),
        "prompt_values": {
            "tv": prompt_means(tv, prompts, cv=cv / 2),
            "kl": prompt_means(k3 * 1.02, prompts, cv=cv),
            "k3": prompt_means(k3, prompts, cv=cv),
            "abs_dlogp": prompt_means(0.72 * math.sqrt(k3), prompts, cv=cv / 2),
        },
        "by_position": [
            PositionBin(
                start=16 * i, stop=16 * i + 16, tokens=tokens // 8, tv=tv * (0.7 + 0.08 * i), kl=k3 * (0.6 + 0.1 * i)
            )
            for i in range(8)
        ],
        "position_change": 0.3 * tv,
        "position_p": 0.0031,
        "provenance": [Part(part="kv_cache", how="real", detail="fp8_e4m3 in vLLM's own kernels, scale 1.0")],
    }
    return Measurement(**{**fields, **changes})


def sources(k3: float = 0.0424, prompts: int = 32) -> dict[str, Any]:
    """Shares of a candidate with an FP8 KV cache, as `Measurement`'s fields."""
    share = SourceShare(
        source="kv_cache",
        how="simulated",
        tv=0.0412,
        kl=k3 * 0.8,
        prompt_values=prompt_means(k3 * 0.8, prompts),
        detail="fp8_e4m3, one scale of 1.0 per tensor",
    )
    return {"sources": [share], "left_over": 0.00195}


def candidate(**rollout: Any) -> Candidate:
    return Candidate.model_validate(
        {
            "student": {"path": "students/smollm2"},
            "rollout": {"engine": "vllm", **rollout},
            "workload": {"prompts": "prompts.jsonl"},
            "budget": "budgets/smollm2.yaml",
        }
    )


def report(
    measured: Measurement,
    *,
    against: Budget | None = None,
    file: str = "examples/smollm2/kv_fp8_e4m3.yaml",
    **rollout: Any,
) -> Report:
    against = against or budget()
    subject = candidate(**rollout)
    return Report(
        opdcheck_version="0.1.0",
        created="2026-12-01T09:30:00+00:00",
        candidate_file=file,
        candidate=subject,
        budget=budget_summary(against, "budgets/smollm2.yaml"),
        student=STUDENT,
        environment=ENVIRONMENT,
        measurement=measured,
        verdict=reach(measured, against, subject.decision, subject.rollout),
        seconds=48.2,
    )


def rejected() -> Report:
    return report(measurement(0.0424, **sources()), kv_cache_dtype="fp8_e4m3")


def admitted() -> Report:
    return report(measurement(0.0017, provenance=[]), file="examples/smollm2/bf16.yaml")


def inconclusive() -> Report:
    return report(measurement(0.0149, prompts=16), kv_cache_dtype="fp8_e4m3")


def trained(*, sources_differ: bool = False) -> Budget:
    """A calibrated budget: loss 2 (tv - 0.05) on trainings that gain 1 nat/token; staleness later if they differ."""
    levels = [0.01, 0.03, 0.06, 0.08, 0.12, 0.15]
    seeds = [0, 1, 2]
    starts = {"noise": 0.05, "staleness": 0.1 if sources_differ else 0.05}
    evidence = [_evidence("unperturbed", "none", 0.0, 0.0, seeds)]
    for at, tv in enumerate(levels):
        for source, start in starts.items():
            evidence.append(_evidence(f"{source} {at}", source, tv, 2 * max(0.0, tv - start), seeds))
    found = [
        LevelLosses(name=one.level, source=one.source, mismatch=one.mismatch["tv"], losses=lost)
        for one, lost in losses(evidence, "final")
    ]
    fit = calibrate_limits(found, [1.0, 1.01, 0.99], margin_share=0.1, alpha=0.05, quality="final")
    return budget(
        name="calibrated",
        provenance="calibrated",
        declared_by=None,
        reason=None,
        created=None,
        limits=limits_of(fit, "tv").model_dump(),
        method=BudgetMethod(learning_rate=1e-3, steps=10, temperature=1.0, max_completion_length=32),
        fit=Fitted(metric="tv", quality="final", margin_share=0.1, alpha=0.05, **fit.model_dump()),
        evidence=evidence,
    )


def _evidence(level: str, source: str, tv: float, loss: float, seeds: list[int]) -> Evidence:
    reached = [0.5 + loss + 0.004 * math.sin(7 * seed + 100 * tv) for seed in seeds]
    return Evidence(
        level=level,
        source=source,
        rollout={},
        mismatch={"tv": tv, "k3": tv**2},
        seeds=seeds,
        final_kl=reached,
        auc_kl=reached,
        accuracy=None,
        k3_in_training=[tv**2] * len(seeds),
    )


def held_out_row(name: str, *, limit: float | None, verdict: str, passed: bool) -> BacktestRow:
    return BacktestRow.model_validate(
        {
            "name": name,
            "rollout": Rollout(engine="transformers").model_dump(),
            "limit": limit,
            "mismatch": 0.0502,
            "verdict": verdict,
            "prompts": 144,
            "losses": [0.01, 0.02, 0.03],
            "mean": 0.00676,
            "upper": 0.0110,
            "passed": passed,
        }
    )


def backtested(rows: list[BacktestRow]) -> Backtest:
    """A backtest of these rows."""
    return Backtest(margin=0.02, alpha=0.05, quality="final", seeds=[5, 6, 7], gate_share=0.006, rows=rows)
