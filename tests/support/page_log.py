"""What an engine told of its pages and when, read from its events by the test itself.

Times are seconds since the epoch, by the engine's own stamp on each batch; the router's decision
records have the same clock. This reading shares nothing with the sidecar's.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from bisect import bisect_right
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import zmq
import zmq.asyncio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

END_SEQUENCE = 2**64 - 1
IDLE_MS = 200
REPLAY_MS = 1000
REPLAY_TRIES = 20

Page = tuple[int, ...]
"""Its token ids."""


@dataclass(slots=True)
class _Copies:
    """How many copies of a page there are, from each time on; a page may be stored twice."""

    times_s: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def add(self, told_s: float, change: int) -> None:
        self.times_s.append(told_s)
        self.counts.append(max(0, (self.counts[-1] if self.counts else 0) + change))

    def clear(self, told_s: float) -> None:
        if self.counts and self.counts[-1]:
            self.add(told_s, -self.counts[-1])

    def at(self, moment_s: float) -> int:
        index = bisect_right(self.times_s, moment_s)
        return self.counts[index - 1] if index else 0

    def turns(self) -> Iterator[tuple[float, bool]]:
        """Yield when the page came (True) or was gone (False)."""
        held = False
        for told_s, count in zip(self.times_s, self.counts, strict=True):
            if (count > 0) != held:
                held = count > 0
                yield told_s, held


@dataclass(slots=True, repr=False)
class PageLog:
    """One engine's pages over all its lives.

    ``evictions`` are the times at which a page was removed, one for each copy; ``clears`` those of
    resets, as the engine told of them; ``lives`` counts the engine's processes, ``batches`` what
    all of them told; ``opaque`` are the names of pages that an image is in, or before.
    """

    evictions: list[float] = field(default_factory=list)
    clears: list[float] = field(default_factory=list)
    lives: int = 0
    batches: int = 0
    opaque: set[object] = field(default_factory=set)
    _names: dict[tuple[object, Page], object] = field(default_factory=dict)
    _copies: defaultdict[object, _Copies] = field(default_factory=lambda: defaultdict(_Copies))
    _next: int | None = None
    is_dead: bool = False

    def missed_before(self, sequence: int) -> range:
        """Return the batches that come before ``sequence`` and were not taken."""
        is_new_life = self.is_dead or self._next is None or sequence < self._next
        return range(0 if is_new_life else self._next or 0, sequence)

    def feed(self, sequence: int, payload: bytes) -> None:
        """Take one batch."""
        if self.is_dead or self._next is None or sequence < self._next:
            assert sequence == 0, f"batches 0 to {sequence} are lost"
            self.lives += 1
            self.is_dead = False
        else:
            assert sequence == self._next, f"batches {self._next} to {sequence} are lost"
        self._next = sequence + 1
        self.batches += 1
        told_s, events, *_ = msgspec.msgpack.decode(payload)
        for event in events:
            self._apply(told_s, event)

    def _apply(self, told_s: float, event: dict[str, Any]) -> None:
        if event["type"] == "BlockStored":
            size, parent = event["block_size"], event["parent_block_hash"]
            if parent is None:
                parent = _salt_of(event)
            for index, name in enumerate(event["block_hashes"]):
                page = tuple(event["token_ids"][index * size : (index + 1) * size])
                self._names[parent, page] = name
                self._copies[name].add(told_s, 1)
                if parent in self.opaque or _has_image(event, index):
                    self.opaque.add(name)
                parent = name
        elif event["type"] == "BlockRemoved":
            for name in event["block_hashes"]:
                self._copies[name].add(told_s, -1)
                self.evictions.append(told_s)
        elif event["type"] == "AllBlocksCleared":
            self.clears.append(told_s)
            self._clear(told_s)

    def _clear(self, told_s: float) -> None:
        for copies in self._copies.values():
            copies.clear(told_s)

    def forget(self) -> None:
        """Note that the engine is dead: now it holds nothing, and its next life counts from 0."""
        self.is_dead = True
        self._clear(time.time())

    @property
    def held_pages(self) -> int:
        """How many distinct pages the engine holds now."""
        return sum(1 for _ in self._held())

    @property
    def held_text_pages(self) -> int:
        """The same of pages that no image is in, or before."""
        return sum(1 for name in self._held() if name not in self.opaque)

    def _held(self) -> Iterator[object]:
        for name, copies in self._copies.items():
            if copies.counts and copies.counts[-1]:
                yield name

    def run_at(self, pages: Sequence[Page], moment_s: float, salt: str | None = None) -> int:
        """Return how many leading ``pages`` the engine held, as far as it had told."""
        for index, copies in enumerate(self._walk(pages, salt)):
            if copies is None or not copies.at(moment_s):
                return index
        return len(pages)

    def history(self, pages: Sequence[Page], salt: str | None = None) -> list[tuple[float, bool]]:
        """Return when the last of ``pages`` came (True) or was gone (False), in order of time."""
        *_, last = self._walk(pages, salt)
        return [] if last is None else list(last.turns())

    def _walk(self, pages: Sequence[Page], salt: str | None) -> Iterator[_Copies | None]:
        parent: object = salt
        for page in pages:
            parent = self._names.get((parent, page))
            if parent is None:
                yield None
                return
            yield self._copies[parent]


def _salt_of(event: dict[str, Any]) -> str | None:
    """Return what keeps the first page of a prompt apart from others with the same tokens."""
    [*extra] = (event.get("extra_keys") or [None])[0] or ()
    return next((key for key in extra if isinstance(key, str)), None)


def _has_image(event: dict[str, Any], index: int) -> bool:
    keys = (event.get("extra_keys") or [])[index : index + 1]
    return any(isinstance(key, list) for key in (keys[0] if keys else None) or ())


async def replayed(context: zmq.asyncio.Context, port: int, start: int) -> dict[int, bytes]:
    """Return the batches from ``start`` on that an engine kept; none if it does not answer."""
    batches: dict[int, bytes] = {}
    with context.socket(zmq.DEALER) as socket:
        socket.connect(f"tcp://127.0.0.1:{port}")
        await socket.send_multipart([b"", start.to_bytes(8, "big")])
        while await socket.poll(REPLAY_MS):
            *_, number, payload = await socket.recv_multipart()
            if int.from_bytes(number, "big") == END_SEQUENCE:
                break
            batches[int.from_bytes(number, "big")] = payload
    return batches


async def _kept(context: zmq.asyncio.Context, port: int, missed: range) -> dict[int, bytes]:
    """Return the ``missed`` batches; a busy engine answers late, so it is asked again."""
    kept: dict[int, bytes] = {}
    for _ in range(REPLAY_TRIES):
        kept = await replayed(context, port, missed.start)
        if all(number in kept for number in missed):
            break
    return kept


@contextlib.asynccontextmanager
async def following(events_port: int, replay_port: int) -> AsyncIterator[PageLog]:
    """Read the events of the engine that publishes there, over all its restarts.

    What a new life told before this subscriber was back is asked for again.
    """
    log = PageLog()
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.SUB)
    socket.set_hwm(0)
    socket.subscribe(b"")
    socket.connect(f"tcp://127.0.0.1:{events_port}")

    async def read() -> None:
        asked_to = 0
        is_live = False
        while True:
            is_live = is_live and not log.is_dead
            if not await socket.poll(IDLE_MS):
                if not is_live:  # not connected to the new life yet
                    start = 0 if log.is_dead else asked_to
                    for number, payload in (await replayed(context, replay_port, start)).items():
                        log.feed(number, payload)
                        asked_to = number + 1
                continue
            is_live = True
            _, sequence, payload = await socket.recv_multipart()
            number = int.from_bytes(sequence, "big")
            if not log.is_dead and number < asked_to:
                continue  # a replay brought it already
            missed = log.missed_before(number)
            if missed:
                kept = await _kept(context, replay_port, missed)
                for each in missed:
                    log.feed(each, kept[each])
            log.feed(number, payload)
            asked_to = number + 1 if missed else asked_to

    reading = asyncio.create_task(read())
    try:
        yield log
    finally:
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading
        context.destroy(linger=0)
