"""Sealed values through a real store: what one process seals another one takes, and no other's."""

from __future__ import annotations

import random
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import pytest_asyncio

from state.canary_store import RedisCanaryStore
from state.client import command_client, run_command
from state.mirror import Mirror
from state.model import Generation, LeaseTotals, NamespaceId, RouterId
from state.redis_writer import RedisWriter
from state.schema import (
    ENTRY_FIELD,
    LEASES,
    ROUTER_INDEX,
    Entry,
    EntryKind,
    ReplicaKeys,
    change_entry,
    encode_entry,
    encode_leases,
    parts_of,
)
from state.scope_purge import purge_namespaces
from state.seal import Fault, Kind, Seal
from state.seal_guard import SealGuard
from state.setting_book import RENEW_S, SettingBook, SettingDocument, encoded
from state.setting_store import DOCUMENT_KEY, RedisSettingStore
from support.fleet import until
from support.fleet_state import NAMESPACE, A, B, batch, blocks, record
from support.state_backend import FAST_ROUNDS, LASTING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from state.client import Client
    from state.model import ReplicaId
    from support.state_backend import StateServer

SECRET = b"k" * 32
KEYS = ReplicaKeys(A)
GENERATION = Generation("g1")


class Stand:
    """A writer with the key, mirrors that require seals, and whoever else writes."""

    def __init__(self, server: StateServer, stack: AsyncExitStack) -> None:
        self.server, self.stack = server, stack
        self.client: Client = command_client(server.settings)
        stack.push_async_callback(self.client.aclose)
        self.seal = Seal(SECRET, time.time)
        self.writer = RedisWriter(
            self.client,
            clock=time.monotonic,
            rng=random.Random(1),
            timing=LASTING,
            seal=self.seal,
        )

    def guard(self, *, is_required: bool = True) -> SealGuard:
        return SealGuard(self.seal, is_required=is_required)

    async def mirror(self, name: str = "r1", guard: SealGuard | None = None) -> Mirror:
        settings = msgspec.structs.replace(self.server.settings, guard=guard or self.guard())
        return await self.stack.enter_async_context(
            Mirror(
                settings,
                RouterId(name),
                clock=time.monotonic,
                rng=random.Random(2),
                timing=FAST_ROUNDS,
                store_timing=LASTING,
            )
        )

    async def tell(self, entry: Entry, keys: ReplicaKeys = KEYS) -> None:
        """Put an entry into the stream as it is."""
        value = encode_entry(entry)
        await run_command(self.client, "XADD", keys.changes, "*", ENTRY_FIELD, value)

    async def copy_entries(self, replica: ReplicaId) -> None:
        """Put what is in the stream of A into that of ``replica`` as well."""
        keys = ReplicaKeys(replica)
        for _, fields in await run_command(self.client, "XRANGE", KEYS.changes, "-", "+"):
            await run_command(self.client, "XADD", keys.changes, "*", *fields)


@pytest_asyncio.fixture
async def stand(state_server: StateServer) -> AsyncIterator[Stand]:
    await state_server.flush()
    async with AsyncExitStack() as stack:
        yield Stand(state_server, stack)


def held(mirror: Mirror, replica: ReplicaId = A) -> int:
    overlap = mirror.overlap(blocks(1, 2, 3, 4)).get(replica)
    return overlap.gpu_blocks if overlap is not None else 0


async def test_what_a_sidecar_seals_arrives_whole(stand: Stand) -> None:
    mirror = await stand.mirror()
    await stand.writer.register(record(A))
    await stand.writer.apply([batch(1, stored=blocks(1, 2))])
    assert await mirror.settle(20.0)
    await stand.writer.apply([batch(2, stored=blocks(3, 4)), batch(3, removed=blocks(4))])
    assert await mirror.settle(20.0)
    assert held(mirror) == 3
    assert mirror.guard.faults == {}
    await stand.writer.deregister(A, GENERATION)
    assert await mirror.settle(20.0)
    assert not mirror.replicas()
    assert mirror.guard.faults == {}
    assert mirror.malformed_values == 0


FORGED = batch(2, stored=blocks(3, 4))
FORGERIES = {
    "stored": change_entry(FORGED, next(parts_of(FORGED))),
    "cleared": Entry(kind=EntryKind.CHANGED, generation=GENERATION, is_clear=True),
    "deregistered": Entry(kind=EntryKind.DEREGISTERED, generation=GENERATION),
    "registered": Entry(kind=EntryKind.REGISTERED, generation=Generation("g2")),
    "purged": Entry(kind=EntryKind.PURGED, generation=GENERATION, removed=b"".join(blocks(1))),
}


