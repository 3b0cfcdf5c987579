"""Reads the event batches of one engine over ZMQ, in order and complete, or says that it cannot.

A SUB socket brings live batches, a replay socket brings back those that were missed. While a replay
runs, live batches wait in a queue, so that nothing overtakes an older one. When the order cannot be
restored the consumer gets a ``Reset`` first: what it knows is void, and the batches that follow
rebuild it. A lost connection is treated as a possible restart, because a new process may have
counted past the old one's sequence by the time the socket is back.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
from contextlib import suppress
from typing import TYPE_CHECKING, Final

import zmq
import zmq.asyncio
from msgspec import Struct
from zmq.utils.monitor import parse_monitor_message

from sidecar.event import MAX_PAYLOAD_BYTES
from sidecar.sequence import (
    END_SEQUENCE,
    SEQUENCE_BYTES,
    Batch,
    SequenceFence,
    Step,
    parse_frames,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

QUEUED_BATCHES: Final = 100_000
MAX_REPLAY_BATCHES: Final = 200_000
MAX_REPLAY_S: Final = 30.0
_READ_AT_ONCE: Final = 32
"""Messages, some 20 us each."""


class EventSource(Struct, frozen=True, kw_only=True):
    """Where an engine publishes; ``tcp://host:port`` or ``ipc://path``."""

    events: str
    replay: str | None = None


class ResetReason(enum.StrEnum):
    """Why everything known of the engine's pages is void."""

    CONNECTED = "connected"
    RESTARTED = "restarted"
    LOST = "lost"
    REQUESTED = "requested"


class Reset(Struct, frozen=True):
    """Start from nothing; ``is_complete`` tells whether the batches since 0 follow."""

    reason: ResetReason
    is_complete: bool


class _Link(enum.Enum):
    DOWN = "down"
    UP = "up"
    RESYNC = "resync"


class _Replay(Struct, frozen=True):
    batches: tuple[Batch, ...] = ()
    is_ended: bool = False


