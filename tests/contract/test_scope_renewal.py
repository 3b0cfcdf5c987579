"""A router's renewals of scopes on a real store: what is kept, shared, taken away and written."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from msgspec import structs

from router.audit_log import AuditLog
from router.epoch import Forgotten, ScopeEpochs, View
from router.error import AuditFailedError, ConflictError
from router.lifecycle import Lifecycle
from router.scope_admin import ScopeAdmin, ScopeAdminParts
from state.client import command_client, run_command
from state.model import ModelIdentity
from state.prefix import namespace_of, salt_scope
from state.schema import ReplicaKeys
from state.scope_file import EpochFile
from state.scope_placement import ScopedPlacements
from state.secret import engine_salt
from support.fleet_state import A, batch, blocks, record
from support.valkey import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection
    from pathlib import Path

    from state.client import Client
    from support.state_backend import RedisBackend
    from support.valkey import ValkeyProcess

SECRET = b"a deployment key of thirty-two bytes and more"
SCOPE = "tenant:a"
HEADERS: Any = SimpleNamespace(received=())
IDENTITY = ModelIdentity(model="m")


class Stand:
    """One router's epochs with a file, and its exchange with the store."""

    def __init__(self, backend: RedisBackend, url: str, file: EpochFile | None) -> None:
        self.backend = backend
        self.is_done = False
        self.forgotten: list[tuple[str, tuple[str, ...]]] = []
        self.epochs = ScopeEpochs(SECRET, [SCOPE, "tenant:b"], file, url, time.monotonic)
        self.epochs.view = View(
            replicas=lambda: [A], identities=lambda: [IDENTITY], forget=self._forget
        )

    def _forget(self, scope: str, ended: Collection[str]) -> Forgotten:
        self.forgotten.append((scope, tuple(ended)))
        return Forgotten(placements=3, roots=len(ended))

    async def exchange(self, client: Client) -> None:
        while not self.is_done:
            await self.epochs.exchange(client)
            await asyncio.sleep(0.01)

    def stored(self, sequence: int, *numbers: int, scope: str = SCOPE) -> Any:
        """Return a batch of the present epoch's blocks."""
        salt = engine_salt(SECRET, scope, self.epochs.of(scope))
        named = structs.replace(IDENTITY, scope=salt_scope(salt))
        changed = batch(sequence, stored=blocks(*numbers))
        return structs.replace(changed, namespace=namespace_of(named))

    async def held(self) -> int:
        """Return how many residency sets the replica has."""
        return len(await run_command(self.backend.client, "SMEMBERS", ReplicaKeys(A).sets))


@pytest.fixture
async def stand(
    redis_backend: RedisBackend,
    valkey: ValkeyProcess,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Stand]:
    monkeypatch.setattr("router.epoch.RECHECK_S", 0.05)
    monkeypatch.setattr("router.epoch.RETRY_S", 0.05)
    (tmp_path / "kept").mkdir()
    stand = Stand(redis_backend, valkey.url, EpochFile(tmp_path / "kept" / "epochs.json"))
    client = command_client(valkey.settings)
    exchanging = asyncio.create_task(stand.exchange(client))
    running = asyncio.create_task(stand.epochs.run())
    await stand.epochs.heard()
    await redis_backend.writer.register(record())
    yield stand
    stand.is_done = True
    await exchanging
    async with stand.epochs.lock:
        running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    await client.aclose()


async def test_blocks_of_requests_that_were_under_way_go_too(stand: Stand) -> None:
    """S-10: an engine tells of them after the deletion; other scopes keep theirs."""
    late = stand.stored(3, 7)
    await stand.backend.writer.apply([stand.stored(1, 1, 2)])
    await stand.backend.writer.apply([stand.stored(2, 5, scope="tenant:b")])
    renewal = await stand.epochs.renew(SCOPE, keeps_previous=False)
    assert renewal.index is not None
    assert (renewal.index.keys, renewal.index.blocks) == (1, 2)
    assert (renewal.is_shared, renewal.is_kept) == (True, True)
    async with stand.epochs.lock:  # nothing is taken away meanwhile
        await stand.backend.writer.apply([late])
        assert await stand.held() == 2
    async with asyncio.timeout(20):
        while await stand.held() != 1:  # noqa: ASYNC110 - the store is polled
            await asyncio.sleep(0.01)


async def test_what_is_local_goes_once_with_the_names_that_ended(stand: Stand) -> None:
    """A rotation ends nothing; the deletion after it ends both epochs."""
    await eventually(lambda: stand.epochs.book.epoch(SCOPE).counter == 1)
    stand.forgotten.clear()
    before = stand.epochs.live_digests(SCOPE)
    assert (await stand.epochs.renew(SCOPE, keeps_previous=True)).local == Forgotten()
    live = stand.epochs.live_digests(SCOPE)
    assert live[1:] == before
    renewal = await stand.epochs.renew(SCOPE, keeps_previous=False)
    assert renewal.local == Forgotten(placements=3, roots=2)
    assert stand.forgotten == [(SCOPE, tuple(live))]


