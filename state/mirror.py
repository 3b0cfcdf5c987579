"""A router's in-process copy of the shared state: reads are local, all I/O is in the background.

Four loops keep it: the registry is polled, replicas new to it are snapshot, change streams are
tailed on a connection of their own, and leases are exchanged with the other routers. A slow, frozen
or absent server costs a caller nothing: the copy ages, and says so. The registry loop is the first
to try again after a failure, with full-jitter backoff; the others wait until it gets through.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Self

from redis.exceptions import ReadOnlyError, ResponseError

from state.address import redact
from state.client import (
    STORE_ERRORS,
    blocking_client,
    command_client,
    describe,
    refuses_writes,
)
from state.facts import FactsBoard
from state.fault import FaultBook
from state.figures import MirrorFigures, MirrorHolding
from state.lease_exchange import LeaseExchange
from state.mirror_sync import Follower, stream_heads
from state.model import ReplicaId, Rung
from state.native import load, table_maker
from state.registry import Registry
from state.registry_reader import RegistryReader
from state.residency import HOLDER_BYTES, Residency
from state.rhythm import Backoff, Beat, Signal, check_cancelled
from state.rung import Ladder
from state.seal_guard import SealGuard
from state.timing import MirrorTiming, StoreTiming

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from random import Random

    from state.client import Client, RedisSettings
    from state.model import (
        BlockId,
        Generation,
        LeaseTotals,
        Overlap,
        ReplicaState,
        RouterId,
    )
    from state.registry import Row

_log = logging.getLogger(__name__)

_NO_ANSWER = "no answer"
_LIVE: Final = Rung.LIVE
"""By a name of its own: an enumeration's members are slow to reach."""
_SWEEP_BLOCKS = 4096