class EventSubscriber:
    """One engine's batches; iterate ``deliveries`` once, in one task."""

    def __init__(
        self,
        source: EventSource,
        *,
        replay_timeout_s: float = 2.0,
        connect_timeout_s: float = 1.0,
        probe_interval_s: float = 5.0,
        on_loss: Callable[[], None] = lambda: None,
    ) -> None:
        self._source = source
        self._replay_timeout_s = replay_timeout_s
        self._connect_timeout_s = connect_timeout_s
        self._probe_interval_s = probe_interval_s
        self._queue: asyncio.Queue[Batch | _Link] = asyncio.Queue()
        self._fence = SequenceFence()
        self._context: zmq.asyncio.Context | None = None
        self._is_connected = asyncio.Event()
        self._on_loss = on_loss
        self.is_lost = False
        """The connection was there and is gone: the engine died, moved, or cannot be reached."""
        self.malformed_messages = 0
        self.dropped_batches = 0
        self.gaps = 0
        self.missed_batches = 0
        """Batches that live ones skipped; a replay may have brought them."""

    def resync(self) -> None:
        """Deliver a Reset and everything that the engine can replay; from any task."""
        self._queue.put_nowait(_Link.RESYNC)

    async def deliveries(self) -> AsyncIterator[Reset | Batch]:
        """Yield a Reset first, then batches in order, with further Resets where they break."""
        self._context = zmq.asyncio.Context()
        tasks: list[asyncio.Task[None]] = []
        try:
            socket = self._open(zmq.SUB, self._source.events, connect=False)
            monitor = socket.get_monitor_socket(
                zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
            )
            socket.connect(self._source.events)
            tasks = [
                asyncio.create_task(self._read_live(socket)),
                asyncio.create_task(self._watch_link(monitor)),
            ]
            with suppress(TimeoutError):
                async with asyncio.timeout(self._connect_timeout_s):
                    await self._is_connected.wait()
            async for delivery in self._rebuild(ResetReason.CONNECTED):
                yield delivery
            while True:
                async for delivery in self._next():
                    yield delivery
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._context.destroy(linger=0)

    async def _next(self) -> AsyncIterator[Reset | Batch]:
        try:
            async with asyncio.timeout(self._probe_interval_s):
                item = await self._queue.get()
        except TimeoutError:
            async for delivery in self._probe():
                yield delivery
            return
        match item:
            case _Link.DOWN:
                self._fence.reconnected()
            case _Link.UP:
                async for delivery in self._resume():
                    yield delivery
            case _Link.RESYNC:
                async for delivery in self._rebuild(ResetReason.REQUESTED):
                    yield delivery
            case Batch():
                async for delivery in self._live(item):
                    yield delivery

    async def _live(self, batch: Batch) -> AsyncIterator[Reset | Batch]:
        match self._fence.classify(batch):
            case Step.NEXT:
                yield self._applied(batch)
            case Step.REPEATED:
                return
            case Step.RESTARTED:
                async for delivery in self._rebuild(ResetReason.RESTARTED, batch):
                    yield delivery
            case Step.GAP:
                self.gaps += 1
                async for delivery in self._fill_gap(batch):
                    yield delivery

    async def _fill_gap(self, batch: Batch) -> AsyncIterator[Reset | Batch]:
        expected = self._fence.expected_sequence
        self.missed_batches += batch.sequence - (expected or 0)
        replay = await self._replay(expected or 0)
        missing = replay.batches
        if not (_is_run(missing, expected) and missing[-1].sequence + 1 >= batch.sequence):
            async for delivery in self._rebuild(ResetReason.LOST, batch):
                yield delivery
            return
        for replayed in missing:
            yield self._applied(replayed)
        if missing[-1].sequence < batch.sequence:
            yield self._applied(batch)

    async def _probe(self) -> AsyncIterator[Reset | Batch]:
        """Ask a quiet engine for what a dropped message may have taken from the end."""
        expected = self._fence.expected_sequence
        if expected is None:
            return
        replay = await self._replay(expected)
        if _is_run(replay.batches, expected):
            for replayed in replay.batches:
                yield self._applied(replayed)

    async def _resume(self) -> AsyncIterator[Reset | Batch]:
        """After a lost connection: go on if the engine still has our last batch, else rebuild."""
        self._fence.reconnected()
        last = self._fence.last_applied
        if last is None:
            async for delivery in self._rebuild(ResetReason.CONNECTED):
                yield delivery
            return
        replay = await self._replay(last.sequence)
        is_run = _is_run(replay.batches, last.sequence)
        if not (is_run and self._fence.is_same_life(replay.batches[0])):
            async for delivery in self._rebuild(ResetReason.RESTARTED):
                yield delivery
        else:
            for replayed in replay.batches[1:]:
                yield self._applied(replayed)

    async def _rebuild(
        self, reason: ResetReason, live: Batch | None = None
    ) -> AsyncIterator[Reset | Batch]:
        """Void everything, then deliver all that can be replayed, then ``live`` if newer."""
        self._fence.begin()
        replay = await self._replay(0)
        is_run = _is_run(replay.batches, None)
        batches = list(replay.batches) if is_run else []
        if live is not None:
            self._fence.classify(live)
            if not batches or live.sequence == batches[-1].sequence + 1:
                batches.append(live)
            elif live.sequence > batches[-1].sequence:
                batches = [live]
        is_whole = replay.is_ended and (is_run or not replay.batches)
        is_complete = is_whole and (not batches or batches[0].sequence == 0)
        yield Reset(reason, is_complete)
        for batch in batches:
            yield self._applied(batch)

    def _applied(self, batch: Batch) -> Batch:
        self._fence.applied(batch)
        return batch

    async def _replay(self, start_sequence: int) -> _Replay:
        """Return what the engine replays from ``start_sequence``: nothing if it cannot in time.

        Each request has its own socket, so that a late answer never meets a later question.
        """
        if self._source.replay is None:
            return _Replay()
        batches: list[Batch] = []
        socket = self._open(zmq.DEALER, self._source.replay)
        is_ended = False
        try:
            async with asyncio.timeout(MAX_REPLAY_S):
                await socket.send_multipart([b"", start_sequence.to_bytes(SEQUENCE_BYTES, "big")])
                is_ended = await self._collect(socket, batches)
        except TimeoutError:
            pass  # an incomplete replay is an answer: the caller decides what it is worth
        finally:
            socket.close(linger=0)
        return _Replay(tuple(batches), is_ended)

    async def _collect(self, socket: zmq.asyncio.Socket, batches: list[Batch]) -> bool:
        """Append replayed batches up to the end mark; False when there were too many."""
        while len(batches) < MAX_REPLAY_BATCHES:
            async with asyncio.timeout(self._replay_timeout_s):
                batch = parse_frames(await socket.recv_multipart())
            if batch is None:
                self.malformed_messages += 1
            elif batch.sequence == END_SEQUENCE:
                return True
            else:
                batches.append(batch)
        return False

    async def _read_live(self, socket: zmq.asyncio.Socket) -> None:
        """Empty the socket at once, so that a slow consumer costs our memory and not the engine.

        A message that is there is read without waiting, so the loop gets its turn on purpose.
        """
        for number in itertools.count(1):
            if number % _READ_AT_ONCE == 0:
                await asyncio.sleep(0)
            batch = parse_frames(await socket.recv_multipart())
            if batch is None:
                self.malformed_messages += 1
            elif self._queue.qsize() >= QUEUED_BATCHES:
                self.dropped_batches += 1
            else:
                self._queue.put_nowait(batch)

    async def _watch_link(self, monitor: zmq.asyncio.Socket) -> None:
        was_connected = False
        while True:
            frames = await monitor.recv_multipart()
            event = parse_monitor_message(frames)["event"]
            if event == zmq.EVENT_DISCONNECTED:
                self.is_lost = True
                self._queue.put_nowait(_Link.DOWN)
                self._on_loss()
            elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._is_connected.set()
                self.is_lost = False
                if was_connected:
                    self._queue.put_nowait(_Link.UP)
                was_connected = True

    def _open(self, kind: int, endpoint: str, *, connect: bool = True) -> zmq.asyncio.Socket:
        if self._context is None:
            message = "deliveries() is not running"
            raise RuntimeError(message)
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, QUEUED_BATCHES)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1_000)
        socket.setsockopt(zmq.IPV6, 1 if "[" in endpoint else 0)
        if kind == zmq.SUB:
            socket.setsockopt(zmq.SUBSCRIBE, b"")
            socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        if connect:
            socket.connect(endpoint)
        return socket


def _is_run(batches: tuple[Batch, ...], first_sequence: int | None) -> bool:
    """Tell whether there are batches, without a hole, from ``first_sequence`` on if it is given."""
    if not batches or (first_sequence is not None and batches[0].sequence != first_sequence):
        return False
    return all(batch.sequence == batches[0].sequence + index for index, batch in enumerate(batches))