async def test_a_disk_that_takes_nothing_is_told_and_tried_again(
    stand: Stand, tmp_path: Path
) -> None:
    """The epoch counts all the same; the file has it once it can be written."""
    kept, away = tmp_path / "kept", tmp_path / "away"
    await eventually((kept / "epochs.json").exists)
    kept.rename(away)
    renewal = await stand.epochs.renew(SCOPE, keeps_previous=True)
    assert (renewal.is_kept, renewal.is_shared) == (False, True)
    await asyncio.sleep(0.2)  # it was tried again, in vain
    away.rename(kept)

    def is_kept() -> bool:
        return EpochFile(kept / "epochs.json").read()[SCOPE].counter == renewal.epoch

    await eventually(is_kept)


async def test_nothing_is_done_that_cannot_be_written_down(stand: Stand, tmp_path: Path) -> None:
    """S-12: no epoch begins without a record; one that began is answered as such."""
    log = AuditLog(tmp_path / "audit.jsonl", "r", time.time)
    request: Any = SimpleNamespace(
        path="/admin/scopes/tenant:a", target="/admin/scopes/tenant:a", peer="::1", headers=HEADERS
    )
    parts: Any = {"epochs": stand.epochs, "fleet": None, "pool": None}
    admin = ScopeAdmin(ScopeAdminParts(**parts, audit=log))
    answer = await admin.delete(request)
    assert answer.status == 200
    before = stand.epochs.book.epoch(SCOPE)
    await log.aclose()
    with pytest.raises(AuditFailedError, match="nothing was done"):
        await admin.delete(request)
    assert stand.epochs.book.epoch(SCOPE) == before
    records = [json.loads(one) for one in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert [one["result"] for one in records] == ["begun", "done"]
    assert records[1]["actor"] == "::1"
    assert SECRET.decode() not in str(records)
    assert before.name not in str(records)


async def test_without_a_file_a_scope_has_the_nameless_epoch_and_learns_of_others(
    stand: Stand, redis_backend: RedisBackend, valkey: ValkeyProcess
) -> None:
    """It renews nothing itself, but no router goes on with what another one has ended."""
    lone = Stand(redis_backend, valkey.url, None)
    assert lone.epochs.of("tenant:new") == ""
    request: Any = SimpleNamespace(
        path="/admin/scopes/tenant:a", target="/admin/scopes/tenant:a", peer="::1", headers=HEADERS
    )
    parts: Any = {"epochs": lone.epochs, "fleet": None, "pool": None}
    with pytest.raises(ConflictError, match="tenants_state_file"):
        await ScopeAdmin(ScopeAdminParts(**parts, audit=None)).delete(request)
    await stand.epochs.renew(SCOPE, keeps_previous=False)
    await lone.epochs.exchange(redis_backend.client)
    assert lone.epochs.of(SCOPE) == stand.epochs.of(SCOPE)


async def test_a_router_drops_what_it_placed_for_the_scope_and_what_it_remembers_of_texts(
    stand: Stand,
) -> None:
    """S-10: placements of that scope only; roots and keys of what ended; texts of all."""
    calls: list[Any] = []
    books = [ScopedPlacements(600.0, {}), ScopedPlacements(600.0, {})]
    for book in books:
        for scope in (SCOPE, "tenant:b"):
            book.of(scope).place(A, blocks(1, 2), 0.0)

    def forget(ended: Collection[str]) -> int:
        calls.append(ended)
        return len(ended)

    app: Any = SimpleNamespace(
        know=SimpleNamespace(
            pending=books[0],
            guessed=books[1],
            placed=None,
            learned=SimpleNamespace(clear=lambda: calls.append("learned")),
        ),
        chooser=SimpleNamespace(outlook=SimpleNamespace(forget=forget)),
        prompts=SimpleNamespace(forget=lambda: calls.append("prompts")),
        tokens=SimpleNamespace(forget=lambda: calls.append("tokens")),
        reader=SimpleNamespace(replicas=dict),
        warm_ups=SimpleNamespace(texts=SimpleNamespace(forget=calls.append)),
    )
    Lifecycle(app, stand.epochs)
    assert stand.epochs.view is not None
    forgotten = stand.epochs.view.forget(SCOPE, ("salt:1", "salt:2"))
    assert forgotten == Forgotten(placements=4, roots=2)
    assert calls == [("salt:1", "salt:2"), "prompts", "tokens", "learned", SCOPE]
    assert [book.resident(A) for book in books] == [2, 2]
