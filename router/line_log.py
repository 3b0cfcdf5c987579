"""JSON lines from the event loop to a file, by a thread: nothing waits for the disk.

A record is encoded when it is appended, some 10 us, and written in chunks. What the disk does not
take in time is dropped and counted.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

    from msgspec import Struct

_log = logging.getLogger(__name__)

FLUSH_S: Final = 0.2
CHUNK_BYTES: Final = 64 * 1024
MAX_RECORD_BYTES: Final = 512 * 1024
MAX_QUEUED_BYTES: Final = 8 * 1024 * 1024
RETRY_S: Final = 5.0
"""How long a path that could not be written is left alone."""
CLOSE_S: Final = 5.0
"""How long the end of the process may wait for the disk."""


class Sink(Protocol):
    """Where lines go; both calls may block, in a thread of the log's own."""

    def write(self, lines: bytes) -> None:
        """Write whole lines; raises OSError, after which none of them counts as written."""
        ...

    def close(self) -> None:
        """Let it go."""
        ...


class _Chunk(NamedTuple):
    """Lines to write; ``header`` stands above the first of them."""

    records: int
    lines: bytes
    header: bytes


class LineLog:
    """Takes records on the event loop; a thread of its own writes them, until it is closed.

    ``name`` and ``place`` are what messages call it and where its lines go. ``header`` is the line
    that files begin with at first, and ``begin_with`` is told of it before each write.
    """

    def __init__(
        self,
        name: str,
        place: str,
        sink: Sink,
        clock: Callable[[], float],
        *,
        header: bytes = b"",
        begin_with: Callable[[bytes], None] = lambda _: None,
    ) -> None:
        self._name = name
        self._place = place
        self._sink = sink
        self._clock = clock
        self._encode_into = msgspec.json.Encoder().encode_into
        self._header = self._header_above = header
        self._begin_with = begin_with
        self._pending = bytearray()
        self._pending_records = 0
        self._chunks: queue.SimpleQueue[_Chunk | None] = queue.SimpleQueue()
        # Each of these has one thread that changes it, so that none needs a lock.
        self._handed_bytes = 0
        self._dropped_here = 0
        self._settled_bytes = 0
        self._dropped_there = 0
        self._written = 0
        self._retry_at_s: float | None = None
        self._is_closed = False
        thread = name.replace(" ", "-")
        self._thread = threading.Thread(target=self._write_all, name=thread, daemon=True)
        self._thread.start()
        self._chunks.put(_Chunk(0, b"", header))  # a path of no use is told at the start

    @property
    def dropped(self) -> int:
        """Records that were not written although they were to be."""
        return self._dropped_here + self._dropped_there

    @property
    def written(self) -> int:
        """Records that were written."""
        return self._written

    # On the event loop.

    def has_room(self) -> bool:
        """Return whether a record would be taken now; one that is not counts as dropped."""
        if self._is_closed or self._backlog_bytes() > MAX_QUEUED_BYTES:
            self._dropped_here += 1
            return False
        return True

    def follow(self, header: bytes) -> None:
        """Let ``header``, a whole line, stand above what is appended from now on."""
        if header != self._header:
            self._header = header
            self._pending += header

    def append(self, record: Struct) -> None:
        """Take a record for which there is room, unless JSON cannot say it or it is too long."""
        pending = self._pending
        before = len(pending)
        try:
            self._encode_into(record, pending, -1)
        except ValueError:  # a name that is no Unicode
            del pending[before:]
        if not 0 < len(pending) - before <= MAX_RECORD_BYTES:
            del pending[before:]
            self._dropped_here += 1
            return
        pending += b"\n"
        self._pending_records += 1
        if len(pending) >= CHUNK_BYTES:
            self._hand_over()

    async def run(self) -> None:
        """Hand over what waits, every ``FLUSH_S``, until cancelled."""
        while True:
            await asyncio.sleep(FLUSH_S)
            self._hand_over()

    async def close(self) -> None:
        """Write the rest, for at most ``CLOSE_S``; what comes later is dropped."""
        if self._is_closed:
            return
        self._hand_over()
        self._is_closed = True
        self._chunks.put(None)
        await asyncio.to_thread(self._thread.join, CLOSE_S)
        if self._thread.is_alive():
            _log.warning("%s: %s did not take the rest in time", self._name, self._place)

    def _backlog_bytes(self) -> int:
        return len(self._pending) + self._handed_bytes - self._settled_bytes

    def _hand_over(self) -> None:
        if self._pending and not self._is_closed:
            chunk = _Chunk(self._pending_records, bytes(self._pending), self._header_above)
            self._header_above = self._header
            self._handed_bytes += len(chunk.lines)
            self._pending.clear()
            self._pending_records = 0
            self._chunks.put(chunk)

    # In the thread.

    def _write_all(self) -> None:
        while (chunk := self._chunks.get()) is not None:
            self._begin_with(chunk.header)
            if self._has_written(chunk.lines):
                self._written += chunk.records
            else:
                self._dropped_there += chunk.records
            self._settled_bytes += len(chunk.lines)
        self._sink.close()

    def _has_written(self, lines: bytes) -> bool:
        """Write ``lines``; False where that is not possible, or was not a moment ago."""
        now_s = self._clock()
        if self._retry_at_s is not None and now_s < self._retry_at_s:
            return False
        try:
            self._sink.write(lines)
        except Exception as error:  # noqa: BLE001 - else the thread, and with it the log, would end
            if self._retry_at_s is None:
                told = getattr(error, "strerror", None) or error
                _log.warning(
                    "%s: cannot write %s: %s; it is dropped", self._name, self._place, told
                )
            self._retry_at_s = now_s + RETRY_S
            return False
        if self._retry_at_s is not None:
            self._retry_at_s = None
            _log.info("%s: %s can be written again", self._name, self._place)
        return True
