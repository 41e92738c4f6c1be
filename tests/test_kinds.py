"""One of opdcheck's files in the place of another is told so, and nothing else is."""

from pathlib import Path

import pytest
from samples import budget

from opdcheck.budget import load_budget, write_budget
from opdcheck.config import load_candidate
from opdcheck.errors import ConfigError
from opdcheck.kinds import kind_of

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("pattern", "kind"),
    [
        ("examples/*/calibration.yaml", "calibration"),
        ("examples/smollm2/*.yaml", "candidate"),
        ("examples/addition/configs/*.yaml", "candidate"),
        ("budgets/*.yaml", "budget"),
    ],
)
def test_the_shipped_files_are_what_they_are(pattern, kind):
    from ruamel.yaml import YAML

    files = list(ROOT.glob(pattern))
    assert files
    for file in files:
        found = kind_of(YAML(typ="safe").load(file))
        assert found is not None, file
        assert found.name == kind, file


@pytest.fixture
def folder(tmp_path):
    write_budget(tmp_path / "budget.yaml", budget())
    (tmp_path / "candidate.yaml").write_text("student: {path: s}\nrollout: {}\nworkload: {prompts: p.jsonl}\n")
    (tmp_path / "calibration.yaml").write_text(
        "student: {path: s}\nrollout: {}\nworkload: {prompts: p.jsonl}\nmethod: {}\nladder: {}\n"
    )
    (tmp_path / "report.json").write_text('{"candidate_file": "c.yaml", "verdict": null, "error": "none"}')
    return tmp_path


@pytest.mark.parametrize(
    ("load", "given", "message", "hint"),
    [
        (load_candidate, "budget.yaml", "budget file; expected a candidate file (`student`, `rollout`", "--budget"),
        (load_candidate, "calibration.yaml", "calibration file; expected a candidate file", "opdcheck calibrate"),
        (load_candidate, "report.json", "report file; expected a candidate file", "--json"),
        (load_budget, "candidate.yaml", "candidate file; expected a budget file (`provenance`, `limits`", "declare"),
        (load_budget, "calibration.yaml", "calibration file; expected a budget file", "opdcheck calibrate"),
    ],
)
def test_one_file_for_another_is_one_sentence(folder, load, given, message, hint):
    with pytest.raises(ConfigError) as caught:
        load(folder / given)
    assert caught.value.message.startswith(f"{folder / given}: this is a {message}")
    assert "\n" not in caught.value.message
    assert hint in (caught.value.hint or "")


def test_a_mistake_in_the_right_kind_of_file_is_told_by_its_key(folder):
    file = folder / "candidate.yaml"
    file.write_text(file.read_text() + "limits: {}\n")
    with pytest.raises(ConfigError, match=r"candidate\.yaml:4: limits: unknown key"):
        load_candidate(file)