class Mirror:
    """``FleetReader`` on Redis: ``async with Mirror(...) as mirror``. No read waits.

    Without an index it keeps replicas, loads and leases only.
    """

    def __init__(
        self,
        settings: RedisSettings,
        router: RouterId,
        *,
        clock: Callable[[], float],
        rng: Random,
        timing: MirrorTiming = MirrorTiming(),  # noqa: B008 - a frozen value
        store_timing: StoreTiming = StoreTiming(),  # noqa: B008 - a frozen value
        has_index: bool = True,
    ) -> None:
        self.guard = guard = settings.guard or SealGuard()
        self._has_index = has_index
        self._settings = settings
        self._router = router
        self._clock = clock
        self._rng = rng
        self._timing = timing
        self._residency = Residency(make_table=table_maker(load()))
        lives = {"load_ttl_s": store_timing.load_ttl_s, "record_ttl_s": store_timing.record_ttl_s}
        self._registry = Registry(grace_s=timing.grace_s, guard=guard, **lives)
        self._reader = RegistryReader(min(lives.values()))
        self._follower = Follower(
            self._residency, self._on_registered, self._on_deregistered, guard
        )
        self._leases = LeaseExchange(router, clock, store_timing.lease_ttl_s, guard)
        self.facts = FactsBoard(guard)
        self._registry_beat, self._snapshot_beat = Beat(), Beat()
        self._tail_beat, self._lease_beat = Beat(), Beat()
        self._progress = Signal()
        self._is_up = asyncio.Event()
        self._has_missed_round = False
        self._started_s = clock()
        self._registry_ok_s: float | None = None
        self._tail_ok_s: float | None = None
        self._refused_s: float | None = None
        self._ladder = Ladder(timing)
        self._last_error = _NO_ANSWER
        self._faults = FaultBook(settings.url, _log)
        self.failures = 0
        self.read_first: Callable[[Client], Awaitable[None]] | None = None
        """Read before anything else of each round: the view is live only after it."""
        self.server_check: Callable[[Client], Awaitable[None]] | None = None
        """Looks at servers that are new to it, in each round."""
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._client: Client = command_client(self._settings)
        self._tail_client: Client = blocking_client(self._settings, self._timing.longest_block_s)
        loops = {
            "registry": self._poll_registry,
            "snapshot": self._take_snapshots,
            "tail": self._tail_streams,
            "lease": self._exchange_leases,
            "facts": lambda: self.facts.follow(self._client, self.replicas()),
        }
        self._tasks = [
            asyncio.create_task(self._supervise(name, loop), name=f"mirror-{name}")
            for name, loop in loops.items()
        ]
        self._tasks.append(asyncio.create_task(self._watch_rung(), name="mirror-rung"))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            if self._is_up.is_set():
                await self._leases.withdraw(self._client)
        except STORE_ERRORS:
            _log.info("leases of %s are left to expire", self._router)
        finally:
            await self._tail_client.aclose()
            await self._client.aclose()

    def replicas(self) -> Mapping[ReplicaId, ReplicaState]:
        """Return the registered replicas; the mapping is a snapshot and does not change."""
        return self._registry.view()

    def overlap(self, chain: Sequence[BlockId]) -> Mapping[ReplicaId, Overlap]:
        """Return the leading resident run of ``chain`` per replica; absent means none."""
        if self._ladder.is_outdated:
            return {}
        return self._residency.overlap(chain)

    def publish_leases(self, totals: Mapping[ReplicaId, LeaseTotals]) -> None:
        """Set this router's own leases; they reach the other routers in the background."""
        self._leases.publish(totals)
        if self._leases.is_alone:  # whoever comes next shall not see what ended before
            self._lease_beat.nudge()

    def foreign_leases(self) -> Mapping[ReplicaId, LeaseTotals]:
        """Return the sums of all other live routers; nothing without news for a lease's life."""
        return self._leases.foreign()

    @property
    def routers(self) -> int:
        """Live routers, with this one; as of the last that was heard while the store is away."""
        return self._leases.routers

    @property
    def rank(self) -> int:
        """How many of the live routers come before this one, by name: from 0 to routers - 1."""
        return self._leases.rank

    def freshness(self) -> tuple[Rung, float]:
        """Return the rung and the age of the view in seconds; before the first, since the start.

        A move to another rung is logged: one line each, however many commands failed.
        """
        now_s = self._clock()
        age_s = None
        if self._registry_ok_s is not None and self._tail_ok_s is not None:
            age_s = now_s - min(self._registry_ok_s, self._tail_ok_s)
            if self._refused_s is not None:  # nothing new can be announced
                age_s = max(age_s, now_s - self._refused_s)
            ladder = self._ladder
            if ladder.rung is _LIVE and age_s < ladder.live_below_s:  # as for nearly every request
                return _LIVE, age_s
        has_moved = self._ladder.observe(age_s, now_s)
        rung, shown_s = self._ladder.rung, now_s - self._started_s if age_s is None else age_s
        if has_moved:
            level = logging.INFO if rung is Rung.LIVE else logging.WARNING
            reason = "" if rung is Rung.LIVE else f": {self._last_error}"
            where = redact(self._settings.url)
            _log.log(level, "state at %s is %s, age %.1f s%s", where, rung.value, shown_s, reason)
            if rung is Rung.LIVE:  # the next outage has a reason of its own
                self._last_error = _NO_ANSWER
                self._faults.forget()
        return rung, shown_s

    def limit_memory(self, max_bytes: int) -> None:
        """Bound what the index of blocks may take of this process, see ``Residency``."""
        self._residency.max_bytes = max_bytes

    async def settle(self, timeout_s: float) -> bool:
        """Wait until every change stored before the call is visible; False when it is not."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._registry_beat.full_round()
                heads = await stream_heads(self._client, list(self.replicas()))
                await self._progress.until(lambda: self._has_reached(heads))
                await self._lease_beat.full_round()
                await self._registry_beat.full_round()
                await self._progress.until(lambda: self._has_reached(heads))
        except STORE_ERRORS:  # TimeoutError is one of them
            return False
        return True

    def gpu_blocks(self, replica: ReplicaId) -> int | None:
        """Return how many blocks ``replica`` holds in GPU memory; None without an index."""
        return self._residency.gpu_blocks(replica) if self._has_index else None

    def holdings(self) -> dict[ReplicaId, MirrorHolding]:
        """Return what is mirrored per replica."""
        counts = {replica: self._residency.resident(replica) for replica in self.replicas()}
        block_bytes = self._residency.entry_bytes + HOLDER_BYTES
        return {
            replica: MirrorHolding(blocks=blocks, bytes_estimate=blocks * block_bytes)
            for replica, blocks in counts.items()
        }

    @property
    def registry_version(self) -> int:
        """Grows with every change of a record (not of a load)."""
        return self._registry.version

    @property
    def snapshots(self) -> int:
        """Snapshots begun so far."""
        return self._follower.snapshots

    @property
    def malformed_values(self) -> int:
        """Values of the store that were ignored because they did not decode."""
        parts = (self._registry, self._reader, self._follower, self._leases, self.facts)
        return sum(part.malformed_values for part in parts)

    def clears(self) -> Mapping[ReplicaId, int]:
        """Return how often each replica's cache was cleared within its present life."""
        return self._follower.clears

    def figures(self) -> MirrorFigures:
        """Return what an operator watches of the mirror itself."""
        return MirrorFigures(
            rungs_entered=dict(self._ladder.entered),
            snapshots=self._follower.snapshots,
            evicted_blocks=self._residency.evicted_blocks,
            index_bytes=self._residency.memory_bytes,
            faults=dict(self._faults.counts),
        )

    async def _supervise(self, name: str, one_round: Callable[[], Awaitable[None]]) -> None:
        """Repeat a loop's rounds for ever; only the registry loop goes first after a failure."""
        backoff = Backoff(self._timing.backoff_base_s, self._timing.backoff_cap_s, self._rng)
        last_fault = ""
        while True:
            check_cancelled()
            if name != "registry":
                await self._is_up.wait()
            try:
                await one_round()
            except STORE_ERRORS as error:
                self._note_failure(error)
                if isinstance(error, ReadOnlyError):
                    await self._redial()
            except Exception as error:  # noqa: BLE001 - a fault of ours must not end the mirror
                if repr(error) != last_fault:
                    _log.exception("mirror loop %s failed", name)
                last_fault = repr(error)
                self._note_failure(error)
            else:
                backoff.reset()
                continue
            await asyncio.sleep(backoff.next_s())

    async def _redial(self) -> None:
        """Leave a server that became a replica: its address may lead to another one by now."""
        with suppress(*STORE_ERRORS):
            await self._client.aclose()
            await self._tail_client.aclose()

    def _note_failure(self, error: Exception) -> None:
        self.failures += 1
        self._faults.note(error)
        is_refusal = refuses_writes(error)
        if is_refusal or self._refused_s is None:
            self._last_error = describe(error)
        if is_refusal and self._refused_s is None:
            self._refused_s = self._clock()
        self._is_up.clear()
        if not isinstance(error, ResponseError):  # it was at least answered
            self._ladder.note_failure()
        self._registry.expire_loads(self._clock())
        self.freshness()

    async def _watch_rung(self) -> None:
        """Note the view's age also while every loop waits for the server."""
        while True:
            await asyncio.sleep(self._timing.registry_interval_s)
            if self.freshness()[0] is not Rung.LIVE:
                self._registry.expire_loads(self._clock())

    async def _poll_registry(self) -> None:
        self._registry_beat.begin()
        try:
            rows = await self._read_registry()
        except BaseException:
            self._has_missed_round = True
            self._reader.reset()
            raise
        now_s = self._clock()
        last_s = self._registry_ok_s
        if self._refused_s is not None:  # nor are heartbeats taken
            self._registry.doubt_all(now_s, anew=True)
        elif self._has_missed_round or (last_s and now_s - last_s > self._timing.stale_after_s):
            self._registry.doubt_all(now_s)
        self._has_missed_round = False
        self._registry.observe(rows, now_s)
        states = self._registry.view()
        followed = states if self._has_index else {}
        self._follower.expect({name: states[name].record.generation for name in followed})
        self._snapshot_beat.nudge()
        self._residency.sweep(_SWEEP_BLOCKS)
        self._registry_ok_s = now_s
        self._is_up.set()
        self._registry_beat.end()
        self._progress.send()
        self.freshness()
        await self._registry_beat.rest(self._timing.registry_interval_s)

    async def _read_registry(self) -> Mapping[ReplicaId, Row]:
        if self.read_first is not None:
            await self.read_first(self._client)
        rows = await self._reader.read(self._client)
        if self.server_check is not None:
            await self.server_check(self._client)
        return rows

    async def _take_snapshots(self) -> None:
        for follow in self._follower.unsynced():
            await self._follower.snapshot(self._client, follow)
            self._progress.send()
        await self._snapshot_beat.rest(self._timing.registry_interval_s)

    async def _tail_streams(self) -> None:
        follows = self._follower.tailed()
        if not follows:
            self._tail_ok_s = self._clock()
            await self._tail_beat.rest(self._timing.block_s)
            return
        is_short = not self._follower.are_all(follows)  # who comes next is to be named soon
        block_s = self._timing.block_s if is_short else self._timing.longest_block_s
        news = await self._follower.next_entries(self._tail_client, follows, block_s)
        self._tail_ok_s = self._clock()
        for follow, rows in news:
            await self._follower.apply(follow, rows)
            if not follow.is_synced:
                self._snapshot_beat.nudge()
        self._progress.send()

    async def _exchange_leases(self) -> None:
        self._lease_beat.begin()
        await self._leases.exchange(self._client, self._timing.lease_heartbeat_s)
        self._refused_s = None
        self._lease_beat.end()
        timing = self._timing
        is_alone = self._leases.is_alone
        await self._lease_beat.rest(timing.lease_alone_s if is_alone else timing.lease_interval_s)

    def _has_reached(self, heads: Mapping[ReplicaId, bytes]) -> bool:
        for replica, head in heads.items() if self._has_index else ():
            generation = self._registry.generation(replica)
            if generation and not self._follower.has_reached(replica, generation, head):
                return False
        return True

    def _on_registered(self, replica: ReplicaId) -> None:
        self._reader.doubt(replica)
        self._registry_beat.nudge()

    def _on_deregistered(self, replica: ReplicaId, generation: Generation) -> None:
        self._registry.drop(replica, generation, self._clock())
        self._reader.doubt(replica)
        self._registry_beat.nudge()
