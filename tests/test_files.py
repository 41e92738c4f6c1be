"""Atomic writes: the old content or the new, nothing between, nothing left over."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from opdcheck.errors import ConfigError
from opdcheck.files import cache_dir, prune, scratch_folder, write_atomically


def test_writes_and_replaces(tmp_path):
    path = tmp_path / "folder" / "file.txt"
    write_atomically(path, "one")
    write_atomically(path, b"two")
    assert path.read_text() == "two"
    assert [file.name for file in path.parent.iterdir()] == ["file.txt"]


def test_a_failed_write_leaves_the_old_file_and_no_debris(tmp_path, monkeypatch):
    path = tmp_path / "file.txt"
    write_atomically(path, "old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["file.txt"]


def test_the_mode_is_that_of_an_ordinary_file(tmp_path):
    write_atomically(tmp_path / "file", "x")
    (tmp_path / "plain").write_text("x")
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_pruning_keeps_what_was_used_last(tmp_path):
    for age, name in enumerate(["new.json", "middle.json", "old.json", "old.txt"]):
        (tmp_path / name).write_bytes(b"x" * 10)
        os.utime(tmp_path / name, (1000 - age, 1000 - age))
    prune(tmp_path, "*.json", 20)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["middle.json", "new.json", "old.txt"]


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    """Where scratch folders are made."""
    monkeypatch.setenv("OPDCHECK_CACHE", str(tmp_path))
    return tmp_path / "tmp"


def test_a_scratch_folder_lasts_as_long_as_its_block(scratch):
    with scratch_folder() as one, scratch_folder() as other:
        assert one != other
        assert one.parent == other.parent == scratch
        (one / "file").write_text("x")
    assert list(scratch.iterdir()) == []


def test_what_killed_processes_left_is_removed_and_nothing_else(scratch):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    ours, dead_id = platform.node().replace(".", "-"), dead.pid
    names = [
        f"{ours}.{dead_id}.a",
        f"{ours}.{os.getppid()}.b",
        f"elsewhere.{dead_id}.c",
        f"{ours}.{os.getpid()}.d",
        "x",
    ]
    for name in names:
        (scratch / name).mkdir(parents=True)
    with scratch_folder():
        pass
    assert sorted(folder.name for folder in scratch.iterdir()) == sorted(names[1:])


def test_a_device_is_written_into_and_a_link_keeps_its_target(tmp_path):
    write_atomically(Path("/dev/null"), "gone")
    assert not Path("/dev/null").is_file()
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    write_atomically(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"


def test_a_cache_that_cannot_be_is_a_config_error(monkeypatch):
    monkeypatch.setenv("OPDCHECK_CACHE", "~nosuchuser/x")
    with pytest.raises(ConfigError, match="OPDCHECK_CACHE: not a usable path"):
        cache_dir()
