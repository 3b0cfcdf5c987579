"""Moves page bytes: between device and host within a step, to disk behind it, from disk and peers.

The pure side (``sidecar.exchange``) decides; here are the buffers, threads and sockets. One writer
task brings copies of demoted pages to disk, in order and with a bounded backlog: what finds no room
there stays in host memory only.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from sidecar.pool import PageId
from sidecar.runner import Load, Save
from sidecar.store import StoreError
from sidecar.tiers import Demotion
from state.model import BlockId

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from sidecar.bandwidth import TransferModel
    from sidecar.cost import MeasuredCosts
    from sidecar.exchange import Exchange
    from sidecar.peer import Peers
    from sidecar.store import DiskStore, HostMemory
    from sidecar.table import BlockTable, Incoming, Moves
    from sidecar.tier import LowerTier
    from sidecar.tiers import SourceName

WRITER: Final = "disk-write"
MOST_WAITING_WRITES: Final = 1024
_WRITES_AT_ONCE: Final = 16
_LOG = logging.getLogger("warmroute.worker")


class MoveCounts:
    """Pages and time of one source since the start."""

    def __init__(self) -> None:
        self.hits = 0
        self.hit_pages = 0
        self.moved_in_pages = 0
        self.moved_out_pages = 0
        self.saved_ms = 0.0
        self.spent_ms = 0.0
        self.dropped = 0


class Write(Struct, frozen=True):
    """A demoted page on its way to the reserved ``slot`` of the disk; ``gone`` made room for it."""

    demotion: Demotion
    slot: PageId
    gone: tuple[BlockId, ...]


class Mover:
    """The bytes behind one cache's exchange."""

    def __init__(
        self,
        exchange: Exchange,
        costs: MeasuredCosts,
        memory: HostMemory | None = None,
        disk: DiskStore | None = None,
        peers: Peers | None = None,
    ) -> None:
        self.counts: Final[dict[SourceName, MoveCounts]] = {
            "host": MoveCounts(),
            "disk": MoveCounts(),
            "peer": MoveCounts(),
        }
        self.on_news: Callable[[], None] | None = None
        """Called when tiers changed outside of a step: somebody should publish that."""
        self._exchange = exchange
        self._costs = costs
        self._memory = memory
        self._disk = disk
        self._peers = peers
        self._waiting: deque[Demotion] = deque()
        self._wake = asyncio.Event()
        self._is_disk_failing = False

    def link(self, source: SourceName) -> TransferModel:
        """Return the latency and rate of fetches from ``source`` as measured so far."""
        return self._costs.link(source)

    def batch(self, moves: Moves) -> tuple[tuple[Save, ...], tuple[Load, ...]]:
        """Return what the runner copies for ``moves``."""
        memory = self._memory
        saves, loads = [], []
        if memory is not None:
            saves = [Save(each.page, memory.slot(each.slot)) for each in moves.demotions]
        for each in moves.arrivals:
            content = each.content
            if each.slot is not None and memory is not None:
                loads.append(Load(each.page, memory.slot(each.slot)))
            elif content is not None:
                loads.append(Load(each.page, content))
        return tuple(saves), tuple(loads)

    def finish(self, moves: Moves, save_s: float, load_s: float) -> None:
        """Account for moves that a step ran, and start to write demoted pages to disk."""
        host = self.counts["host"]
        host.moved_in_pages += len(moves.demotions)
        host.spent_ms += 1e3 * save_s
        for each in moves.arrivals:
            counts = self.counts[each.source]
            counts.hits += each.is_first
            counts.hit_pages += 1
            counts.moved_out_pages += 1
            counts.saved_ms += self._exchange.tiers.saved_ms(each.depth, 1)
            counts.spent_ms += 1e3 * load_s / len(moves.arrivals)
        if self._disk is None or not moves.demotions:
            return
        for demotion in moves.demotions:
            if len(self._waiting) < MOST_WAITING_WRITES:
                self._waiting.append(demotion)
            else:
                self.counts["disk"].dropped += 1
        self._wake.set()

    def may_ask(self, source: str | None) -> bool:
        """Return whether pages may be fetched from the worker at ``source``."""
        return source is not None and self._peers is not None and self._peers.is_allowed(source)

    async def fetch(self, table: BlockTable, source: str | None) -> list[bytes | None]:
        """Return the content for ``table.incoming``, in order; None from the first that fails on.

        Pages from the host have no content here: the runner reads their slots.
        """
        incoming = list(table.incoming)
        contents: list[bytes | None] = [None] * len(incoming)
        from_disk = [index for index, each in enumerate(incoming) if each.source == "disk"]
        from_peer = [index for index, each in enumerate(incoming) if each.source == "peer"]
        if from_disk:
            read = await self._read([incoming[index] for index in from_disk])
            for index, content in zip(from_disk, read, strict=True):
                contents[index] = content
        if from_peer and source is not None and self._peers is not None:
            first_page = table.indexed_pages + from_peer[0]
            patience_s = self._exchange.tiers.patience_s(first_page, len(from_peer))
            keys = [incoming[index].key for index in from_peer]
            await self._from_peer(source, keys, contents, from_peer[0], patience_s)
        return contents

    async def write_behind(self) -> None:
        """Write demoted pages to disk, and remove forgotten ones, until cancelled."""
        while True:
            while not self._waiting and not self._exchange.forgotten:
                self._wake.clear()
                await self._wake.wait()
            await self._remove_forgotten()
            count = min(_WRITES_AT_ONCE, len(self._waiting))
            await self._write([self._waiting.popleft() for _ in range(count)])

    def forget(self) -> None:
        """Note that the cache was reset: what waits is not to be written."""
        self._waiting.clear()
        self._wake.set()

    async def read_for_peer(self, keys: Sequence[BlockId], holder: str) -> list[bytes]:
        """Return the content of the leading ``keys`` that host and disk hold."""
        contents: list[bytes] = []
        for key in keys:
            content = await self._read_one(key, holder)
            if content is None:
                break
            contents.append(content)
        return contents

    async def _read_one(self, key: BlockId, holder: str) -> bytes | None:
        host, tier = self._exchange.tiers.host, self._exchange.tiers.disk
        is_in_host = host is not None and key in host and self._exchange.is_settled(key)
        if is_in_host and host is not None and self._memory is not None:
            (slot,) = slots = host.lease([key], holder)
            try:
                return bytes(self._memory.slot(slot))
            finally:
                host.give_back(slots, holder)
        if tier is None or self._disk is None or key not in tier:
            return None
        slots = tier.lease([key], holder)
        try:
            return await asyncio.to_thread(self._disk.read, key)
        finally:
            tier.give_back(slots, holder)

    async def _read(self, incoming: Sequence[Incoming]) -> list[bytes | None]:
        disk, tier = self._disk, self._exchange.tiers.disk
        if disk is None or tier is None:
            return [None] * len(incoming)
        keys = [each.key for each in incoming]
        began_s = time.perf_counter()
        contents = await asyncio.to_thread(lambda: [disk.read(key) for key in keys])
        took_s = time.perf_counter() - began_s
        for key in keys:
            disk.touch(key)
        found = sum(content is not None for content in contents)
        counts = self.counts["disk"]
        counts.spent_ms += 1e3 * took_s
        if found:
            self._costs.observe_fetch("disk", found, took_s)
        lost = [key for key, content in zip(keys, contents, strict=True) if content is None]
        self._exchange.note_dropped("disk", tier.drop(lost))
        self._exchange.forgotten += lost
        self._wake.set()
        return contents

    async def _from_peer(
        self,
        source: str,
        keys: Sequence[BlockId],
        contents: list[bytes | None],
        first: int,
        patience_s: float | None,
    ) -> None:
        """Put into ``contents`` from ``first`` on what the worker at ``source`` has of ``keys``."""
        assert self._peers is not None  # noqa: S101 - the caller checked

        def take(index: int, content: bytes) -> None:
            contents[first + index] = content

        began_s = time.perf_counter()
        pages = await self._peers.fetch(source, keys, take, patience_s)
        took_s = time.perf_counter() - began_s
        counts = self.counts["peer"]
        counts.spent_ms += 1e3 * took_s
        if pages:
            self._costs.observe_fetch("peer", pages, took_s)

    async def _remove_forgotten(self) -> None:
        keys, self._exchange.forgotten = self._exchange.forgotten, []
        disk = self._disk
        if disk is not None and keys:
            await asyncio.to_thread(_removed, disk, keys)

    async def _write(self, demotions: Sequence[Demotion]) -> None:
        """Write what of ``demotions`` is still in the host and not on disk, in one thread hop."""
        exchange, disk, memory = self._exchange, self._disk, self._memory
        host, tier = exchange.tiers.host, exchange.tiers.disk
        if disk is None or memory is None or host is None or tier is None:
            return
        writes = self._planned(demotions, tier)
        if not writes:
            return
        contents = [memory.slot(each.demotion.slot) for each in writes]
        clears, counts, began_s = exchange.clears, self.counts["disk"], time.perf_counter()
        leased = host.lease([each.demotion.key for each in writes], WRITER)
        are_kept = [False] * len(writes)
        try:
            faults = await asyncio.to_thread(_written, disk, writes, contents)
            are_kept = [fault is None for fault in faults]
            self._tell(faults)
        finally:
            host.give_back(leased, WRITER)
            counts.spent_ms += 1e3 * (time.perf_counter() - began_s)
            for each, is_kept in zip(writes, are_kept, strict=True):
                self._settle(each, tier, is_kept=is_kept, is_reset=exchange.clears != clears)
            if self.on_news is not None:
                self.on_news()

    def _tell(self, faults: Sequence[StoreError | None]) -> None:
        """Log that the disk began to fail, or works again: once each, however many pages it is."""
        for fault in faults:
            if fault is not None and not self._is_disk_failing:
                _LOG.error("a page is not kept on disk: %s; the worker goes on", fault)
            elif fault is None and self._is_disk_failing:
                _LOG.warning("pages are kept on disk again")
            self._is_disk_failing = fault is not None

    def _planned(self, demotions: Sequence[Demotion], tier: LowerTier) -> list[Write]:
        """Reserve slots for those of ``demotions`` that are to be written."""
        writes: dict[BlockId, Write] = {}
        for demotion in demotions:
            key = demotion.key
            if key in tier or key in writes:
                continue
            is_there = self._exchange.is_current(demotion) and self._exchange.is_settled(key)
            put = tier.reserve(WRITER, demotion.facts.tenant) if is_there else None
            if put is None:  # the host gave it up first, or all slots are in use
                self.counts["disk"].dropped += 1
                continue
            self._exchange.note_dropped("disk", put.dropped)
            writes[key] = Write(demotion, put.slot, tuple(each.key for each in put.dropped))
        return list(writes.values())

    def _settle(self, write: Write, tier: LowerTier, *, is_kept: bool, is_reset: bool) -> None:
        """Note how ``write`` ended."""
        key, facts = write.demotion.key, write.demotion.facts
        counts = self.counts["disk"]
        counts.moved_in_pages += is_kept
        counts.dropped += not is_kept
        if is_kept and not is_reset:
            tier.commit(write.slot, key, facts, WRITER)
            self._exchange.note_stored("disk", key, facts)
            return
        tier.abandon(write.slot, WRITER)
        if is_kept:
            self._exchange.forgotten.append(key)


def _removed(disk: DiskStore, keys: Sequence[BlockId]) -> None:
    for key in keys:
        disk.remove(key)


def _written(
    disk: DiskStore, writes: Sequence[Write], contents: Sequence[memoryview]
) -> list[StoreError | None]:
    """Write pages, and remove those that make room; return why each is not kept. Blocking."""
    faults: list[StoreError | None] = []
    for each, content in zip(writes, contents, strict=True):
        for key in each.gone:
            disk.remove(key)
        try:
            disk.write(each.demotion.key, content)
        except StoreError as error:
            faults.append(error)
        else:
            faults.append(None)
    return faults
