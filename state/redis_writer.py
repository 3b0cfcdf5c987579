"""The sidecar's side of the shared state in Redis: registry, heartbeats and residency changes.

The generation is part of every residency key, so a late write of a dead generation lands in a key
that nobody reads: ``apply`` needs no fence. Only the registry entry itself is compared and set by
scripts. Every key gets its time to live in the same transaction or script that may create it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from state.client import run_command, state_errors
from state.model import Fence
from state.schema import (
    ENTRY_FIELD,
    INDEX_HORIZON_S,
    REPLICA_INDEX,
    STREAM_CAP_ENTRIES,
    Entry,
    EntryKind,
    ReplicaKeys,
    change_entry,
    encode_entry,
    encode_load,
    encode_record,
    parts_of,
    residency_suffix,
    suffix_tier,
)
from state.script import Script, run_scripts
from state.timing import StoreTiming

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from random import Random

    from redis.asyncio import Redis

    from state.client import Argument
    from state.model import ChangeBatch, Generation, ReplicaId, ReplicaLoad, ReplicaRecord
    from state.schema import ChangePart
    from state.script import ScriptCall

_JITTER: Final = (0.8, 1.2)
_RENEWALS_PER_TTL: Final = 4


class RedisWriter:
    """``ReplicaWriter`` on Redis. The client stays the caller's; one writer per sidecar."""

    def __init__(
        self,
        client: Redis,
        *,
        clock: Callable[[], float],
        rng: Random,
        timing: StoreTiming = StoreTiming(),  # noqa: B008 - a frozen value
        stream_cap_entries: int = STREAM_CAP_ENTRIES,
    ) -> None:
        self._client = client
        self._clock = clock
        self._rng = rng
        self._timing = timing
        self._stream_cap_entries = stream_cap_entries
        self._renewed_s: dict[ReplicaId, float] = {}
        self._register = Script("register")
        self._heartbeat = Script("heartbeat")
        self._deregister = Script("deregister")
        self._touch = Script("touch")

    async def register(self, record: ReplicaRecord) -> None:
        """Make ``record`` the replica's entry; a new generation starts with nothing resident."""
        keys = ReplicaKeys(record.replica)
        with state_errors("register"):
            residency = [keys.residency(suffix) for suffix in await self._suffixes(keys)]
            names = [keys.record, keys.generation, keys.load, keys.changes, keys.sets, *residency]
            arguments: list[Argument] = [
                record.generation,
                record.sidecar,
                encode_record(record),
                _ms(self._timing.record_ttl_s),
                self._residency_ttl_ms(),
                self._stream_cap_entries,
                encode_entry(Entry(kind=EntryKind.REGISTERED, generation=record.generation)),
            ]
            calls = [self._register.call(names, arguments), self._touch_call(record.replica)]
            await run_scripts(self._client, calls)

    async def heartbeat(self, record: ReplicaRecord, load: ReplicaLoad | None) -> Fence:
        """Keep the replica and its residency alive and publish ``load``, if still ours."""
        keys = ReplicaKeys(record.replica)
        arguments: list[Argument] = [
            record.generation,
            record.sidecar,
            encode_record(record),
            _ms(self._timing.record_ttl_s),
            encode_load(load) if load else b"",
            _ms(self._timing.load_ttl_s),
        ]
        with state_errors("heartbeat"):
            call = self._heartbeat.call([keys.record, keys.load], arguments)
            answer, _ = await run_scripts(self._client, [call, self._touch_call(record.replica)])
            fence = Fence(answer.decode())
            if fence is Fence.HELD:
                await self._renew_residency(record, keys)
        return fence

    async def apply(self, changes: Sequence[ChangeBatch]) -> None:
        """Store residency changes, in order; those of a dead generation have no effect."""
        for batch in changes:
            keys = ReplicaKeys(batch.replica)
            with state_errors("apply"):
                for part in parts_of(batch):
                    await self._store_part(keys, batch, part)

    async def deregister(self, replica: ReplicaId, generation: Generation) -> None:
        """Remove the replica and all that is known of it, if the generation is still current.

        The index keeps its name for a while: that and no record says "gone", not "forgotten".
        """
        keys = ReplicaKeys(replica)
        with state_errors("deregister"):
            residency = [keys.residency(suffix) for suffix in await self._suffixes(keys)]
            names = [keys.record, keys.generation, keys.load, keys.changes, keys.sets, *residency]
            arguments: list[Argument] = [
                generation,
                self._residency_ttl_ms(),
                self._stream_cap_entries,
                encode_entry(Entry(kind=EntryKind.DEREGISTERED, generation=generation)),
            ]
            await run_scripts(self._client, [self._deregister.call(names, arguments)])
        self._renewed_s.pop(replica, None)

    async def _suffixes(self, keys: ReplicaKeys) -> list[str]:
        members = await run_command(self._client, "SMEMBERS", keys.sets)
        return [member.decode("utf-8", "replace") for member in members]

    async def _store_part(self, keys: ReplicaKeys, batch: ChangeBatch, part: ChangePart) -> None:
        """Change the set and tell the stream of it in one transaction."""
        suffix = residency_suffix(batch.generation, batch.namespace, batch.tier)
        blocks = keys.residency(suffix)
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
            pipeline.execute_command("PEXPIRE", blocks, ttl_ms)
            pipeline.execute_command("SADD", keys.sets, suffix)
            pipeline.execute_command("PEXPIRE", keys.sets, ttl_ms)
        told = (ENTRY_FIELD, encode_entry(change_entry(batch, part)))
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
        for key in (keys.generation, keys.sets, keys.changes, *map(keys.residency, live)):
            pipeline.execute_command("PEXPIRE", key, self._residency_ttl_ms())
        await pipeline.execute()
        self._renewed_s[record.replica] = now_s

    def _touch_call(self, replica: ReplicaId) -> ScriptCall:
        return self._touch.call([REPLICA_INDEX], [replica, _ms(INDEX_HORIZON_S)])

    def _residency_ttl_ms(self) -> int:
        return _ms(self._timing.residency_ttl_s * self._rng.uniform(*_JITTER))


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))
