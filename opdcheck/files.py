"""Files that are never half-written, and the folder that caches live in."""

from __future__ import annotations

import glob
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs

from opdcheck.errors import ConfigError


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes `content` beside `path` and renames it: readers see the old file or the new one, nothing between.

    A link keeps pointing at its file, which is replaced. A device or a pipe is written into: it cannot be replaced.

    Raises:
        OSError: the folder cannot be written to, or the disk is full; `path` is then as it was.
    """
    data = content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        with path.open("wb") as stream:
            stream.write(data)
        return
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files private; give the file the mode that open() would have.
        umask = os.umask(0)
        os.umask(umask)
        Path(name).chmod(0o666 & ~umask)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def cache_dir() -> Path:
    """`$OPDCHECK_CACHE`, else the platform's user cache folder for opdcheck.

    Raises:
        ConfigError: the variable names a folder that cannot be.
    """
    chosen = os.environ.get("OPDCHECK_CACHE")
    if not chosen:
        return Path(platformdirs.user_cache_dir("opdcheck", appauthor=False))
    try:
        return Path(chosen).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"OPDCHECK_CACHE: not a usable path: {chosen!r}: {error}") from None


def prune(folder: Path, pattern: str, max_bytes: int) -> None:
    """Removes the files of a cache folder that were used longest ago, so that the rest stays within `max_bytes`.

    Raises:
        OSError: the folder cannot be read, or a file vanished meanwhile; what is left goes the next time.
    """
    files = sorted(((f.stat().st_mtime, f.stat().st_size, f) for f in folder.glob(pattern)), reverse=True)
    total = 0
    for _, size, file in files:
        total += size
        if total > max_bytes:
            file.unlink(missing_ok=True)


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """An empty folder in the cache until the block ends. Those that killed processes left there are removed.

    Their names say whose they are: machine and process id, since a cache may be shared by machines.

    Raises:
        OSError: the cache cannot be written to.
    """
    parent = cache_dir() / "tmp"
    parent.mkdir(parents=True, exist_ok=True)
    ours = f"{platform.node().replace('.', '-')}."
    for left in parent.glob(f"{glob.escape(ours)}*"):
        owner = left.name.removeprefix(ours).partition(".")[0]
        if owner.isdecimal() and not _is_running(int(owner)):
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=parent, prefix=f"{ours}{os.getpid()}.") as name:
        yield Path(name)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)  # sends nothing
    except ProcessLookupError:
        return False
    except OSError:  # it is somebody else's
        return True
    return True
