"""Atomic writes: the old content or the new, nothing between, nothing left over."""

import os

import pytest

from opdcheck.files import write_atomically


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