@pytest.mark.parametrize("forged", FORGERIES.values(), ids=FORGERIES)
async def test_an_entry_that_nobody_sealed_changes_nothing(stand: Stand, forged: Entry) -> None:
    mirror = await stand.mirror()
    await stand.writer.register(record(A))
    await stand.writer.apply([batch(1, stored=blocks(1, 2))])
    assert await mirror.settle(20.0)
    snapshots = mirror.snapshots
    await stand.tell(forged)
    assert await mirror.settle(20.0)
    assert mirror.guard.faults == {(Kind.CHANGE, Fault.UNSEALED): 1}
    assert held(mirror) == 2
    assert mirror.snapshots == snapshots
    await stand.writer.apply([batch(2, stored=blocks(3))])
    assert await mirror.settle(20.0)
    assert held(mirror) == 3
    assert mirror.snapshots == snapshots


@pytest.mark.parametrize("again", [0, 1], ids=["cleared", "stored"])
async def test_a_sealed_entry_that_comes_again_later_leaves_what_is_known(
    stand: Stand, again: int
) -> None:
    """Out of its sequence it makes a mirror read the cache again, and is not believed."""
    mirror = await stand.mirror()
    await stand.writer.register(record(A))
    cleared = msgspec.structs.replace(batch(1), is_clear=True)
    await stand.writer.apply([cleared, batch(2, stored=blocks(1, 2)), batch(3, removed=blocks(2))])
    assert await mirror.settle(20.0)
    assert held(mirror) == 1
    entries = await run_command(stand.client, "XRANGE", KEYS.changes, "-", "+")
    told = [fields for _, fields in entries][-3:][again]
    snapshots = mirror.snapshots
    await run_command(stand.client, "XADD", KEYS.changes, "*", *told)

    async def is_read_again() -> bool:
        return mirror.snapshots > snapshots

    await until(is_read_again, "the cache is read again")
    assert await mirror.settle(20.0)
    assert held(mirror) == 1
    assert mirror.guard.faults == {}


async def test_entries_of_another_replica_change_nothing(stand: Stand) -> None:
    mirror = await stand.mirror()
    for replica in (A, B):
        await stand.writer.register(record(replica))
    await stand.writer.apply([batch(1, stored=blocks(1, 2))])
    assert await mirror.settle(20.0)
    await stand.copy_entries(B)
    assert await mirror.settle(20.0)
    assert (held(mirror, A), held(mirror, B)) == (2, 0)
    assert mirror.guard.faults == {(Kind.CHANGE, Fault.WRONG): 2}


async def test_leases_count_where_a_router_sealed_them(stand: Stand) -> None:
    one, other = await stand.mirror("r1"), await stand.mirror("r2")
    one.publish_leases({A: LeaseTotals(inflight=3)})
    forged = encode_leases({A: LeaseTotals(inflight=900)})
    await run_command(stand.client, "HSET", LEASES, "r3", forged)
    await run_command(stand.client, "ZADD", ROUTER_INDEX, round(time.time() * 1000), "r3")

    async def are_seen() -> bool:
        return other.foreign_leases() == {A: LeaseTotals(inflight=3)}

    await until(are_seen, "the sealed leases and no others")
    board = await run_command(stand.client, "HGETALL", LEASES)
    real = dict(zip(board[::2], board[1::2], strict=True))[b"r1"]
    await run_command(stand.client, "HSET", LEASES, "r4", real)

    async def is_counted() -> bool:
        return other.guard.faults.get((Kind.LEASES, Fault.WRONG), 0) > 0

    await until(is_counted, "leases under another name are counted")
    assert other.foreign_leases() == {A: LeaseTotals(inflight=3)}
    assert other.guard.faults[Kind.LEASES, Fault.UNSEALED] > 0


async def test_what_an_ended_scope_left_is_taken_away_by_sealed_entries(stand: Stand) -> None:
    mirror = await stand.mirror()
    await stand.writer.register(record(A))
    await stand.writer.apply([batch(1, stored=blocks(1, 2, 3))])
    assert await mirror.settle(20.0)
    purged = await purge_namespaces(stand.client, [A], {NamespaceId(NAMESPACE)}, stand.seal)
    assert (purged.keys, purged.blocks, purged.replicas) == (1, 3, 1)
    assert await mirror.settle(20.0)
    assert held(mirror) == 0
    assert mirror.guard.faults == {}
    assert await run_command(stand.client, "SMEMBERS", KEYS.sets) == []


