"""`opdcheck schema`: what an editor needs, without loading torch."""

import json
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from opdcheck.cli.schema import budget_schema, candidate_schema, schema
from opdcheck.config import PRESET_SCHEMES


def objects(tree):
    """Every object schema with fixed properties in a schema."""
    if isinstance(tree, dict):
        if "properties" in tree:
            yield tree
        for value in tree.values():
            yield from objects(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from objects(value)


def printed(*arguments):
    app = typer.Typer()
    app.command()(schema)
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_prints_the_candidates_schema():
    found = printed()
    assert found == candidate_schema()
    assert found["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert found["title"] == "opdcheck candidate"
    assert found["required"] == ["student", "rollout", "workload"]


def test_prints_the_budgets_schema():
    found = printed("--budget")
    assert found == budget_schema()
    assert found["title"] == "opdcheck budget"


@pytest.mark.parametrize("found", [candidate_schema(), budget_schema()], ids=["candidate", "budget"])
def test_unknown_keys_are_refused_and_sections_described(found):
    for section in objects(found):
        assert section["additionalProperties"] is False, section.get("title")
        assert section.get("description"), section.get("title")


def test_values_can_be_completed():
    definitions = candidate_schema()["$defs"]
    rollout = definitions["Rollout"]["properties"]
    assert "fp8_e5m2" in rollout["kv_cache_dtype"]["enum"]
    assert definitions["Quantization"]["properties"]["scheme"]["enum"] == list(PRESET_SCHEMES)
    assert rollout["engine"]["enum"] == ["transformers", "vllm"]
    assert rollout["engine_args"]["description"].startswith("Handed to vLLM")


def test_examples_satisfy_the_schema():
    """With a validator that is not ours, where one is installed (vLLM brings it)."""
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    from pathlib import Path

    from ruamel.yaml import YAML

    validator = jsonschema.Draft202012Validator(candidate_schema())
    validator.check_schema(candidate_schema())
    files = sorted((Path(__file__).parent.parent / "examples" / "smollm2").glob("*.yaml"))
    assert files
    for file in files:
        assert not list(validator.iter_errors(YAML(typ="safe").load(file.read_text()))), file
    full = {"quantization": {"config_groups": {"FP8": ["Linear"]}}}
    assert not list(validator.iter_errors({"student": {"path": "a"}, "workload": {"prompts": "b"}, "rollout": full}))
    wrong = {"quantization": {"schema": "FP8"}}
    assert list(validator.iter_errors({"student": {"path": "a"}, "workload": {"prompts": "b"}, "rollout": wrong}))


def test_loads_no_torch():
    code = (
        "import sys; from opdcheck.cli.schema import candidate_schema, budget_schema;"
        "candidate_schema(), budget_schema();"
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
