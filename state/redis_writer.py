"""The sidecar's side of the shared state in Redis: registry, heartbeats and residency changes.

The generation is part of every residency key, so a late write of a dead generation lands in a key
that nobody reads: ``apply`` needs no fence. Only the registry entry itself is compared and set by
scripts. Every key gets its time to live in the same transaction or script that may create it.

What one announcement wrote lives until a cap, however often it is extended. Before that the sidecar
writes all of it again, as copies that no reader sees, and swaps them in: at no time is there less.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from redis.exceptions import ReadOnlyError

from state.client import run_command, state_errors
from state.facts import encode_facts
from state.model import Fence
from state.news import News
from state.schema import (
    ENTRY_FIELD,
    INDEX_HORIZON_S,
    REPLICA_INDEX,
    STREAM_CAP_ENTRIES,
    Entry,
    EntryKind,
    ReplicaKeys,
    encode_load,
    encode_record,
    parts_of,
    residency_suffix,
    suffix_tier,
)
from state.script import Script, run_scripts
from state.seal import Kind
from state.stamp import Stamps
from state.timing import StoreTiming

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence
    from random import Random

    from state.client import Argument, Client
    from state.model import (
        ChangeBatch,
        Generation,
        NamespaceId,
        ReplicaFacts,
        ReplicaId,
        ReplicaLoad,
        ReplicaRecord,
        Tier,
    )
    from state.news import Values
    from state.schema import ChangePart
    from state.script import ScriptCall
    from state.seal import Seal

_JITTER: Final = (0.8, 1.2)
_RENEWALS_PER_TTL: Final = 4
COPY_TTL_S: Final = 600.0
"""How long a copy that was never swapped in is kept after its last block came."""


class RedisWriter:
    """``ReplicaWriter`` on Redis. The client stays the caller's; one writer per sidecar."""

    def __init__(
        self,
        client: Client,
        *,
        clock: Callable[[], float],
        rng: Random,
        timing: StoreTiming = StoreTiming(),  # noqa: B008 - a frozen value
        stream_cap_entries: int = STREAM_CAP_ENTRIES,
        seal: Seal | None = None,
    ) -> None:
        self._client = client
        self._clock = clock
        self._rng = rng
        self._timing = timing
        self._stream_cap_entries = stream_cap_entries
        self._renewed_s: dict[ReplicaId, float] = {}
        self._announced_s: dict[ReplicaId, tuple[Generation, float]] = {}
        self._register = Script("register")
        self._heartbeat = Script("heartbeat")
        self._deregister = Script("deregister")
        self._touch = Script("touch")
        self._swap = Script("swap")
        self._news = News(clock, rng)
        self._stamps = Stamps(seal, clock)

    async def register(self, record: ReplicaRecord) -> None:
        """Make ``record`` the replica's entry; a new generation starts with nothing resident."""
        keys = ReplicaKeys(record.replica)
        async with self._attempt("register"):
            residency = [keys.residency(suffix) for suffix in await self._suffixes(keys)]
            names = [*_head(keys), *residency]
            arguments: list[Argument] = [
                record.generation,
                record.sidecar,
                self._stamps.sealed(Kind.RECORD, keys.record, encode_record(record)),
                _ms(self._timing.record_ttl_s),
                self._residency_ttl_ms(),
                self._stream_cap_entries,
                self._life_entry(keys, EntryKind.REGISTERED, record.generation),
            ]
            # The index first: emptied in between, the server has a record too many, and not a name
            # without one, which readers take for a replica that is gone.
            calls = [self._touch_call(record.replica), self._register.call(names, arguments)]
            self._news.forget(record.replica)
            await run_scripts(self._client, calls)
            await run_scripts(self._client, [self._news.call(record.replica)])
        announced = self._announced_s.get(record.replica)
        if announced is None or announced[0] != record.generation:
            self._announced_s[record.replica] = (record.generation, self._clock())

    async def heartbeat(
        self, record: ReplicaRecord, load: ReplicaLoad | None, facts: ReplicaFacts | None = None
    ) -> Fence:
        """Keep the replica and its residency alive and publish ``load``, if still ours."""
        keys = ReplicaKeys(record.replica)
        stamped = self._stamps.sealed
        values = (
            stamped(Kind.RECORD, keys.record, encode_record(record)),
            stamped(Kind.LOAD, keys.load, encode_load(load)) if load else b"",
        )
        arguments: list[Argument] = [
            record.generation,
            record.sidecar,
            values[0],
            _ms(self._timing.record_ttl_s),
            values[1],
            _ms(self._timing.load_ttl_s),
            stamped(Kind.FACTS, keys.facts, encode_facts(facts)) if facts else b"",
            _ms(self._timing.facts_ttl_s),
        ]
        call = self._heartbeat.call([keys.record, keys.load, keys.facts], arguments)
        news = values if self._news.take(record.replica, values) else None
        async with self._attempt("heartbeat"):
            fence = await self._fence(call)
            if fence is Fence.HELD and await self._show(record.replica, news):
                # The server was emptied meanwhile, or the index alone was lost. An entry of the
                # index without a record would mean "gone".
                fence = await self._fence(call)
                if fence is Fence.UNKNOWN:
                    await run_command(self._client, "ZREM", REPLICA_INDEX, record.replica)
            if fence is Fence.HELD:
                await self._renew_residency(record, keys)
            else:
                self._news.forget(record.replica)
        return fence

    async def _fence(self, heartbeat: ScriptCall) -> Fence:
        [answer] = await run_scripts(self._client, [heartbeat])
        return Fence(answer.decode())

    async def _show(self, replica: ReplicaId, news: Values | None) -> bool:
        """Count a heartbeat that was stored, and tell of it; True when the index is new to it."""
        calls = [self._touch_call(replica)]
        if news is not None:
            calls.append(self._news.call(replica))
        is_new, *_ = await run_scripts(self._client, calls)
        if news is not None:
            self._news.note(replica, news)
        return bool(is_new)

    async def apply(self, changes: Sequence[ChangeBatch]) -> None:
        """Store residency changes, in order; those of a dead generation have no effect."""
        for batch in changes:
            keys = ReplicaKeys(batch.replica)
            async with self._attempt("apply"):
                for part in parts_of(batch):
                    await self._store_part(keys, batch, part)

    async def deregister(self, replica: ReplicaId, generation: Generation) -> None:
        """Remove the replica and all that is known of it, if the generation is still current.

        The index keeps its name for a while: that and no record says "gone", not "forgotten".
        """
        keys = ReplicaKeys(replica)
        async with self._attempt("deregister"):
            residency = [keys.residency(suffix) for suffix in await self._suffixes(keys)]
            names = [*_head(keys), *residency]
            arguments: list[Argument] = [
                generation,
                self._residency_ttl_ms(),
                self._stream_cap_entries,
                self._life_entry(keys, EntryKind.DEREGISTERED, generation),
            ]
            await run_scripts(self._client, [self._deregister.call(names, arguments)])
            await run_scripts(self._client, [self._news.call(replica)])
        self._news.forget(replica)
        self._stamps.forget(replica)
        self._renewed_s.pop(replica, None)
        self._announced_s.pop(replica, None)

    async def copy(self, changes: Sequence[ChangeBatch]) -> None:
        """Write stored blocks to copies of their sets; one that clears begins its copy."""
        for batch in changes:
            suffix = residency_suffix(batch.generation, batch.namespace, batch.tier)
            key = ReplicaKeys(batch.replica).copy(suffix)
            async with self._attempt("copy"):
                for part in parts_of(batch):
                    pipeline = self._client.pipeline(transaction=True)
                    if part.is_clear:
                        pipeline.execute_command("UNLINK", key)
                    if part.stored:
                        pipeline.execute_command("SADD", key, *part.stored)
                    pipeline.execute_command("PEXPIRE", key, _ms(COPY_TTL_S))
                    await pipeline.execute()

    async def swap(
        self,
        replica: ReplicaId,
        generation: Generation,
        copied_blocks: Mapping[tuple[NamespaceId, Tier], int],
    ) -> bool:
        """Put the copies in the place of what was announced; False when one is not whole."""
        keys = ReplicaKeys(replica)
        began_s, ttl_ms = self._clock(), self._residency_ttl_ms()
        calls, kept = [], set()
        for (namespace, tier), blocks in copied_blocks.items():
            suffix = residency_suffix(generation, namespace, tier)
            kept.add(suffix)
            names = [keys.residency(suffix), keys.copy(suffix), keys.sets]
            calls.append(self._swap.call(names, [blocks, ttl_ms, suffix, ttl_ms]))
        async with self._attempt("swap"):
            listed = await self._suffixes(keys)
            is_whole = all(await run_scripts(self._client, calls)) if calls else True
            void = [name for name in listed if suffix_tier(name, generation) and name not in kept]
            if void:
                pipeline = self._client.pipeline(transaction=True)
                pipeline.execute_command("UNLINK", *map(keys.residency, void))
                pipeline.execute_command("SREM", keys.sets, *void)
                await pipeline.execute()
        if is_whole:
            self._announced_s[replica] = (generation, began_s)
        return is_whole

    @asynccontextmanager
    async def _attempt(self, action: str) -> AsyncIterator[None]:
        """Raise what the store raises as StateError.

        A server that became a replica is left: where its address leads by now is another one.
        """
        with state_errors(action):
            try:
                yield
            except ReadOnlyError:
                await self._client.aclose()
                raise

    async def _suffixes(self, keys: ReplicaKeys) -> list[str]:
        members = await run_command(self._client, "SMEMBERS", keys.sets)
        return [member.decode("utf-8", "replace") for member in members]

    async def _store_part(self, keys: ReplicaKeys, batch: ChangeBatch, part: ChangePart) -> None:
        """Change the set and tell the stream of it in one transaction."""
        suffix = residency_suffix(batch.generation, batch.namespace, batch.tier)
        blocks = keys.residency(suffix)
        blocks_ttl_ms = self._blocks_ttl_ms(batch.replica, batch.generation)
        cleared = []
        if part.is_clear:
            suffixes = await self._suffixes(keys)
            cleared = [name for name in suffixes if suffix_tier(name, batch.generation)]
        ttl_ms = self._residency_ttl_ms()
        pipeline = self._client.pipeline(transaction=True)
        if cleared:
            pipeline.execute_command("UNLINK", *map(keys.residency, cleared))
            pipeline.execute_command("SREM", keys.sets, *cleared)
        if part.removed:
            pipeline.execute_command("SREM", blocks, *part.removed)
        if part.stored:
            pipeline.execute_command("SADD", blocks, *part.stored)
            pipeline.execute_command("PEXPIRE", blocks, blocks_ttl_ms)
            pipeline.execute_command("SADD", keys.sets, suffix)
            pipeline.execute_command("PEXPIRE", keys.sets, ttl_ms)
        told = (ENTRY_FIELD, self._stamps.change(keys, batch, part))
        cap = self._stream_cap_entries
        pipeline.execute_command("XADD", keys.changes, "MAXLEN", "~", cap, "*", *told)
        pipeline.execute_command("PEXPIRE", keys.changes, ttl_ms)
        await pipeline.execute()

    async def _renew_residency(self, record: ReplicaRecord, keys: ReplicaKeys) -> None:
        """Extend what the heartbeat keeps alive, at most a few times per time to live."""
        now_s = self._clock()
        renewed_s = self._renewed_s.get(record.replica)
        interval_s = self._timing.residency_ttl_s / _RENEWALS_PER_TTL
        if renewed_s is not None and now_s - renewed_s < interval_s:
            return
        suffixes = await self._suffixes(keys)
        live = [name for name in suffixes if suffix_tier(name, record.generation)]
        pipeline = self._client.pipeline(transaction=False)
        for key in (keys.generation, keys.sets, keys.changes):
            pipeline.execute_command("PEXPIRE", key, self._residency_ttl_ms())
        for key in map(keys.residency, live):
            ttl_ms = self._blocks_ttl_ms(record.replica, record.generation)
            pipeline.execute_command("PEXPIRE", key, ttl_ms)
        await pipeline.execute()
        self._renewed_s[record.replica] = now_s

    def _life_entry(self, keys: ReplicaKeys, kind: EntryKind, generation: Generation) -> bytes:
        entry = Entry(kind=kind, generation=generation, seal=self._stamps.blank)
        return self._stamps.entry(keys, entry)

    def _touch_call(self, replica: ReplicaId) -> ScriptCall:
        return self._touch.call([REPLICA_INDEX], [replica, _ms(INDEX_HORIZON_S)])

    def _blocks_ttl_ms(self, replica: ReplicaId, generation: Generation) -> int:
        """Return a time to live that does not go beyond the cap of the last announcement."""
        of, announced_s = self._announced_s.get(replica, (generation, self._clock()))
        if of != generation:  # nobody reads what a dead generation writes
            return self._residency_ttl_ms()
        left_s = announced_s + self._timing.residency_cap_s - self._clock()
        return min(self._residency_ttl_ms(), _ms(left_s))

    def _residency_ttl_ms(self) -> int:
        return _ms(self._timing.residency_ttl_s * self._rng.uniform(*_JITTER))


def _head(keys: ReplicaKeys) -> list[str]:
    """Return the keys of a replica that register and deregister take, before its residency."""
    return [keys.record, keys.generation, keys.load, keys.changes, keys.sets, keys.facts]


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
