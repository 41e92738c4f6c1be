"""What a command that fails leaves behind: its exit code, its words, and no file that looks like an answer."""

from __future__ import annotations

import functools
import io
import json
import os
import signal
import subprocess
import sys

import pytest
from rich.console import Console

from opdcheck.report.failure import Failure, failure_to_markdown

WAITS = "import time; print('waiting', file=sys.stderr, flush=True); time.sleep(60)"


def start_admit_that(does: str, *arguments: str, **options) -> subprocess.Popen[str]:
    """`opdcheck admit candidate.yaml` in a process of its own, with a measurement that does something else."""
    code = (
        "import sys\nfrom opdcheck import admission, cli\n"
        f"def admit(*_, **__):\n    {does}\nadmission.admit = admit\nsys.argv[0] = 'opdcheck'\ncli.main()"
    )
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, "-c", code, "admit", "candidate.yaml", *arguments]
    return subprocess.Popen(command, text=True, **(streams | options))


@pytest.fixture
def reported(project):
    """Runs `opdcheck admit` where the files of an earlier, admitted run stand; gives what stands there afterwards."""
    as_json, markdown, summary = (project.folder / name for name in ("report.json", "report.md", "summary.md"))
    for file in (as_json, markdown):
        file.write_text('{"verdict": {"decision": "admit"}}')
    summary.write_text("earlier step\n")
    project.monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))

    def run(candidate, *flags):
        ran = project.run("admit", candidate, "--json", as_json, "--markdown", markdown, *flags)
        assert summary.read_text() == "earlier step\n" + markdown.read_text()
        return ran, json.loads(as_json.read_text()), markdown.read_text()

    return run


class TestFailureRecord:
    def test_without_a_valid_budget(self, project, reported):
        budget = project.folder / "budget.yaml"
        budget.write_text(budget.read_text().replace("torch: ", "torch: 0."))
        ran, record, markdown = reported(project.candidate("clean"))
        assert (ran.code, record["exit_code"], record["verdict"]) == (3, 3, None)
        assert record["candidate_file"].endswith("clean.yaml")
        assert record["error"].splitlines()[0] in ran.err
        assert "environment.torch" in record["error"]
        assert markdown.startswith("## opdcheck: NO VERDICT, so not admitted\n")
        assert "environment.torch" in markdown.replace("\\", "")

    def test_observed(self, project, reported):
        ran, record, markdown = reported(project.candidate("none", **{"budget: budget.yaml": ""}), "--observe")
        assert (ran.code, record["exit_code"], record["observed"], record["verdict"]) == (0, 0, True, None)
        assert "without it this run would not start" in markdown

    def test_of_a_wrong_file(self, project, reported):
        ran, record, _ = reported(project.candidate("wrong", "nois: {weights: 1}"))
        assert (ran.code, record["exit_code"]) == (2, 2)
        assert "did you mean `noise`" in record["error"]

    def test_of_a_crash(self, project, reported):
        def admit(*_, **__):
            raise RuntimeError("broken")

        project.monkeypatch.setattr("opdcheck.admission.admit", admit)
        ran, record, _ = reported(project.candidate("clean"))
        assert (ran.code, record["exit_code"]) == (4, 4)
        assert record["error"] == "opdcheck failed: RuntimeError: broken"

    def test_where_the_screen_is_gone(self, project, reported):
        """The exit code is that of a failure, so no verdict may stand in the files."""

        class Gone(io.StringIO):
            def write(self, _text: str) -> int:
                raise OSError(5, "Input/output error")

        project.monkeypatch.setattr("opdcheck.cli.console.result_console", lambda: Console(file=Gone()))
        ran, record, markdown = reported(project.candidate("clean"))
        assert (ran.code, record["exit_code"], record["verdict"]) == (4, 4, None)
        assert "the result could not be written: [Errno 5] Input/output error. This is not a verdict." in ran.err
        assert "NO VERDICT" in markdown

    def test_where_the_summary_cannot_be_written(self, project):
        project.monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(project.folder / "no" / "summary.md"))
        as_json = project.folder / "report.json"
        ran = project.run("admit", project.candidate("clean"), "--json", as_json)
        assert ran.code == 4
        assert json.loads(as_json.read_text())["verdict"] is None

    def test_is_written_wherever_it_can_be(self, project):
        """A Markdown file that cannot be written must not leave an older verdict in the JSON."""
        as_json, markdown = project.folder / "report.json", project.folder / "report.md"
        as_json.write_text('{"verdict": {"decision": "admit"}}')

        def full(path, content):
            if path == markdown:
                raise OSError(28, "No space left on device")
            path.write_text(content)

        project.monkeypatch.setattr("opdcheck.cli.output.write_atomically", full)
        ran = project.run("admit", project.folder / "nowhere.yaml", "--json", as_json, "--markdown", markdown)
        assert ran.code == 2
        assert "No space left on device" in ran.err
        assert json.loads(as_json.read_text())["verdict"] is None

    def test_on_stdout(self, project):
        ran = project.run("admit", project.folder / "nowhere.yaml", "--json", "-")
        assert ran.code == 2
        assert json.loads(ran.out)["verdict"] is None

    def test_that_cannot_be_written_does_not_hide_the_failure(self, project):
        project.monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(project.folder / "no" / "summary.md"))
        ran = project.run("admit", project.folder / "nowhere.yaml")
        assert ran.code == 2
        assert ran.err.startswith("warning: that this failed could not be written: ")
        assert "nowhere.yaml: no such file" in ran.err

    def test_markdown_shows_other_peoples_text_as_it_is(self):
        failure = Failure(
            opdcheck_version="0", created="now", candidate_file="a`b.yaml", exit_code=2, error="<b>\n* @team"
        )
        markdown = failure_to_markdown(failure)
        assert "``" in markdown
        assert "\\<b\\>" in markdown
        assert "\\* \\@team" in markdown


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_signal_that_ends_it(tmp_path, name, code):
    number = getattr(signal, name)
    reset = functools.partial(signal.signal, number, signal.SIG_DFL)  # the tests themselves may run under nohup
    process = start_admit_that(WAITS, "--json", "report.json", cwd=tmp_path, preexec_fn=reset)
    assert process.stderr is not None
    assert process.stderr.readline() == "waiting\n"
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert err == f"ended by {name}: the same command goes on after the last finished round or training\n"
    record = json.loads((tmp_path / "report.json").read_text())
    assert (record["exit_code"], record["error"]) == (code, f"ended by {name}")


