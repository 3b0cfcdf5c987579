"""A file of lines that is only appended to, rotated by size, and never more than it may be.

``path`` is written; ``path.1`` is the one before it, ``path.2`` older, up to ``keep_files`` of
them. Every file begins with the same header line, and so does every new start of the writer.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from router.packer import shift

if TYPE_CHECKING:
    from pathlib import Path

    from router.packer import Packer

MODE: Final = 0o600
FLAGS: Final = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
"""Reading, too: a line that was torn, and a pipe opens at once to be refused."""
NEWLINE: Final = b"\n"


class LogFile:
    """Whole lines go in; an OSError leaves what was written before, and the next write opens anew.

    For one thread; every call may block for as long as the disk does. ``packer`` compresses the
    older files, where there is one.
    """

    def __init__(
        self,
        path: Path,
        header: bytes,
        max_bytes: int,
        keep_files: int,
        packer: Packer | None = None,
    ) -> None:
        self._path = path
        self._header = header
        self._max_bytes = max_bytes
        self._keep_files = keep_files
        self._packer = packer
        self._fd: int | None = None
        self._written_bytes = 0

    def write(self, lines: bytes) -> None:
        """Append ``lines``, in the next file if they would make this one too long."""
        try:
            fd = self._open() if self._fd is None else self._fd
            if self._written_bytes + len(lines) > self._max_bytes:
                fd = self._rotate()
            self._append(fd, lines)
        except OSError:
            self._cut()
            self.close()
            raise

    def begin_with(self, header: bytes) -> None:
        """Begin files with another header line from now on; the open one stays as it is."""
        self._header = header

    def close(self) -> None:
        """Close the file; the next write opens it again."""
        fd, self._fd = self._fd, None
        if fd is not None:
            with suppress(OSError):  # what the disk says now comes too late
                os.close(fd)
        if self._packer is not None:
            self._packer.settle()

    def _open(self) -> int:
        """Open for appending; a line that a crash has torn gets its end before the header."""
        fd = os.open(self._path, FLAGS, MODE)
        try:
            kept_bytes = _owned_bytes(fd)
            is_torn = kept_bytes and os.pread(fd, 1, kept_bytes - 1) != NEWLINE
        except OSError:
            os.close(fd)
            raise
        self._fd, self._written_bytes = fd, kept_bytes
        self._append(fd, NEWLINE + self._header if is_torn else self._header)
        return fd

    def _rotate(self) -> int:
        """Let this file be the newest of the kept ones, and begin the next."""
        self.close()
        shift(self._path, self._keep_files)
        fd = self._open()
        if self._packer is not None:
            self._packer.begin()
        return fd

    def _append(self, fd: int, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(fd, rest) :]
        self._written_bytes += len(data)

    def _cut(self) -> None:
        """Take back the part of a write that was not finished."""
        if self._fd is not None:
            with suppress(OSError):
                os.ftruncate(self._fd, self._written_bytes)


def _owned_bytes(fd: int) -> int:
    """Return the size of a file that only this process writes, and only its user reads.

    Raises OSError where that cannot be: another process writes it, or it is no regular file.
    """
    kept = os.fstat(fd)
    if not stat.S_ISREG(kept.st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if stat.S_IMODE(kept.st_mode) != MODE:
        os.fchmod(fd, MODE)
    return kept.st_size
