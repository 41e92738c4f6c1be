"""The record: JSON holds everything, and the verdict can be reached anew from it alone."""

import json
import math

import pytest
from samples import admitted, budget, inconclusive, measurement, rejected, report

from opdcheck.calibration.records import Evidence
from opdcheck.errors import ConfigError
from opdcheck.report.record import budget_summary, from_json, to_json


@pytest.mark.parametrize("make", [admitted, rejected, inconclusive])
def test_json_round_trip_and_the_same_verdict_from_it_alone(make):
    original = make()
    read = from_json(to_json(original))
    assert read == original
    assert read.recomputed() == original


def test_observed_is_recomputed_too():
    shown = rejected()
    observed = shown.model_copy(update={"verdict": shown.verdict.model_copy(update={"observed": True, "exit_code": 0})})
    assert from_json(to_json(observed)).recomputed() == observed


def test_json_is_standard_even_where_numbers_are_not():
    broken = report(measurement(0.0017, chi2_token=math.inf, ess=math.nan, non_finite_tokens=1))
    text = to_json(broken)
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    read = from_json(text).measurement
    assert math.isinf(read.chi2_token)
    assert math.isnan(read.ess)


def test_reports_from_before_the_test_of_the_trend_are_read():
    record = json.loads(to_json(admitted()))
    del record["measurement"]["position_change"], record["measurement"]["position_p"]
    assert from_json(json.dumps(record)).measurement.position_p is None


def test_evidence_stays_in_the_budget_file():
    level = Evidence(
        level="noise 0.1",
        source="noise",
        rollout={},
        mismatch={"tv": 0.1},
        seeds=[0],
        final_kl=[0.2],
        auc_kl=[0.3],
        accuracy=None,
        k3_in_training=[0.1],
    )
    stored = budget_summary(budget(evidence=[level]), "budgets/b.yaml")
    assert (stored.file, stored.evidence, stored.limits) == ("budgets/b.yaml", [], budget().limits)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema_version": 99}'])
def test_not_a_report(text):
    with pytest.raises(ConfigError, match="not an opdcheck report"):
        from_json(text)
