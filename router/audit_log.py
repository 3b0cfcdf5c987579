"""The trail of what operators did to scopes: one JSON line each, chained by digests.

A record names the digest of the line before it, so that no line can be edited, taken out or put in
without every later one telling. Whoever keeps the digest of the last line elsewhere (``head``) also
notices lines that are missing at the end. An action is written twice, before and after: what is
seen to begin and not to end was cut short. No prompt, no key and no salt is ever in it.

Each record is on the disk before its action goes on. A torn last line, left by a crash, stays where
it is, and the next record says so.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import hashlib
import os
import stat
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
from msgspec import Meta, Struct, structs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

NO_LINE: Final = "0" * 64
"""What the first record has in place of a digest."""
MODE: Final = 0o600
REPAIRED: Final = "log.repaired"
_FLAGS: Final = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
_MOST_LINE_BYTES: Final = 64 * 1024
_BLOCK_BYTES: Final = 64 * 1024
_FIRST: Final = b'{"number":1,'


class AuditError(Exception):
    """The trail cannot be written or is not one; the text names the file."""


class AuditRecord(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line. ``number`` counts from 1, ``ts`` is Unix time in seconds, ``epoch`` its counter.

    ``prev`` is the SHA-256 of the line before, without its end of line. ``result`` is ``begun``
    before an action, and how it ended after it.
    """

    number: Annotated[int, Meta(ge=1)]
    ts: float
    router: str
    actor: str
    action: str
    scope: str | None = None
    epoch: int | None = None
    counts: dict[str, int] = {}
    result: str
    prev: Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]


_decoder = msgspec.json.Decoder(AuditRecord)


def line_digest(line: bytes) -> str:
    """Return what the next record names ``line`` by; ``line`` has no end of line."""
    return hashlib.sha256(line).hexdigest()


class AuditLog:
    """Appends to one file, which is one router process's own. Raises AuditError when it cannot."""

    def __init__(self, path: Path, router: str, unix_clock: Callable[[], float]) -> None:
        self._path = path
        self._router = router
        self._unix_clock = unix_clock
        self._lock = asyncio.Lock()
        self._number, self._prev = 0, NO_LINE
        self._is_torn = False
        try:
            self._fd = os.open(path, _FLAGS, MODE)
        except OSError as error:
            raise self._error(error) from None
        try:
            self._resume()
            os.fchmod(self._fd, MODE)
        except (OSError, AuditError) as error:
            os.close(self._fd)
            raise self._error(error) from None

    @property
    def head(self) -> str:
        """The digest of the last line."""
        return self._prev

    async def aclose(self) -> None:
        """Close the file, once nothing is being written."""
        async with self._lock:
            os.close(self._fd)

    async def write(
        self,
        action: str,
        result: str,
        *,
        actor: str,
        scope: str | None = None,
        epoch: int | None = None,
        counts: Mapping[str, int] | None = None,
    ) -> None:
        """Append one record and wait until the disk has it."""
        record = AuditRecord(
            number=1,
            ts=self._unix_clock(),
            router=self._router,
            actor=actor,
            action=action,
            scope=scope,
            epoch=epoch,
            counts=dict(counts or {}),
            result=result,
            prev=NO_LINE,
        )
        await asyncio.shield(self._locked(record))

    async def _locked(self, record: AuditRecord) -> None:
        """Append when nobody else does: who leaves meanwhile leaves no half of it."""
        async with self._lock:
            await asyncio.to_thread(self._append, record)

    def _append(self, record: AuditRecord) -> None:
        try:
            if self._is_torn:
                self._resume()
            size_bytes = self._in_place()
            chained = structs.replace(record, number=self._number + 1, prev=self._prev)
            line = msgspec.json.encode(chained)
            try:
                self._write(line + b"\n")
                os.fsync(self._fd)
            except OSError:
                self._is_torn = True
                os.ftruncate(self._fd, size_bytes)
                self._is_torn = False
                raise
        except OSError as error:
            raise self._error(error) from None
        self._number, self._prev = chained.number, line_digest(line)

    def _in_place(self) -> int:
        """Return the size of the file, which is lost to its readers where the path has another."""
        kept, named = os.fstat(self._fd), self._path.stat()
        if (kept.st_dev, kept.st_ino) != (named.st_dev, named.st_ino):
            message = "expected the file that was there at the start, it was removed or replaced"
            raise OSError(errno.ESTALE, message)
        return kept.st_size

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._fd, rest) :]

    def _own(self) -> int:
        """Return the size of the file, which only this process may write."""
        kept = os.fstat(self._fd)
        if not stat.S_ISREG(kept.st_mode):
            message = "expected a regular file"
            raise AuditError(message)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            message = "expected a file that no other process writes"
            raise AuditError(message) from None
        return kept.st_size

    def _resume(self) -> None:
        """Go on after the last line that is there, whole or torn."""
        size_bytes = self._own()
        if not size_bytes:
            self._is_torn = False
            return
        lines = self._last_lines(size_bytes)
        has_end = not lines[-1]
        if has_end:
            del lines[-1]
        records = [record for record in map(_decoded, lines) if record is not None]
        if not records and (len(lines) > 1 or not _is_beginning(lines[-1])):
            message = "expected the records of an audit log"
            raise AuditError(message)
        if not has_end:
            self._write(b"\n")
        self._number = records[-1].number if records else 0
        self._prev = line_digest(lines[-1])
        self._is_torn = False
        if _decoded(lines[-1]) is None:
            self._append(
                AuditRecord(
                    number=1,
                    ts=self._unix_clock(),
                    router=self._router,
                    actor="router",
                    action=REPAIRED,
                    result="done",
                    prev=NO_LINE,
                )
            )

    def _last_lines(self, size_bytes: int) -> list[bytes]:
        """Return the end of the file in lines, two whole ones at least where there are so many."""
        begin, tail = size_bytes, b""
        while begin and tail.count(b"\n") <= 1 + tail.endswith(b"\n"):
            portion = min(begin, _BLOCK_BYTES)
            begin -= portion
            tail = os.pread(self._fd, portion, begin) + tail
        return tail.split(b"\n")

    def _error(self, error: Exception) -> AuditError:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        return AuditError(f"{self._path}: {reason}")


