"""The audit's file: one transition a line, JSON, appended once a step, rotated and bounded.

A file begins with a snapshot of every page, so that each one can be replayed alone. Writing never
stops the engine: a log that cannot be written is suspended, and goes on with a new file and a new
snapshot once it can. Lines reach the kernel with each flush and are not forced to the disk: a
process that dies loses nothing that was flushed, a machine that loses power may.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import time
from typing import TYPE_CHECKING, Final

import msgspec

from sidecar.audit import RESUMED

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from sidecar.journal import Transition

RETRY_S: Final = 5.0
"""How often a suspended log tries to go on."""
_COMMA: Final = ord(",")
_LOG = logging.getLogger("warmroute.worker")


class AuditLog:
    """Writes transitions to ``path``; older files are ``path.1`` to ``path.<kept_files>``.

    A file is at most ``max_bytes`` and one step long, or twice its snapshot where that is more.
    ``snapshot`` returns an ``open`` transition that tells the pages as they are after everything
    noted so far; it is called by ``open`` and ``flush`` only. What is noted before ``open`` is not
    written. ``wall_s`` is the wall clock in seconds.
    """

    def __init__(
        self,
        path: Path,
        max_bytes: int,
        kept_files: int,
        snapshot: Callable[[], Transition],
        *,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        if max_bytes < 1:
            message = f"max_bytes: expected at least 1, got {max_bytes}"
            raise ValueError(message)
        if kept_files < 0:
            message = f"kept_files: expected at least 0, got {kept_files}"
            raise ValueError(message)
        self.path = path
        self.max_bytes = max_bytes
        self.kept_files = kept_files
        self.lost_transitions = 0
        """Transitions that could not be written."""
        self.suspensions = 0
        self._snapshot = snapshot
        self._wall_s = wall_s
        self._encoder = msgspec.json.Encoder()
        self._buffer = bytearray()
        self._buffered_lines = 0
        self._number = 0
        self._run = 0
        self._file: int | None = None
        self._file_bytes = 0
        self._snapshot_bytes = 0
        self._tried_s: float | None = None
        """When a suspended log last tried to go on."""

    @property
    def is_suspended(self) -> bool:
        """Whether the log cannot be written now."""
        return self._tried_s is not None

    def open(self) -> None:
        """Begin a new file, keep an existing one as ``path.1``; raises OSError when it cannot."""
        self._expect_unlocked()
        run = max(1, int(self._wall_s() * 1e9))
        self._begin_file("started", run)
        self._run = run

    def note(self, transition: Transition) -> None:
        """Add a line to what the next flush writes."""
        if self._run == 0:
            return
        self._number += 1
        if self._file is None:
            self.lost_transitions += 1
            return
        buffer = self._buffer
        buffer += b'{"n":%d,"t":%.3f' % (self._number, self._wall_s())
        end = len(buffer)
        self._encoder.encode_into(transition, buffer, end)
        buffer[end] = _COMMA
        buffer += b"\n"
        self._buffered_lines += 1

    def flush(self) -> None:
        """Write what was noted; called once a step. Suspends the log instead of raising OSError."""
        try:
            if self._file is None:
                self._resume()
            else:
                self._write_buffer(self._file)
                if self._file_bytes >= max(self.max_bytes, 2 * self._snapshot_bytes):
                    self._close_file()
                    self._begin_file("rotated", self._run)
        except OSError as error:
            self._suspend(error)

    def close(self) -> None:
        """Write what was noted and close the file. Nothing is written any more."""
        if self._buffered_lines:
            self.flush()
        self._close_file()
        self._run = 0

    def _write_buffer(self, file: int) -> None:
        if not self._buffer:
            return
        try:
            self._expect_named(file)
            _write_all(file, self._buffer)
        except OSError:
            self.lost_transitions += self._buffered_lines
            with contextlib.suppress(OSError):
                os.ftruncate(file, self._file_bytes)
            raise
        finally:
            written_bytes = len(self._buffer)
            self._buffer.clear()
            self._buffered_lines = 0
        self._file_bytes += written_bytes

    def _begin_file(self, why: str, run: int) -> None:
        number, now_s = self._number + 1, round(self._wall_s(), 3)
        first = msgspec.structs.replace(self._snapshot(), n=number, t=now_s, run=run, why=why)
        line = self._encoder.encode(first) + b"\n"
        self._shift_files()
        file = os.open(
            self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
        )
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write_all(file, line)
        except OSError:
            os.close(file)
            self.path.unlink(missing_ok=True)
            raise
        self._number = number
        self._file = file
        self._file_bytes = self._snapshot_bytes = len(line)

    def _shift_files(self) -> None:
        """Make room at ``path``; the oldest file goes."""
        try:
            status = os.lstat(self.path)
        except FileNotFoundError:
            return
        if not stat.S_ISREG(status.st_mode):
            message = "it is there and no file"
            raise OSError(errno.EEXIST, message, str(self.path))
        for number in range(self.kept_files - 1, 0, -1):
            with contextlib.suppress(FileNotFoundError):
                self._kept(number).replace(self._kept(number + 1))
        if self.kept_files:
            self.path.replace(self._kept(1))
        else:
            self.path.unlink()

    def _kept(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")

    def _expect_named(self, file: int) -> None:
        """Raise OSError when ``file`` was removed: what is written there nobody reads."""
        if os.fstat(file).st_nlink == 0:
            message = "somebody removed it"
            raise OSError(errno.ENOENT, message, str(self.path))

    def _expect_unlocked(self) -> None:
        """Raise OSError when another process writes to ``path``."""
        try:
            file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = "another process writes this audit log"
            raise OSError(errno.EBUSY, message, str(self.path)) from None
        finally:
            os.close(file)

    def _suspend(self, error: OSError) -> None:
        was_suspended = self._tried_s is not None
        self._close_file()
        self._tried_s = self._wall_s()
        if not was_suspended:
            self.suspensions += 1
            _LOG.error("audit log %s: %s; suspended, the engine goes on", self.path, error)

    def _resume(self) -> None:
        if self._tried_s is None or abs(self._wall_s() - self._tried_s) < RETRY_S:
            return
        self._begin_file(RESUMED, self._run)
        self._tried_s = None
        _LOG.warning(
            "audit log %s: written again; %d transitions lost so far",
            self.path,
            self.lost_transitions,
        )

    def _close_file(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = None


def _write_all(file: int, content: bytes | bytearray) -> None:
    view = memoryview(content)
    try:
        while view:
            view = view[os.write(file, view) :]
    finally:
        view.release()
