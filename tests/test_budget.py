# ruff: noqa: E501  (snapshots)
"""Budget files and their validity."""

import re

import pytest
from inline_snapshot import snapshot
from samples import ENVIRONMENT, STUDENT, budget, calibrated

from opdcheck.budget import Budget, Change, changes, load_budget, no_budget_named, require_valid, write_budget
from opdcheck.environment import current_environment, public_version
from opdcheck.errors import BudgetInvalidError, ConfigError, ExitCode

OTHER = STUDENT.model_copy(update={"weights": "blake3:" + "ff" * 32})
NEWER = ENVIRONMENT.model_copy(update={"vllm": "0.33.0", "torch": "2.14.0"})


EVIDENCE = {
    "level": "kv cache fp8_e5m2",
    "source": "kv_cache",
    "rollout": {"kv_cache_dtype": "fp8_e5m2"},
    "mismatch": {"tv": 0.05, "k3": 0.04},
    "seeds": [0, 1],
    "final_kl": [0.2, 0.21],
    "auc_kl": [0.3, 0.31],
    "accuracy": None,
    "k3_in_training": [0.05, 0.04],
}


class TestFile:
    def test_round_trip(self, tmp_path):
        full = budget(
            teacher=OTHER,
            declared_by="A Team",
            method={
                "kind": "opd",
                "beta": 1,
                "temperature": 1.0,
                "learning_rate": 1e-5,
                "steps": 100,
                "batch_size": 16,
                "max_completion_length": 512,
            },
            limits={
                "total": {"tv": 0.05, "k3": 0.015},
                "per_source": {"kv_cache": {"tv": 0.03}},
                "per_layer": {"model.layers.0": {"tv": 0.01}},
                "prefix_shift": 0.02,
                "tails": {"k3": {"p99_9": 2, "max": 30}},
            },
            evidence=[EVIDENCE],
        )
        write_budget(tmp_path / "budgets" / "b.yaml", full)
        assert load_budget(tmp_path / "budgets" / "b.yaml") == full

    def test_calibrated_without_floor_and_with_a_bare_date(self, tmp_path):
        path = tmp_path / "b.yaml"
        write_budget(path, calibrated(floor=None))
        path.write_text(re.sub("created: .*", "created: 2026-12-01", path.read_text()))
        assert load_budget(path).created == "2026-12-01"

    @pytest.mark.parametrize(
        ("before", "after", "message"),
        [
            ("k3: 0.015", "k3: 0", r"b\.yaml:\d+: limits\.total\.k3: .*above 0"),
            ("k3: 0.015", "k3: .inf", r"limits\.total\.k3"),
            ("k3: 0.015", "k3: 1.0e-310", r"b\.yaml:\d+: limits\.total\.k3: expected at least 1e-12, found 1e-310"),
            ("prefix_shift: null", "prefix_shift: 1.0e-13", r"b\.yaml:\d+: limits\.prefix_shift: expected at least"),
            ("provenance: declared", "provenance: calibrated", r"b\.yaml:\d+: method: required by `provenance: calib"),
            ("k3: 0.015", "k9: 0.015", r"limits\.total"),
            ("    k3: 0.015", "    {}", r"limits\.total"),
            ("k3: 0.015", "tv: 1.5", r"b\.yaml:\d+: limits\.total\.tv: .*limits nothing"),
            ("k3: 0.015", "k3: 0.0001", r"b\.yaml:\d+: limits\.total\.k3: .*no measurement could tell"),
            ("schema_version: 1", "schema_version: 2", "schema_version"),
            ("provenance: declared", "provenance: guessed", "provenance"),
            ("created: .*", "created: yesterday", "ISO 8601"),
            ("name: smollm2-demo", "nmae: smollm2-demo", "nmae"),
            ("prefix_shift: null", "prefix_shift: -1", r"limits\.prefix_shift"),
        ],
    )
    def test_mistakes_name_file_line_and_key(self, tmp_path, before, after, message):
        path = tmp_path / "b.yaml"
        write_budget(path, budget())
        text = path.read_text()
        assert re.search(before, text)
        path.write_text(re.sub(before, after, text, count=1))
        with pytest.raises(ConfigError, match=message) as caught:
            load_budget(path)
        assert str(path) in str(caught.value)

    @pytest.mark.parametrize("key", ["method", "fit"])
    def test_calibrated_without_its_evidence_is_refused(self, tmp_path, key):
        path = tmp_path / "b.yaml"
        write_budget(path, calibrated().model_copy(update={key: None}))
        line = path.read_text().splitlines().index(f"{key}: null") + 1
        with pytest.raises(ConfigError) as caught:
            load_budget(path)
        assert caught.value.message.startswith(f"{path}:{line}: {key}: required by `provenance: calibrated`")

    def test_no_such_file(self, tmp_path):
        with pytest.raises(ConfigError, match="no such file"):
            load_budget(tmp_path / "b.yaml")

    def test_candidate_without_budget_is_no_verdict(self):
        assert no_budget_named("candidate.yaml").exit_code == ExitCode.NO_VERDICT


