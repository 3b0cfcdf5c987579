"""How a mirror keeps its residency equal to the store's: snapshot, then tail.

Per replica: note the last entry of its change stream, scan its sets, then apply the stream from
that entry on. The scan may see any mixture of states during it; because every change to a set is an
entry of the stream, in the same transaction, replaying them in order leaves each block as the last
entry says, and blocks without an entry were there, or not, for the whole scan. A jump in the batch
sequence (the stream was trimmed, or entries were lost) starts over.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from redis.exceptions import (
    ConnectionError,  # noqa: A004 - the library's name
    ResponseError,
)

from state.client import is_wrong_type, run_command
from state.schema import (
    BLOCK_ID_BYTES,
    MAX_CHUNK_BLOCKS,
    STREAM_START,
    EntryKind,
    ReplicaKeys,
    decode_entry,
    suffix_tier,
    unpack_blocks,
)
from state.script import Script, run_scripts
from state.seal import Kind
from state.seal_guard import SealGuard

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence

    from state.client import Argument, Client
    from state.model import BlockId, Generation, ReplicaId, Tier
    from state.residency import Residency
    from state.schema import Entry

READ_ENTRIES: Final = 64
"""Entries of all streams together that one read asks for; fewer after lost connections."""
STEP_BLOCKS: Final = 2048
"""Blocks applied before the event loop gets its turn: about a millisecond."""


@dataclass(slots=True, eq=False)
class Follow:
    """How far one life of a replica is mirrored. Tailed only while ``is_synced``."""

    replica: ReplicaId
    generation: Generation
    keys: ReplicaKeys
    position: bytes = STREAM_START
    place: tuple[int, int, int] | None = None
    """Sequence, part and parts of the last entry; None when it is unknown."""
    is_synced: bool = False
    stream: bytes = b""
    """The key of the change stream as the server names it."""

    def __post_init__(self) -> None:
        """Encode the key once, and not with each read."""
        self.stream = self.keys.changes.encode()

    def continues(self, entry: Entry) -> bool:
        """Return whether nothing is missing between the last entry and this one.

        A batch may come again, whole: its sidecar did not hear that it was stored. What clears the
        cache needs nothing before it, but does not come after what followed it.
        """
        if entry.part == 0:
            if self.place is None:
                return entry.is_clear or entry.sequence <= 1
            sequence, part, parts = self.place
            if entry.is_clear and entry.sequence >= sequence:
                return True
            is_next = part + 1 == parts and entry.sequence == sequence + 1
            return is_next or entry.sequence == sequence
        return self.place == (entry.sequence, entry.part - 1, entry.parts)


class Follower:
    """All follows of a mirror, and the only writer of its residency."""

    def __init__(
        self,
        residency: Residency,
        on_registered: Callable[[ReplicaId], None],
        on_deregistered: Callable[[ReplicaId, Generation], None],
        guard: SealGuard | None = None,
    ) -> None:
        self._guard = guard or SealGuard()
        self._residency = residency
        self._on_registered = on_registered
        self._on_deregistered = on_deregistered
        self._follows: dict[ReplicaId, Follow] = {}
        self._scan = Script("scan")
        self._read_entries = READ_ENTRIES
        self.malformed_values = 0
        self.snapshots = 0
        self.clears: dict[ReplicaId, int] = {}
        """How often each replica's cache was cleared within one life."""

    def expect(self, generations: dict[ReplicaId, Generation]) -> None:
        """Follow exactly these replicas; another generation voids what was known before."""
        for replica in [name for name in self._follows if name not in generations]:
            self.unfollow(replica)
        for replica, generation in generations.items():
            follow = self._follows.get(replica)
            if follow is None or follow.generation != generation:
                self._residency.drop(replica)
                self._follows[replica] = Follow(replica, generation, ReplicaKeys(replica))

    def unfollow(self, replica: ReplicaId) -> None:
        """Forget a replica and what it holds."""
        self._follows.pop(replica, None)
        self._residency.drop(replica)
        self.clears.pop(replica, None)

    def unsynced(self) -> list[Follow]:
        """Return the follows that wait for a snapshot."""
        return [follow for follow in self._follows.values() if not follow.is_synced]

    def tailed(self) -> dict[bytes, Follow]:
        """Return the synced follows by the key of their streams."""
        return {follow.stream: follow for follow in self._follows.values() if follow.is_synced}

    def are_all(self, follows: Mapping[bytes, Follow]) -> bool:
        """Return whether ``follows`` leave nobody out who waits for a snapshot."""
        return len(follows) == len(self._follows)

    def has_reached(self, replica: ReplicaId, generation: Generation, position: bytes) -> bool:
        """Return whether the stream of ``replica`` is applied up to ``position``."""
        follow = self._follows.get(replica)
        return (
            follow is not None
            and follow.is_synced
            and follow.generation == generation
            and _order(follow.position) >= _order(position)
        )

    async def snapshot(self, client: Client, follow: Follow) -> None:
        """Read the state of one replica as of now, to be tailed from there."""
        self.snapshots += 1
        try:
            last_entries, found = await self._read_state(client, follow)
        except ResponseError as error:
            if not is_wrong_type(error):
                raise
            self.malformed_values += 1
            if self._is_current(follow):
                self._residency.drop(follow.replica)
            return
        if not self._is_current(follow):
            return
        self._residency.drop(follow.replica)
        for tier, packed in found:
            for blocks in _steps(packed):
                self._residency.store(follow.replica, tier, blocks)
                await asyncio.sleep(0)
                if not self._is_current(follow):
                    return
        self._start_at(follow, last_entries)

    async def _read_state(
        self, client: Client, follow: Follow
    ) -> tuple[Sequence[Sequence[Any]], list[tuple[Tier, bytes]]]:
        """Return the last entry of the replica's stream, if any, and what its sets hold."""
        pipeline = client.pipeline(transaction=True)
        pipeline.execute_command("XREVRANGE", follow.keys.changes, "+", "-", "COUNT", 1)
        pipeline.execute_command("SMEMBERS", follow.keys.sets)
        last_entries, suffixes = await pipeline.execute()
        found: list[tuple[Tier, bytes]] = []
        for member in suffixes:
            suffix = member.decode("utf-8", "replace")
            tier = suffix_tier(suffix, follow.generation)
            if tier is not None:
                key = follow.keys.residency(suffix)
                found += [(tier, packed) async for packed in self._scanned(client, key)]
        return last_entries, found

    async def next_entries(
        self, client: Client, follows: Mapping[bytes, Follow], block_s: float
    ) -> list[tuple[Follow, Sequence[Sequence[Any]]]]:
        """Wait up to ``block_s`` for entries of the streams of ``follows``."""
        count = max(1, self._read_entries // len(follows))
        arguments: list[Argument] = ["COUNT", count, "BLOCK", max(1, round(block_s * 1000))]
        positions = [follow.position for follow in follows.values()]
        try:
            reply = await run_command(client, "XREAD", *arguments, "STREAMS", *follows, *positions)
        except ResponseError as error:
            if not is_wrong_type(error):
                raise
            self._doubt_all()  # one of them is no stream: its snapshot will fail, alone
            return []
        except (ConnectionError, OSError):  # the server may limit what a reply may take of it
            self._read_entries = max(1, self._read_entries // 2)
            raise
        self._read_entries = min(READ_ENTRIES, self._read_entries + 1)
        return [(follows[key], rows) for key, rows in reply or ()]

    async def apply(self, follow: Follow, rows: Sequence[Sequence[Any]]) -> None:
        """Apply stream entries, in order, until one shows that something is missing."""
        for position, values in rows:
            if not self._is_current(follow):
                return
            entry = self._decoded(follow, values)
            if entry is None:
                pass
            elif entry.kind is EntryKind.PURGED:
                self._residency.remove(follow.replica, entry.tier, unpack_blocks(entry.removed))
            elif entry.kind is not EntryKind.CHANGED:
                self._apply_life(follow, entry)
            elif entry.generation == follow.generation:
                if not follow.continues(entry):
                    follow.is_synced = False
                    return
                await self._apply_change(follow, entry)
            follow.position = position

    def _decoded(self, follow: Follow, values: Sequence[bytes]) -> Entry | None:
        """Return an entry of the replica's stream; None for one that is ignored, and counted."""
        opened = values
        if self._guard.seal is not None and len(values) > 1:
            told = self._guard.open(Kind.CHANGE, follow.keys.changes, values[1])
            if told is None:
                return None
            opened = (values[0], told)
        entry = decode_entry(opened)
        self.malformed_values += entry is None
        return entry

    def _apply_life(self, follow: Follow, entry: Entry) -> None:
        is_same = entry.generation == follow.generation
        if entry.kind is EntryKind.DEREGISTERED and is_same:
            self.unfollow(follow.replica)
            self._on_deregistered(follow.replica, entry.generation)
        elif entry.kind is EntryKind.REGISTERED and not is_same:
            self._residency.drop(follow.replica)
            follow.generation = entry.generation
            follow.place = (0, 0, 1)
            self._on_registered(follow.replica)

    async def _apply_change(self, follow: Follow, entry: Entry) -> None:
        if entry.is_clear:
            self._residency.drop(follow.replica)
            self.clears[follow.replica] = self.clears.get(follow.replica, 0) + 1
        for change, packed in (
            (self._residency.remove, entry.removed),
            (self._residency.store, entry.stored),
        ):
            for blocks in _steps(packed):
                change(follow.replica, entry.tier, blocks)
                await asyncio.sleep(0)
                if not self._is_current(follow):
                    return
        follow.place = (entry.sequence, entry.part, entry.parts)

    async def _scanned(self, client: Client, key: str) -> AsyncIterator[bytes]:
        cursor = b"0"
        while True:
            call = self._scan.call([key], [cursor, MAX_CHUNK_BLOCKS, BLOCK_ID_BYTES])
            [(cursor, packed)] = await run_scripts(client, [call])
            yield packed
            if cursor == b"0":
                return

    def _doubt_all(self) -> None:
        """Let every follow wait for another snapshot."""
        for follow in self._follows.values():
            follow.is_synced = False

    def _is_current(self, follow: Follow) -> bool:
        return self._follows.get(follow.replica) is follow

    def _start_at(self, follow: Follow, last_entries: Sequence[Sequence[Any]]) -> None:
        follow.position, follow.place = STREAM_START, None
        if last_entries:
            follow.position, values = last_entries[0]
            last = self._decoded(follow, values)
            if last and last.kind is EntryKind.CHANGED and last.generation == follow.generation:
                follow.place = (last.sequence, last.part, last.parts)
        follow.is_synced = True


async def stream_heads(client: Client, replicas: Sequence[ReplicaId]) -> dict[ReplicaId, bytes]:
    """Return where the change stream of each replica ends now."""
    pipeline = client.pipeline(transaction=False)
    for replica in replicas:
        pipeline.execute_command("XREVRANGE", ReplicaKeys(replica).changes, "+", "-", "COUNT", 1)
    replies = await pipeline.execute()
    return {
        replica: entries[0][0] if entries else STREAM_START
        for replica, entries in zip(replicas, replies, strict=True)
    }


def _steps(packed: bytes) -> Iterator[list[BlockId]]:
    step_bytes = STEP_BLOCKS * BLOCK_ID_BYTES
    for start in range(0, len(packed), step_bytes):
        yield unpack_blocks(packed[start : start + step_bytes])


def _order(position: bytes) -> tuple[int, int]:
    milliseconds, _, number = position.partition(b"-")
    return int(milliseconds), int(number)
