"""A project folder with a tiny student, prompts, a declared budget and candidates, and a way to run commands in it."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

CANDIDATE = """\
student: {{path: {student}, dtype: float32}}
rollout:
  engine: transformers
  dtype: float32
{rollout}
workload: {{prompts: prompts.jsonl, max_completion_length: 12}}
budget: budget.yaml
decision: {{round_prompts: 4, min_prompts: 4}}
"""


@dataclass
class Ran:
    """What a command left behind."""

    code: int
    out: str
    err: str


@dataclass
class Project:
    """A folder that commands run in."""

    folder: Path
    student: Path
    monkeypatch: pytest.MonkeyPatch
    capsys: pytest.CaptureFixture[str]

    def candidate(self, name: str, rollout: str = "", **replace: str) -> Path:
        """Writes a candidate file; `replace` swaps pieces of its text."""
        text = CANDIDATE.format(student=self.student, rollout="\n".join(f"  {line}" for line in rollout.splitlines()))
        for old, new in replace.items():
            text = text.replace(old, new)
        path = self.folder / f"{name}.yaml"
        path.write_text(text)
        return path

    def run(self, *arguments: str | Path) -> Ran:
        """Runs `opdcheck ARGUMENTS` in this process."""
        from opdcheck.cli import main

        self.monkeypatch.setattr(sys, "argv", ["opdcheck", *map(str, arguments)])
        self.capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            main()
        captured = self.capsys.readouterr()
        return Ran(int(exit_.value.code or 0), captured.out, captured.err)

    def admit(self, candidate: Path, *flags: str | Path) -> tuple[Ran, dict[str, Any]]:
        """`opdcheck admit CANDIDATE --json ...`, and what the JSON holds (empty where none was written)."""
        target = self.folder / "report.json"
        target.unlink(missing_ok=True)
        ran = self.run("admit", candidate, "--json", target, *flags)
        return ran, json.loads(target.read_text()) if target.exists() else {}


@pytest.fixture(scope="session")
def declared_budget(tiny_student: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Text of a budget for the tiny student: k3 at most 0.02 nats/token."""
    from opdcheck import declare
    from opdcheck.budget import write_budget

    folder = tmp_path_factory.mktemp("declared")
    _write_prompts(folder)
    (folder / "any.yaml").write_text(CANDIDATE.format(student=tiny_student, rollout=""))
    write_budget(
        folder / "budget.yaml", declare(folder / "any.yaml", total={"k3": 0.02}, reason="for the tests", prompts=4)
    )
    return (folder / "budget.yaml").read_text()


def _write_prompts(folder: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": f"Question {number}: what is {number} + 1?"}]} for number in range(24)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def project(
    tmp_path: Path,
    tiny_student: Path,
    declared_budget: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Project:
    monkeypatch.setenv("OPDCHECK_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    _write_prompts(tmp_path)
    (tmp_path / "budget.yaml").write_text(declared_budget)
    return Project(tmp_path, tiny_student, monkeypatch, capsys)