async def test_canary_sums_count_where_a_router_sealed_them(stand: Stand) -> None:
    settings = msgspec.structs.replace(stand.server.settings, guard=stand.guard())
    store, plain = RedisCanaryStore(settings), RedisCanaryStore(stand.server.settings)
    for one in (store, plain):
        stand.stack.push_async_callback(one.aclose)
    assert await store.exchange("e1", "r1", b"sums of r1") == []
    assert await plain.exchange("e1", "r3", b"forged") != []
    assert await store.exchange("e1", "r2", b"") == [b"sums of r1"]


def book_of(
    stand: Stand, *, is_required: bool, clock: Callable[[], float] = time.monotonic
) -> SettingBook:
    store = RedisSettingStore(stand.server.settings)
    stand.stack.push_async_callback(store.aclose)
    return SettingBook(
        store,
        fault_of=lambda _: None,
        on_change=lambda _: None,
        clock=clock,
        guard=stand.guard(is_required=is_required),
    )


def document(version: int, **settings: Any) -> SettingDocument:
    return SettingDocument(
        version=version, settings=settings, author="a", reason="r", unix_s=1.0, previous=0
    )


async def test_settings_of_before_the_key_are_sealed_by_the_first_router_that_has_it(
    stand: Stand,
) -> None:
    """Else they would be lost on the day on which seals are required."""
    await run_command(stand.client, "SET", DOCUMENT_KEY, encoded(document(4, a=1)).value)
    strict = book_of(stand, is_required=True)
    await strict.exchange()
    assert (strict.version, strict.fault != "") == (0, True)
    lenient = book_of(stand, is_required=False)
    await lenient.exchange()
    assert lenient.version == 4
    await strict.exchange()
    assert (strict.version, strict.fault) == (4, "")


async def test_forged_settings_leave_those_before_in_force_and_can_be_written_over(
    stand: Stand,
) -> None:
    book = book_of(stand, is_required=True)
    write: dict[str, Any] = {"author": "a", "reason": "r", "unix_s": 1.0}
    await book.write({"a": 1}, expected_version=0, **write)
    await run_command(stand.client, "SET", DOCUMENT_KEY, encoded(document(50, a=2)).value)
    await book.exchange()
    assert (book.version, book.document and book.document.settings) == (1, {"a": 1})
    assert "sealed" in book.fault
    await book.write({"a": 3}, expected_version=1, **write)
    other = book_of(stand, is_required=True)
    await other.exchange()
    assert (other.version, other.document and other.document.settings) == (2, {"a": 3})


async def test_a_router_that_comes_later_gets_the_settings_that_a_forgery_took_away(
    stand: Stand,
) -> None:
    """What was written over counts no more than what was deleted: who has it puts it back."""
    now_s = [0.0]
    book = book_of(stand, is_required=True, clock=lambda: now_s[0])
    await book.write({"a": 1}, author="a", reason="r", unix_s=1.0, expected_version=0)
    await book.exchange()
    forged = encoded(document(50, a=2)).value
    await run_command(stand.client, "SET", DOCUMENT_KEY, forged)
    await book.exchange()
    await book.exchange()
    assert await run_command(stand.client, "GET", DOCUMENT_KEY) == forged
    late = book_of(stand, is_required=True)
    await late.exchange()
    assert (late.version, bool(late.fault)) == (0, True)
    now_s[0] += RENEW_S
    await book.exchange()
    await late.exchange()
    for one in (book, late):
        assert (one.version, one.document and one.document.settings) == (1, {"a": 1})
        assert one.fault == ""


async def test_settings_that_were_sealed_and_cannot_be_read_here_are_left(stand: Stand) -> None:
    """They may be those of a later version of the router."""
    now_s = [0.0]
    book = book_of(stand, is_required=True, clock=lambda: now_s[0])
    await book.write({"a": 1}, author="a", reason="r", unix_s=1.0, expected_version=0)
    later = stand.seal.sealed(Kind.SETTINGS, DOCUMENT_KEY, b'{"version":"2"}')
    await run_command(stand.client, "SET", DOCUMENT_KEY, later)
    for _ in range(3):
        await book.exchange()
        now_s[0] += RENEW_S
    assert await run_command(stand.client, "GET", DOCUMENT_KEY) == later
    assert (book.version, bool(book.fault)) == (1, True)
