"""Exit codes of real processes: 1 comes from a reject and from nothing else, and a broken pipe is quiet."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from opdcheck import cli
from opdcheck.budget import write_budget
from opdcheck.cli import variables


def run(script: str, *arguments: str, **options):
    """Runs `opdcheck ARGUMENTS` in a process where `script` has been executed first."""
    code = f"import sys\nfrom opdcheck import admission, cli\n{script}\nsys.argv[0] = 'opdcheck'\ncli.main()"
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.run([sys.executable, "-c", code, *arguments], text=True, check=False, **(streams | options))


def admit_that(does: str, *arguments: str, **options):
    """Runs `opdcheck admit` with a measurement that does something else."""
    script = f"def admit(*_, **__):\n    {does}\nadmission.admit = admit"
    return run(script, "admit", "candidate.yaml", *arguments, **options)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("OPDCHECK_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def closed_pipe():
    """The writing end of a pipe that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    yield writing
    os.close(writing)


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["--version"], ["admit", "--help"], ["budget", "--help"]])
def test_help_and_version_exit_0(arguments):
    done = run("", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["admitt"], "No such command 'admitt'"),
        (["admit"], "Missing argument 'candidate'"),
        (["admit", "c.yaml", "--nonsense"], "No such option: --nonsense"),
        (["admit", "c.yaml", "--alpha", "small"], "Invalid value for '--alpha'"),
        (["budget", "declare", "c.yaml", "--prompts", "1"], "--prompts"),
        ([], "Usage: opdcheck"),
    ],
)
def test_wrong_usage_exits_2_with_its_message(arguments, part):
    done = run("", *arguments)
    assert done.returncode == 2
    assert part in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("how", ["raise KeyboardInterrupt", "import typer; raise typer.Abort"])
def test_an_interruption_exits_130_and_says_what_to_do(how):
    done = admit_that(how)
    assert done.returncode == 130
    assert done.stderr == "interrupted: the same command goes on after the last finished round or training\n"


@pytest.mark.parametrize("code", ["0", "1", "2", "3", "None", "'a message'"])
def test_a_library_that_ends_the_process_is_a_failure(code):
    done = admit_that(f"sys.exit({code})")
    assert done.returncode == 4
    assert "opdcheck failed: SystemExit" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_question_without_anybody_to_answer_is_a_failure():
    done = admit_that("input('Run remote code? ')")
    assert done.returncode == 4
    assert "opdcheck failed: EOFError" in done.stderr


@pytest.mark.parametrize("printing", ["print('x' * 10**6)", "print('x')", "import typer; typer.echo('x')"])
def test_a_broken_pipe_is_a_quiet_failure(closed_pipe, printing):
    """`opdcheck admit ... | head`: also what is still buffered as Python ends leaves no traceback."""
    done = admit_that(f"{printing}; import typer; raise typer.Exit", stdout=closed_pipe)
    assert done.returncode == 4
    assert done.stderr == "error: the result could not be written: [Errno 32] Broken pipe. This is not a verdict.\n"


@pytest.mark.parametrize("arguments", [["schema"], ["budget", "show", "budget.yaml"]])
def test_a_broken_pipe_under_real_commands(tmp_path, closed_pipe, arguments):
    from samples import budget

    write_budget(tmp_path / "budget.yaml", budget())
    done = run("", *arguments, stdout=closed_pipe, cwd=tmp_path)
    assert done.returncode == 4
    assert done.stderr.count("\n") == 1
    assert "could not be written" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code"), [(["admit"], 2), (["admit", "nowhere.yaml"], 2), (["schema"], 0), (["--nonsense"], 2)]
)
def test_nobody_reading_stderr_changes_nothing(closed_pipe, arguments, code):
    done = run("", *arguments, stderr=closed_pipe)
    assert done.returncode == code