class Verdict(Struct, frozen=True, kw_only=True):
    """What a check of a trail found: the faults, each with its line, and the last line's digest."""

    records: int
    head: str
    faults: tuple[str, ...]


def verify(path: Path, head: str | None = None) -> Verdict:
    """Check every line of the file; ``head`` is the last line's digest, kept elsewhere.

    Raises AuditError for a file that cannot be read.
    """
    faults: list[str] = []
    records, expected, prev, torn_at = 0, 1, NO_LINE, None
    has_head = head is None or head == NO_LINE
    try:
        with path.open("rb") as file:
            for at, raw in enumerate(file, 1):
                line = raw.removesuffix(b"\n")
                record = _decoded(line)
                if record is None:
                    faults += [] if torn_at is None else [f"line {torn_at}: no record"]
                    torn_at = at
                else:
                    faults += _faults(at, record, prev, expected, torn_at)
                    records, expected, torn_at = records + 1, record.number + 1, None
                prev = line_digest(line)
                has_head = has_head or prev == head
                if not raw.endswith(b"\n"):
                    faults.append(f"line {at}: it has no end")
    except OSError as error:
        message = f"{path}: {error.strerror}"
        raise AuditError(message) from None
    if torn_at is not None:
        faults.append(f"line {torn_at}: no record")
    if not has_head:
        faults.append(f"the end: no line has the digest {head}; lines are missing or were changed")
    return Verdict(records=records, head=prev, faults=tuple(faults))


def _is_beginning(line: bytes) -> bool:
    """Return whether ``line`` may be what a crash left of a file's first record."""
    return line[: len(_FIRST)] == _FIRST[: len(line)]


def _decoded(line: bytes) -> AuditRecord | None:
    if len(line) > _MOST_LINE_BYTES:
        return None
    try:
        return _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _faults(
    at: int, record: AuditRecord, prev: str, expected: int, torn_at: int | None
) -> list[str]:
    """Return what is wrong with a record that follows a line with the digest ``prev``."""
    faults = []
    if torn_at is not None and record.action != REPAIRED:
        faults.append(f"line {torn_at}: no record")
    if record.number != expected:
        faults.append(f"line {at}: record {record.number}, expected {expected}")
    if record.prev != prev:
        faults.append(f"line {at}: it does not follow the line before; that was changed, or it was")
    return faults
