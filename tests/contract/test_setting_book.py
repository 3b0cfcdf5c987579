"""The document of settings on every kind of store: followed, compared and set, put back."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Protocol

import pytest
import pytest_asyncio

from state.client import RedisSettings, command_client, run_command
from state.setting_book import (
    MAX_DOCUMENT_BYTES,
    SettingBook,
    SettingDocument,
    VersionConflictError,
    encoded,
)
from state.setting_store import (
    DOCUMENT_KEY,
    HISTORY_KEY,
    KEPT_VERSIONS,
    Encoded,
    MemorySettingStore,
    RedisSettingStore,
)
from state.store import StateError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from state.setting_store import SettingStore
    from support.state_backend import StateServer

SERVERS = {
    "redis": "valkey",
    "cluster": "valkey_cluster",
    "sentinel": "valkey_sentinel",
    "acl": "valkey_acl",
}


class Bed(Protocol):
    """A store under test, as several routers see it."""

    def store(self) -> SettingStore: ...

    async def flush(self) -> None: ...


class MemoryBed:
    def __init__(self) -> None:
        self._store = MemorySettingStore()

    def store(self) -> SettingStore:
        return self._store

    async def flush(self) -> None:
        empty = MemorySettingStore()
        self._store.value, self._store._history = empty.value, empty._history


class RedisBed:
    def __init__(self, server: StateServer, stack: AsyncExitStack) -> None:
        self._server, self._stack = server, stack

    def store(self) -> SettingStore:
        store = RedisSettingStore(self._server.settings)
        self._stack.push_async_callback(store.aclose)
        return store

    async def flush(self) -> None:
        await self._server.flush()


@pytest_asyncio.fixture(params=["memory", *SERVERS])
async def bed(request: pytest.FixtureRequest) -> AsyncIterator[Bed]:
    if request.param == "memory":
        yield MemoryBed()
        return
    server: StateServer = request.getfixturevalue(SERVERS[request.param])
    await server.flush()
    async with AsyncExitStack() as stack:
        yield RedisBed(server, stack)


class Follower:
    """A book with what it was told."""

    def __init__(
        self,
        store: SettingStore,
        fault_of: Callable[[SettingDocument], str | None] = lambda _: None,
    ) -> None:
        self.seen: list[SettingDocument] = []
        self.now_s = 0.0
        self.book = SettingBook(
            store, fault_of=fault_of, on_change=self.seen.append, clock=lambda: self.now_s
        )

    async def write(self, expected_version: int, **settings: Any) -> SettingDocument:
        return await self.book.write(
            settings, author="ann", reason="test", unix_s=1.0, expected_version=expected_version
        )


def document(version: int, **settings: Any) -> SettingDocument:
    """Return a document that another router wrote."""
    return SettingDocument(
        version=version,
        settings=settings,
        author="bob",
        reason="other",
        unix_s=2.0,
        previous=version - 1,
    )


async def test_what_one_router_writes_the_others_have_after_one_round(bed: Bed) -> None:
    one, two = Follower(bed.store()), Follower(bed.store())

    written = await one.write(0, policy={"w_queue": 0.5})
    await two.book.exchange()

    assert one.seen == two.seen == [written]
    assert (written.version, written.previous, written.author) == (1, 0, "ann")
    assert two.book.document == written
    assert two.book.history() == [written]


async def test_a_round_without_a_change_tells_nothing_and_an_empty_store_is_version_0(
    bed: Bed,
) -> None:
    one = Follower(bed.store())

    await one.book.exchange()
    await one.book.exchange()

    assert (one.seen, one.book.version, one.book.fault) == ([], 0, "")


async def test_of_two_writers_the_later_one_is_told_of_the_conflict(bed: Bed) -> None:
    one, two = Follower(bed.store()), Follower(bed.store())
    await one.write(0, drains=["a"])

    with pytest.raises(VersionConflictError) as told:
        await two.write(0, drains=["b"])

    assert told.value.version == 1
    assert two.book.document is not None
    assert two.book.document.settings == {"drains": ["a"]}


async def test_of_many_writers_at_once_exactly_one_wins_each_version(bed: Bed) -> None:
    writers = [Follower(bed.store()) for _ in range(6)]

    results = await asyncio.gather(
        *(writer.write(0, drains=[str(at)]) for at, writer in enumerate(writers)),
        return_exceptions=True,
    )

    won = [result for result in results if isinstance(result, SettingDocument)]
    assert len(won) == 1
    assert all(isinstance(r, SettingDocument | VersionConflictError) for r in results)
    for writer in writers:
        await writer.book.exchange()
        assert writer.book.document == won[0]


async def test_a_flushed_store_gets_the_settings_and_their_history_back(bed: Bed) -> None:
    one, fresh = Follower(bed.store()), Follower(bed.store())
    for version in range(3):
        await one.write(version, drains=[f"r{version}"])
    await bed.flush()

    await one.book.exchange()
    await fresh.book.exchange()

    assert fresh.book.document == one.book.document
    assert [one.version for one in fresh.book.history()] == [3, 2, 1]
    assert len(one.seen) == 3  # nothing changed for who knew


async def test_an_earlier_document_gives_way_to_a_later_one_that_a_router_knows(bed: Bed) -> None:
    one, two = Follower(bed.store()), Follower(bed.store())
    for version in range(3):
        await one.write(version, drains=[f"r{version}"])
    await bed.flush()
    await two.write(0, drains=["lost"])

    await one.book.exchange()
    await two.book.exchange()

    assert two.book.document == one.book.document
    assert two.book.version == 3


async def test_a_refused_document_stays_and_the_one_before_stays_in_force(bed: Bed) -> None:
    def fault_of(told: SettingDocument) -> str | None:
        return "hold: no such key" if "hold" in told.settings else None

    newer, older = Follower(bed.store()), Follower(bed.store(), fault_of)
    first = await newer.write(0, drains=["a"])
    await older.book.exchange()
    second = await newer.write(1, hold={"magic": 1})

    for _ in range(2):
        await older.book.exchange()

    assert older.book.document == first
    assert older.seen == [first]
    assert older.book.fault == "version 2: hold: no such key"
    assert older.book.stored_version == 2
    with pytest.raises(VersionConflictError):
        await older.write(1, drains=[])
    third = await older.write(2, drains=["b"])  # over what it refuses, on purpose
    assert (third.version, third.previous, older.book.fault) == (3, 1, "")
    await newer.book.exchange()
    assert newer.book.document == third
    assert second in newer.book.history()


@pytest.mark.parametrize(
    "value", [b"", b"no JSON", b"{}", b'{"version":"1"}', b"[" * 100_000, b"\xff"]
)
async def test_what_is_no_document_is_refused_and_may_be_written_over(
    bed: Bed, value: bytes
) -> None:
    one = Follower(bed.store())
    await one.write(0, drains=["a"])
    store = bed.store()
    read = await store.read()
    assert read is not None
    await store.put(read, Encoded(9, value), [])

    await one.book.exchange()

    assert one.book.fault == "what the store has is no document of settings"
    assert one.book.version == 1
    written = await one.write(1, drains=["b"])
    assert (written.version, one.book.fault) == (2, "")


async def test_the_history_is_bounded_and_whole_for_a_router_that_comes_later(bed: Bed) -> None:
    store = bed.store()
    read = b""
    for version in range(1, KEPT_VERSIONS + 6):
        stored = encoded(document(version, drains=[f"r{version}"]))
        assert await store.put(read, stored, [stored]) == stored.value
        read = stored.value
    fresh = Follower(bed.store())

    await fresh.book.exchange()

    assert len(await store.history()) == KEPT_VERSIONS
    versions = [one.version for one in fresh.book.history()]
    assert versions == list(range(KEPT_VERSIONS + 5, 5, -1))


async def test_settings_that_are_too_large_are_not_written(bed: Bed) -> None:
    one = Follower(bed.store())

    with pytest.raises(ValueError, match="expected at most"):
        await one.write(0, drains=["x" * MAX_DOCUMENT_BYTES])

    assert one.book.version == 0


async def test_what_a_file_kept_is_in_force_and_put_into_an_empty_store(bed: Bed) -> None:
    one, other = Follower(bed.store()), Follower(bed.store())
    kept = [document(3, drains=["b"]), document(4, drains=["a"])]

    assert one.book.restore(kept, 4) is None
    assert one.seen == [kept[1]]
    await one.book.exchange()
    await other.book.exchange()

    assert other.book.document == kept[1]
    assert [found.version for found in other.book.history()] == [4, 3]


async def test_a_file_older_than_the_store_changes_nothing_there(bed: Bed) -> None:
    one, other = Follower(bed.store()), Follower(bed.store())
    for version in range(2):
        await one.write(version, drains=[f"r{version}"])

    other.book.restore([document(1, drains=["old"])], 1)
    await other.book.exchange()

    assert other.book.document == one.book.document


async def test_both_keys_expire_and_any_round_of_a_live_router_renews_them(
    valkey: StateServer,
) -> None:
    await valkey.flush()
    store = RedisSettingStore(valkey.settings)
    client = command_client(valkey.settings)
    try:
        one = Follower(store)
        await one.write(0, drains=["a"])
        assert await valkey.keys_without_ttl() == []
        for key in (DOCUMENT_KEY, HISTORY_KEY):
            await run_command(client, "PEXPIRE", key, 60_000)
        await one.book.exchange()
        one.now_s = 31.0
        await one.book.exchange()
        for key in (DOCUMENT_KEY, HISTORY_KEY):
            assert await run_command(client, "PTTL", key) > 86_400_000
    finally:
        await client.aclose()
        await store.aclose()


async def test_keys_of_another_type_are_no_document_and_are_replaced_by_a_change(
    valkey: StateServer,
) -> None:
    await valkey.flush()
    store = RedisSettingStore(valkey.settings)
    client = command_client(valkey.settings)
    try:
        for key in (DOCUMENT_KEY, HISTORY_KEY):
            await run_command(client, "SADD", key, "x")
        one = Follower(store)
        await one.book.exchange()
        assert one.book.fault
        await one.write(0, drains=["a"])
        assert await store.history() == [encoded(one.seen[0]).value]
    finally:
        await client.aclose()
        await store.aclose()


async def test_a_store_that_is_away_raises_and_changes_nothing() -> None:
    store = RedisSettingStore(RedisSettings(url="unix:///nowhere/at.sock"))
    one = Follower(store)
    one.book.restore([document(4, drains=["a"])], 4)

    with pytest.raises(StateError):
        await one.book.exchange()
    with pytest.raises(StateError):
        await one.write(4, drains=[])

    assert one.book.version == 4
    await store.aclose()