def test_a_crash_that_nobody_reads_about_is_a_failure(closed_pipe):
    assert admit_that("raise RuntimeError", stdout=closed_pipe, stderr=closed_pipe).returncode == 4


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_behind_stdout_is_a_failure():
    with open("/dev/full", "w") as full:
        done = run("", "schema", stdout=full)
    assert done.returncode == 4
    assert "No space left" in done.stderr


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("ALPHA", "small", "expected a number, found the text 'small'"),
        ("ALPHA", "2", "expected a number below 1, found 2.0"),
        ("ALPHA", "nan", "expected a finite number, found nan"),
        ("METRIC", "k4", "expected one of `tv`, `kl`, `k3`, `abs_dlogp`; found the text 'k4'"),
        ("MAX_PROMPTS", "1", "expected a number of at least 2, found 1"),
        ("MAX_PROMPTS", "3.5", "expected a whole number, found the text '3.5'"),
        ("OBSERVE", "perhaps", "expected true or false, found the text 'perhaps'"),
    ],
)
def test_a_wrong_variable_is_reported_under_its_own_name(project, variable, value, message):
    project.monkeypatch.setenv(f"OPDCHECK_{variable}", value)
    ran = project.run("admit", project.candidate("clean"))
    assert ran.code == 2
    assert ran.err.splitlines()[-1] == f"error: OPDCHECK_{variable}: {message}"


def test_a_variable_that_does_not_exist_is_warned_of_and_no_more(monkeypatch):
    monkeypatch.setenv("OPDCHECK_ALHPA", "0.1")
    monkeypatch.setenv("OPDCHECK_COLOUR", "1")
    done = run("", "schema")
    assert done.returncode == 0
    first, second = done.stderr.splitlines()
    assert first == (
        "warning: OPDCHECK_ALHPA is set, and opdcheck knows no such variable; did you mean OPDCHECK_ALPHA?"
    )
    assert "OPDCHECK_COLOUR" in second
    assert "there are: OPDCHECK_ALPHA, OPDCHECK_BUDGET, OPDCHECK_CACHE, OPDCHECK_DEBUG, " in second


def test_every_variable_that_the_code_reads_is_known():
    folder = Path(cli.__file__).parents[1]
    read = {name for file in folder.rglob("*.py") for name in re.findall(r"OPDCHECK_[A-Z_]+\b", file.read_text())}
    assert list(variables.warnings(typer.main.get_command(cli.app), read)) == []


def test_a_flag_wins_over_a_variable_and_is_then_the_one_to_blame(project):
    project.monkeypatch.setenv("OPDCHECK_ALPHA", "0.1")
    ran = project.run("admit", project.candidate("clean"), "--alpha", "2")
    assert ran.err.startswith("error: --alpha: ")


def test_verify_takes_the_budget_from_the_variable(project):
    candidate = project.candidate("none", **{"budget: budget.yaml": ""})
    assert project.run("budget", "verify", candidate).code == 3
    project.monkeypatch.setenv("OPDCHECK_BUDGET", str(project.folder / "budget.yaml"))
    ran = project.run("budget", "verify", candidate)
    assert (ran.code, "VALID here" in ran.out) == (0, True)
    project.monkeypatch.setenv("OPDCHECK_BUDGET", "nowhere.yaml")
    ran = project.run("budget", "verify", candidate)
    assert (ran.code, ran.err.startswith("error: OPDCHECK_BUDGET: no such file")) == (2, True)


def test_observe_also_forgives_that_there_is_no_valid_budget(project):
    candidate = project.candidate("none", **{"budget: budget.yaml": ""})
    ran, report = project.admit(candidate, "--observe")
    assert (ran.code, report["verdict"], ran.out) == (0, None, "")
    assert "no verdict: " in ran.err
    assert "names no budget" in ran.err
    assert "--observe: exit code 0 all the same; without it this run would not start (exit code 3)." in ran.err
    assert project.admit(candidate)[0].code == 3


def test_names_from_the_user_cannot_command_the_terminal(project):
    ran = project.run("admit", project.folder / "no\x1b[2Jwhere\u202e.yaml")
    assert ran.code == 2
    assert r"no\x1b[2Jwhere\u202e.yaml: no such file" in ran.err
    assert not {"\x1b", "\u202e"} & set(ran.err)


def test_a_failure_while_telling_of_a_failure_is_still_no_verdict():
    done = run("def boom(*_): raise RuntimeError\ncli._report_crash = boom\ncli.app = boom", "admit", "candidate.yaml")
    assert done.returncode == 4
    assert "Traceback" not in done.stderr


def test_a_crash_with_a_cache_that_cannot_be_is_still_no_verdict(monkeypatch):
    monkeypatch.setenv("OPDCHECK_CACHE", "~nosuchuser/x")
    done = admit_that("raise RuntimeError('x')")
    assert done.returncode == 4
    assert done.stderr.startswith("error: opdcheck failed: RuntimeError: x")
