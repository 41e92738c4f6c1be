"""Files that are never half-written, and the folder that caches live in."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import platformdirs


def write_atomically(path: Path, content: str | bytes) -> None:
    """Writes `content` beside `path` and renames it: readers see the old file or the new one, nothing between.

    Raises:
        OSError: the folder cannot be written to, or the disk is full; `path` is then as it was.
    """
    data = content.encode() if isinstance(content, str) else content
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
    """`$OPDCHECK_CACHE`, else the platform's user cache folder for opdcheck."""
    chosen = os.environ.get("OPDCHECK_CACHE")
    return Path(chosen).expanduser() if chosen else Path(platformdirs.user_cache_dir("opdcheck", appauthor=False))