class TestLimits:
    def test_below_the_null_is_refused(self):
        with pytest.raises(ConfigError) as caught:
            budget(limits={"total": {"k3": 0.0004}})
        assert str(caught.value) == snapshot(
            "budget: limits.total.k3: 0.0004 nats/token is below what the trainer differs from itself with another batch shape, 0.00049 nats/token: no measurement could tell"
        )

    def test_a_source_below_the_null_is_refused(self):
        with pytest.raises(ConfigError, match=r"limits\.per_source\.noise\.tv: .*no measurement could tell"):
            budget(limits={"total": {"k3": 0.1}, "per_source": {"noise": {"tv": 0.001}}})

    def test_abs_dlogp_of_one_source_is_refused(self):
        with pytest.raises(ConfigError, match=r"limits\.per_source\.noise\.abs_dlogp: .*limit its tv, kl or k3"):
            budget(limits={"total": {"k3": 0.1}, "per_source": {"noise": {"abs_dlogp": 0.1}}})

    def test_below_the_kernel_floor_is_a_warning(self):
        assert budget(limits={"total": {"k3": 0.001}}).warnings() == snapshot(
            [
                "limits.total.k3: 0.001 nats/token is below the kernel floor 0.0017 nats/token: even the unperturbed student would be rejected"
            ]
        )
        assert budget().warnings() == []

    def test_a_stricter_source_than_the_kernel_is_fine(self):
        assert budget(limits={"total": {"tv": 0.1}, "per_source": {"noise": {"tv": 0.008}}}).warnings() == []

    def test_no_floor_is_a_warning(self):
        assert budget(floor=None).warnings() == ["floor: not measured, so a limit below it would go unnoticed"]


class TestValidity:
    def test_same_is_valid(self):
        assert require_valid(budget(), STUDENT, None, ENVIRONMENT) == []

    def test_recorded_fields_and_names_are_not_compared(self):
        elsewhere = ENVIRONMENT.model_copy(update={"python": "3.13.0", "cpu_capability": "DEFAULT"})
        assert changes(budget(), STUDENT.model_copy(update={"name": "/other/place"}), None, elsewhere) == []

    @pytest.mark.parametrize("field", ["weights", "tokenizer", "chat_template"])
    @pytest.mark.parametrize("side", ["student", "teacher"])
    def test_every_model_field_is_compared(self, side, field):
        stored = budget(teacher=STUDENT)
        changed = STUDENT.model_copy(update={field: None if field == "chat_template" else "blake3:00"})
        now = {"student": STUDENT, "teacher": STUDENT, side: changed}
        assert [c.field for c in changes(stored, now["student"], now["teacher"], ENVIRONMENT)] == [f"{side}.{field}"]

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("engine", "transformers"),
            ("torch", "2.14.0"),
            ("transformers", "5.20.0"),
            ("vllm", None),
            ("compressed_tensors", "0.18.0"),
            ("device", "NVIDIA H200"),
            ("trainer_dtype", "float32"),
        ],
    )
    def test_every_environment_field_is_compared(self, field, value):
        now = ENVIRONMENT.model_copy(update={field: value})
        assert [c.field for c in changes(budget(), STUDENT, None, now)] == [f"environment.{field}"]

    def test_a_teacher_on_one_side_only_is_one_difference(self):
        assert [c.field for c in changes(budget(), STUDENT, OTHER, ENVIRONMENT)] == ["teacher"]
        assert [c.field for c in changes(budget(teacher=OTHER), STUDENT, None, ENVIRONMENT)] == ["teacher"]

    def test_error_lists_everything(self):
        with pytest.raises(BudgetInvalidError) as caught:
            require_valid(budget(), OTHER, None, NEWER)
        assert caught.value.exit_code == ExitCode.NO_VERDICT
        assert str(caught.value) == snapshot(
            """\
budget smollm2-demo is not valid here: it was made for something else (stored -> found)
  student.weights: 1a1a1a1a1a1a -> ffffffffffff
  environment.torch: 2.13.0 -> 2.14.0
  environment.vllm: 0.32.0 -> 0.33.0
`--accept-stale FIELD` forgives exactly one field; here make a budget for what is there now: `opdcheck budget declare`.\
"""
        )

    def test_one_field_is_forgiven(self):
        now = ENVIRONMENT.model_copy(update={"vllm": "0.33.0"})
        with pytest.raises(BudgetInvalidError, match=r"`--accept-stale environment\.vllm` forgives that one field"):
            require_valid(budget(), STUDENT, None, now)
        forgiven = require_valid(budget(), STUDENT, None, now, accept_stale="environment.vllm")
        assert forgiven == [Change(field="environment.vllm", stored="0.32.0", found="0.33.0")]

    def test_only_the_named_field_is_forgiven(self):
        with pytest.raises(BudgetInvalidError) as caught:
            require_valid(budget(), STUDENT, None, NEWER, accept_stale="environment.vllm")
        assert "environment.torch: 2.13.0" in str(caught.value)
        assert "environment.vllm: 0.32.0" not in str(caught.value)

    def test_forgiving_what_has_not_changed_is_fine_and_said(self):
        (forgiven,) = require_valid(budget(), STUDENT, None, ENVIRONMENT, accept_stale="environment.vllm")
        assert not forgiven.differs

    @pytest.mark.parametrize("field", ["environment.vlm", "environment.python", "limits.total", ""])
    def test_unknown_field(self, field):
        with pytest.raises(ConfigError, match="is not a fingerprinted field") as caught:
            require_valid(budget(), STUDENT, None, ENVIRONMENT, accept_stale=field)
        assert "environment.vllm" in str(caught.value)


class TestEnvironment:
    def test_public_version(self):
        assert re.fullmatch(r"\d+\.\d+\.\d+", public_version("torch"))
        assert public_version("no-such-distribution") is None

    def test_of_transformers_names_no_vllm(self):
        found = current_environment("transformers", "cpu", trainer_dtype="float32")
        assert (found.vllm, found.device, found.trainer_dtype) == (None, "cpu", "float32")
        assert found.cpu_capability

    def test_gpu_is_called_by_its_name(self, monkeypatch):
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.get_device_name", lambda device: f"GPU {device.index}")
        assert current_environment("transformers", "cuda:1", trainer_dtype="float32").device == "GPU 1"


def test_json_schema_describes_the_fields():
    described = Budget.model_json_schema()["properties"]
    assert "declared" in described["provenance"]["description"]