def test_a_signal_that_is_ignored_stays_ignored(tmp_path):
    """`nohup opdcheck ...` outlives its terminal."""
    process = start_admit_that(
        "import signal; print(signal.getsignal(signal.SIGHUP) == signal.SIG_IGN)",
        cwd=tmp_path,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    out, _ = process.communicate(timeout=60)
    assert out.startswith("True")


class TestWhereReportsGo:
    @pytest.mark.parametrize("flag", ["--json", "--markdown"])
    @pytest.mark.parametrize(
        ("name", "called"), [("clean.yaml", "candidate"), ("budget.yaml", "budget"), ("prompts.jsonl", "prompts")]
    )
    def test_nothing_that_is_read_is_overwritten(self, project, flag, name, called):
        candidate = project.candidate("clean")
        target = project.folder / name
        before = target.read_bytes()
        ran = project.run("admit", candidate, flag, f"{project.folder}/./{name}")
        assert ran.code == 2
        assert f"{name} is the {called}, and would be overwritten" in ran.err
        assert target.read_bytes() == before

    def test_a_candidate_that_cannot_be_read_is_not_overwritten_either(self, project):
        candidate = project.candidate("wrong", "nois: {weights: 1}")
        before = candidate.read_bytes()
        link = project.folder / "link.json"
        link.symlink_to(candidate)
        assert project.run("admit", candidate, "--json", link).code == 2
        assert candidate.read_bytes() == before

    def test_two_reports_in_one_file(self, project):
        same = project.folder / "same"
        ran = project.run("admit", project.candidate("clean"), "--json", same, "--markdown", same)
        assert ran.code == 2
        assert "--markdown: " in ran.err
        assert "is the file of --json" in ran.err

    def test_a_name_that_is_too_long(self, project):
        ran = project.run("admit", project.candidate("clean"), "--json", project.folder / ("x" * 300))
        assert ran.code == 2
        assert "--json: cannot write" in ran.err
        assert "File name too long" in ran.err

    def test_a_name_that_is_not_utf_8(self, project):
        candidate = project.candidate("clean").rename(project.folder / os.fsdecode(b"caf\xe9.yaml"))
        ran, report = project.admit(candidate, "--markdown", project.folder / "report.md")
        assert ran.code == 0, ran.err
        assert report["candidate_file"].endswith("caf�.yaml")
        assert "caf�.yaml" in (project.folder / "report.md").read_text()

    def test_a_closed_stderr_leaves_stdout_to_the_result(self, project):
        """`opdcheck admit ... --json - 2>&-`"""
        candidate = project.candidate("clean")
        done = subprocess.run(
            f"{sys.executable} -m opdcheck admit {candidate} --json - 2>&-",
            shell=True,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        assert json.loads(done.stdout)["verdict"]["decision"] == "admit"
