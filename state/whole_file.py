"""Files that are replaced as a whole: after a crash there is the old content or the new one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

_MODE: Final = 0o600


def replace_file(path: Path, content: bytes) -> None:
    """Put ``content`` at ``path``, for its owner alone and on the disk. Raises OSError."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, _MODE)
        with os.fdopen(fd, "wb") as file:
            os.fchmod(fd, _MODE)
            file.write(content)
            file.flush()
            os.fsync(fd)
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
    _sync_directory(path.absolute().parent)


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
