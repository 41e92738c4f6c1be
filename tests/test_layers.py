"""The import rules of pyproject.toml hold, and starting the command line imports nothing heavy."""

import subprocess
import sys

import pytest


def test_import_contracts():
    from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports

    assert lint_imports(cache_dir=None) == EXIT_STATUS_SUCCESS


@pytest.mark.parametrize(
    "arguments", [["--help"], ["admit", "--help"], ["budget", "--help"], ["schema"], ["--version"]]
)
def test_no_heavy_import_at_start_up(arguments):
    script = (
        "import sys, opdcheck.cli\n"
        f"sys.argv = ['opdcheck', *{arguments!r}]\n"
        "try: opdcheck.cli.main()\n"
        "except SystemExit as exit_: assert not exit_.code, exit_.code\n"
        "heavy = {'torch', 'transformers', 'vllm', 'scipy', 'pyarrow', 'compressed_tensors'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
