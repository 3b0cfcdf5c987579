"""Writes one replica's registration, heartbeats and residency to the shared state, in order.

One task does all the writing. Residency is announced within a generation, and a generation is only
as good as its writes: after any failed one, everything that the folder holds is announced again
under a new generation, once the state store answers. Routers thus never see a mixture.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import TYPE_CHECKING, Final

from msgspec import structs

from sidecar.backlog import Backlog
from sidecar.facts import FactPace
from sidecar.renewal import Renewal
from state.model import ChangeBatch, Fence, Generation, Tier
from state.prefix import namespace_of
from state.rhythm import check_cancelled
from state.store import StateError
from state.timing import StoreTiming

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from random import Random

    from sidecar.change import Fold
    from sidecar.fold import PageFolder
    from state.model import Adapter, BlockId, NamespaceId, ReplicaFacts, ReplicaLoad, ReplicaRecord
    from state.store import ReplicaWriter

CHUNK_BLOCKS: Final = 4_000
BACKOFF_BASE_S: Final = 0.1
BACKOFF_CAP_S: Final = 5.0
_MAX_DOUBLINGS: Final = 16
_LOG = logging.getLogger("warmroute.sidecar")


class FencedError(Exception):
    """Another sidecar registered this replica: this one must stop."""


def new_generation() -> Generation:
    """Return a token that no earlier life of a cache had."""
    return Generation(secrets.token_hex(6))


class Announcer:
    """Holds what to announce; every method but ``run`` and ``finish`` is synchronous."""

    def __init__(
        self,
        writer: ReplicaWriter,
        *,
        clock: Callable[[], float],
        rng: Random,
        heartbeat_interval_s: float = 1.0,
        flush_interval_s: float = 0.01,
        residency_cap_s: float = StoreTiming().residency_cap_s,
        on_registered: Callable[[ReplicaRecord], None] | None = None,
    ) -> None:
        self._writer = writer
        self._clock = clock
        self._rng = rng
        self._heartbeat_interval_s = heartbeat_interval_s
        self._flush_interval_s = flush_interval_s
        self._renewal = Renewal(writer, clock, rng, residency_cap_s)
        self._on_registered = on_registered
        self._wake = asyncio.Event()
        self._withdrawn = asyncio.Event()
        self._target: tuple[ReplicaRecord, PageFolder] | None = None
        self._registered: ReplicaRecord | None = None
        self._attempted: ReplicaRecord | None = None
        self._is_dirty = False
        self._is_draining = False
        self._life = ""
        self._adapters: tuple[Adapter, ...] = ()
        self._pending = Backlog()
        self._sequence = 0
        self._load: ReplicaLoad | None = None
        self._facts = FactPace(clock, heartbeat_interval_s)
        self._heartbeat_due_s = 0.0
        self._flush_due_s = 0.0
        self.failed_writes = 0

    def renew(self, record: ReplicaRecord, folder: PageFolder) -> None:
        """Announce a folder anew; it is one life of the cache where the record names none."""
        before = self._target
        is_same = before is not None and before[1] is folder
        if record.cache_life:
            self._life = record.cache_life
        elif not is_same:
            self._life = secrets.token_hex(6)
        self._target = (record, folder)
        self._make_dirty()

    def add(self, fold: Fold) -> None:
        """Announce what the current folder just did."""
        if self._target is not None and not self._is_dirty and (fold.changes or fold.is_clear):
            if self._pending.add(fold):
                self._wake.set()
            else:
                _LOG.warning("state store is slow: everything will be announced again")
                self._make_dirty()

    def report(self, load: ReplicaLoad | None) -> None:
        """Publish ``load`` with the next heartbeats; None when it is not known."""
        self._load = load

    def tell(self, facts: ReplicaFacts | None) -> None:
        """Publish ``facts`` with the next heartbeat that is to carry some."""
        self._facts.tell(facts)

    def drain(self) -> None:
        """Tell routers at once to send nothing new."""
        self._is_draining = True
        self._heartbeat_due_s = 0.0
        self._wake.set()

    def list_adapters(self, adapters: tuple[Adapter, ...]) -> None:
        """Tell routers at once which adapters the replica has, if they are others than before."""
        if adapters != self._adapters:
            self._adapters = adapters
            self._heartbeat_due_s = 0.0
            self._wake.set()

    def name_life(self, life: str) -> None:
        """Tell routers at once what the life of the cache is called that was announced already."""
        if life and life != self._life:
            self._life = life
            self._heartbeat_due_s = 0.0
            self._wake.set()

    def _as_of_now(self, record: ReplicaRecord) -> ReplicaRecord:
        """Return the record with what may change in one generation."""
        now = (self._is_draining, self._adapters, self._life)
        if (record.is_draining, record.adapters, record.cache_life) == now:
            return record
        return structs.replace(record, is_draining=now[0], adapters=now[1], cache_life=now[2])

    def withdraw(self) -> None:
        """Deregister the replica until the next ``renew``."""
        self._target = None
        self._pending.clear()
        self._withdrawn.clear()
        self._wake.set()

    async def finish(self, timeout_s: float) -> bool:
        """Deregister; False when the state store did not confirm it in time. ``run`` must run."""
        self.withdraw()
        try:
            async with asyncio.timeout(timeout_s):
                await self._withdrawn.wait()
        except TimeoutError:
            return False
        return True

    async def run(self) -> None:
        """Write until cancelled; raises FencedError."""
        failures = 0
        while True:
            check_cancelled()
            try:
                await self._step()
            except StateError as error:
                if not failures:
                    _LOG.warning("state store failed, retrying: %s", error)
                failures = min(failures + 1, _MAX_DOUBLINGS)
                self.failed_writes += 1
                self._make_dirty()
                ceiling_s = min(BACKOFF_CAP_S, BACKOFF_BASE_S * 2**failures)
                await asyncio.sleep(self._rng.uniform(0.0, ceiling_s))
            else:
                if failures and not self._is_dirty:
                    _LOG.info("state store answers again, everything is announced")
                    failures = 0

    def _make_dirty(self) -> None:
        self._is_dirty = True
        self._pending.clear()
        self._wake.set()

    async def _step(self) -> None:
        """Do the most urgent thing, or wait for one."""
        if self._target is None:
            await self._leave()
        elif self._is_dirty:
            await self._announce_all(self._target)
        elif self._clock() >= self._heartbeat_due_s:
            await self._heartbeat()
        elif self._clock() >= self._renewal.due_s:
            await self._announce_again(self._target[1])
        elif self._pending and self._clock() >= self._flush_due_s:
            await self._flush()
        else:
            idle_until_s = min(self._heartbeat_due_s, self._renewal.due_s)
            due_s = self._flush_due_s if self._pending else idle_until_s
            await self._sleep(due_s - self._clock())

    async def _sleep(self, delay_s: float) -> None:
        """Wait for news, or for a time when news are already there."""
        if self._pending:
            await asyncio.sleep(max(0.0, delay_s))
            return
        self._wake.clear()
        try:
            async with asyncio.timeout(max(0.0, delay_s)):
                await self._wake.wait()
        except TimeoutError:
            return

    async def _leave(self) -> None:
        for record in (self._registered, self._attempted):
            if record is not None:
                await self._writer.deregister(record.replica, record.generation)
        if self._target is None:
            self._registered = self._attempted = None
            self._withdrawn.set()
            self._wake.clear()
            await self._wake.wait()

    async def _announce_all(self, target: tuple[ReplicaRecord, PageFolder]) -> None:
        """Register a new generation, then bring all of the folder's blocks into it.

        A registration that failed may have been stored all the same, so it is repeated with the
        same generation: nothing was announced under it.
        """
        base, folder = target
        await self._check_fence()
        previous = self._attempted
        generation = previous.generation if previous is not None else new_generation()
        record = self._as_of_now(structs.replace(base, generation=generation))
        self._attempted = record
        await self._writer.register(record)
        self._registered, self._attempted = record, None
        if self._target is not target:
            return
        self._is_dirty = False
        self._pending.clear()
        self._sequence = 0
        self._heartbeat_due_s = self._clock()
        self._renewal.plan()
        for batches in self._chunks(self._everything(folder)):
            await self._writer.apply(batches)
            if self._target is None or self._is_dirty:
                return
            if self._clock() >= self._heartbeat_due_s:
                await self._heartbeat()
        _LOG.info("replica registered: replica=%s generation=%s", record.replica, generation)
        if self._on_registered is not None:
            self._on_registered(record)

    async def _announce_again(self, folder: PageFolder) -> None:
        """Renew the life of all blocks in the store; later changes wait for that."""
        record = self._current()
        resident = {key: tuple(blocks) for key, blocks in folder.resident().items() if blocks}
        await self._flush()  # what ``resident`` shows already, before anything later
        if self._is_current(record):
            await self._renewal.renew(record, resident, lambda: self._keep_alive(record))

    async def _keep_alive(self, record: ReplicaRecord) -> bool:
        """Send a heartbeat when one is due; False when ``record`` is void by now."""
        if self._is_current(record) and self._clock() >= self._heartbeat_due_s:
            await self._heartbeat()
        return self._is_current(record)

    def _is_current(self, record: ReplicaRecord) -> bool:
        registered = self._registered
        is_same = registered is not None and registered.generation == record.generation
        return is_same and self._target is not None and not self._is_dirty

    async def _check_fence(self) -> None:
        """Raise FencedError when the registry shows a sidecar that is not this one.

        After a failed registration the registry may hold either of our last two records. Before
        the first that succeeded it may still hold a dead sidecar's: the last to register wins.
        """
        if self._registered is None:
            return
        ours = [record for record in (self._registered, self._attempted) if record is not None]
        for record in ours:
            if await self._writer.heartbeat(record, None) is not Fence.FENCED:
                return
        message = f"another sidecar registered replica {self._registered.replica}"
        raise FencedError(message)

    async def _heartbeat(self) -> None:
        record = self._registered
        if record is None:
            self._make_dirty()
            return
        record = self._registered = self._as_of_now(record)
        self._heartbeat_due_s = self._clock() + self._heartbeat_interval_s
        fence = await self._writer.heartbeat(record, self._load, self._facts.due(record))
        if fence is Fence.FENCED:
            message = f"another sidecar registered replica {record.replica}"
            raise FencedError(message)
        if fence is Fence.UNKNOWN:
            _LOG.warning("state store forgot replica=%s, announcing it again", record.replica)
            self._make_dirty()

    async def _flush(self) -> None:
        folds = self._pending.take()
        self._flush_due_s = self._clock() + self._flush_interval_s
        for batches in self._chunks(self._changes(folds)):
            await self._writer.apply(batches)
            if self._is_dirty:
                return

    def _changes(self, folds: list[Fold]) -> Iterator[ChangeBatch]:
        """Yield the net effect of ``folds``: what came and went among them is not written."""
        is_clear = False
        net: dict[tuple[NamespaceId, Tier], dict[BlockId, bool]] = {}
        for fold in folds:
            if fold.is_clear:
                is_clear, net = True, {}
            for change in fold.changes:
                blocks = net.setdefault((change.namespace, change.tier), {})
                for block in change.removed:
                    if blocks.pop(block, None) is None:
                        blocks[block] = False
                for block in change.stored:
                    if blocks.pop(block, None) is None:
                        blocks[block] = True
        if is_clear:
            yield self._batch(self._current(), is_clear=True)
        for (namespace, tier), blocks in net.items():
            stored = tuple(block for block, is_stored in blocks.items() if is_stored)
            removed = tuple(block for block, is_stored in blocks.items() if not is_stored)
            yield from self._split(namespace, tier, stored, removed)

    def _everything(self, folder: PageFolder) -> Iterator[ChangeBatch]:
        for (namespace, tier), blocks in folder.resident().items():
            yield from self._split(namespace, tier, tuple(blocks), ())

    def _split(
        self,
        namespace: NamespaceId,
        tier: Tier,
        stored: tuple[BlockId, ...],
        removed: tuple[BlockId, ...],
    ) -> Iterator[ChangeBatch]:
        """Yield changes in batches of bounded size; the two lists have no block in common."""
        while removed or stored:
            first_removed = removed[:CHUNK_BLOCKS]
            first_stored = stored[: CHUNK_BLOCKS - len(first_removed)]
            removed, stored = removed[len(first_removed) :], stored[len(first_stored) :]
            yield self._batch(
                self._current(),
                namespace=namespace,
                tier=tier,
                stored=first_stored,
                removed=first_removed,
            )

    def _batch(
        self,
        record: ReplicaRecord,
        *,
        namespace: NamespaceId | None = None,
        tier: Tier = Tier.GPU,
        stored: tuple[BlockId, ...] = (),
        removed: tuple[BlockId, ...] = (),
        is_clear: bool = False,
    ) -> ChangeBatch:
        self._sequence += 1
        return ChangeBatch(
            replica=record.replica,
            generation=record.generation,
            namespace=namespace or namespace_of(record.identity),
            sequence=self._sequence,
            tier=tier,
            stored=stored,
            removed=removed,
            is_clear=is_clear,
        )

    def _current(self) -> ReplicaRecord:
        if self._registered is None:
            message = "nothing is registered"
            raise StateError(message)
        return self._registered

    @staticmethod
    def _chunks(batches: Iterator[ChangeBatch]) -> Iterator[list[ChangeBatch]]:
        """Yield consecutive batches together while they stay within the size of one write."""
        chunk: list[ChangeBatch] = []
        blocks = 0
        for batch in batches:
            more = len(batch.stored) + len(batch.removed)
            if chunk and blocks + more > CHUNK_BLOCKS:
                yield chunk
                chunk, blocks = [], 0
            chunk.append(batch)
            blocks += more
        if chunk:
            yield chunk
