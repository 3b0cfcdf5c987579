"""Real processes, a real store, and somebody who may write to it but has not the key."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families

from state.client import command_client, run_command
from state.model import LeaseTotals, ModelIdentity, ReplicaId, ReplicaLoad
from state.redis_writer import RedisWriter
from state.schema import (
    ENTRY_FIELD,
    LEASES,
    ROUTER_INDEX,
    VALUE_FIELD,
    ReplicaKeys,
    change_entry,
    decode_record,
    encode_entry,
    encode_leases,
    encode_record,
    parts_of,
)
from state.seal import Kind, Seal
from state.setting_book import SettingDocument, encoded
from state.setting_store import DOCUMENT_KEY
from support.fleet import MODEL, FleetPlan, LocalFleet, Router, until
from support.fleet_state import batch, blocks, record

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from state.client import Client
    from support.valkey import ValkeyProcess

EVIL: Final = ReplicaId("evil")
VICTIM: Final = ReplicaId("w0")
ASKED: Final = 30
KEY: Final = b"s" * 48


class Trap:
    """An address of the attacker's: whoever connects is counted, and answered like an engine."""

    def __init__(self) -> None:
        self.connections = 0
        self.url = ""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        await reader.read(1024)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}")
        writer.close()


@asynccontextmanager
async def open_trap() -> AsyncIterator[Trap]:
    trap = Trap()
    server = await asyncio.start_server(trap.answer, "127.0.0.1", 0)
    trap.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield trap


def key_file(directory: Path) -> str:
    path = directory / "deployment.key"
    path.write_bytes(KEY)
    path.chmod(0o600)
    return str(path)


async def ask(fleet: LocalFleet, router: Router) -> int:
    body = {"model": MODEL, "prompt": "what is warm", "max_tokens": 1}
    async with fleet.http.post(f"{router.url}/v1/completions", json=body) as answer:
        await answer.read()
        return answer.status


async def counted(fleet: LocalFleet, router: Router) -> dict[str, float]:
    """Return how many values of each kind had no good seal."""
    async with fleet.http.get(f"{router.admin_url}/metrics") as answer:
        text = await answer.text()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "warmroute_unsealed_values_total":
                kind = sample.labels["kind"]
                found[kind] = found.get(kind, 0.0) + sample.value
    return found


async def announce(client: Client, url: str) -> RedisWriter:
    """Do what the sidecar of an engine of one's own does, but for the seals."""
    writer = RedisWriter(client, clock=time.monotonic, rng=random.Random(1))
    evil = structs.replace(
        record(EVIL), endpoint=url, identity=ModelIdentity(model=MODEL), has_events=False
    )
    await writer.register(evil)
    await writer.heartbeat(evil, ReplicaLoad(running=0, queued=0))
    return writer


async def forge(client: Client, url: str) -> None:
    """Write whatever a router reads, once."""
    await announce(client, url)
    keys = ReplicaKeys(VICTIM)
    held = await run_command(client, "HGET", keys.record, VALUE_FIELD)
    if held is not None:
        real = decode_record(held, VICTIM)
        assert real is not None
        altered = encode_record(structs.replace(real, endpoint=url))
        await run_command(client, "HSET", keys.record, VALUE_FIELD, altered)
        # A sealed record of somebody else's is none of the attacker's either.
        await run_command(client, "HSET", ReplicaKeys(EVIL).record, VALUE_FIELD, held)
        change = batch(1, stored=blocks(1, 2), replica=VICTIM, generation=real.generation)
        entry = encode_entry(change_entry(change, next(parts_of(change))))
        await run_command(client, "XADD", keys.changes, "*", ENTRY_FIELD, entry)
    busy = encode_leases({VICTIM: LeaseTotals(inflight=999)})
    await run_command(client, "HSET", LEASES, "forged", busy)
    await run_command(client, "ZADD", ROUTER_INDEX, round(time.time() * 1000), "forged")
    document = SettingDocument(
        version=99,
        settings={"policy": {"kind": "random"}},
        author="nobody",
        reason="a forgery",
        unix_s=1.0,
        previous=0,
    )
    await run_command(client, "SET", DOCUMENT_KEY, encoded(document).value)


async def test_who_only_writes_the_store_gets_no_request_and_changes_nothing(
    tmp_path: Path, valkey: ValkeyProcess
) -> None:
    """S-14: a replica of his own, the address of a real one, residency, leases and settings."""
    await valkey.flush()
    key = key_file(tmp_path)
    plan = FleetPlan(
        state_url=valkey.url,
        replicas=1,
        sidecar_flags=("--deployment-key-file", key),
        config={"deployment_key_file": key, "sealed_state": "require"},
    )
    client = command_client(valkey.settings)
    async with LocalFleet(tmp_path, plan) as fleet, open_trap() as trap:
        kinds = {"record", "change", "leases", "settings"}
        statuses: list[int] = []

        async def is_told() -> bool:
            await forge(client, trap.url)
            statuses.append(await ask(fleet, fleet.router))
            told = await counted(fleet, fleet.router)
            return all(told[kind] > 0 for kind in kinds)

        await until(is_told, "forgeries of each kind are counted")
        for _ in range(ASKED):
            await forge(client, trap.url)
            statuses.append(await ask(fleet, fleet.router))
        assert set(statuses) == {200}
        assert trap.connections == 0
        assert list(await fleet.seen()) == [VICTIM]
        settings = await fleet.get(f"{fleet.router.admin_url}/admin/settings")
        assert settings["version"] == 0
        log = fleet.router.child.log.read_text()
        for kind in kinds:
            assert log.count(f"values ({kind}) without a seal: ignored") == 1
        assert EVIL not in log
    await client.aclose()


async def test_without_a_key_the_same_announcement_is_believed(
    tmp_path: Path, valkey: ValkeyProcess
) -> None:
    """As ever: who may register is who may write to the store."""
    await valkey.flush()
    client = command_client(valkey.settings)
    plan = FleetPlan(state_url=valkey.url, replicas=1)
    async with LocalFleet(tmp_path, plan) as fleet, open_trap() as trap:
        assert await ask(fleet, fleet.router) == 200

        async def is_dialled() -> bool:
            await announce(client, trap.url)
            return trap.connections > 0

        await until(is_dialled, "the router dials what was announced")
        assert await counted(fleet, fleet.router) == {}
    await client.aclose()


async def test_seals_are_rolled_out_while_requests_go_on(
    tmp_path: Path, valkey: ValkeyProcess
) -> None:
    """Routers with the key first, then sidecars, then the routers that require seals."""
    await valkey.flush()
    key = key_file(tmp_path)
    plan = FleetPlan(state_url=valkey.url, replicas=1, config={"deployment_key_file": key})
    async with LocalFleet(tmp_path, plan) as fleet:
        replica, first = fleet.replicas[0], fleet.router
        assert await ask(fleet, first) == 200
        assert (await counted(fleet, first))["record"] > 0
        strict = await fleet.start_router(sealed_state="require")
        assert list(await fleet.seen(strict)) == []
        assert await asyncio.to_thread(fleet.processes.stop, replica.sidecar) == 0
        flags = ("--deployment-key-file", key)
        replica.sidecar = await fleet.start_sidecar(VICTIM, replica.url, *flags).ready(60.0)
        await fleet.all_up(strict)
        await fleet.all_up(first)
        assert [await ask(fleet, one) for one in (first, strict)] == [200, 200]

        client = command_client(valkey.settings)
        keys, seal = ReplicaKeys(VICTIM), Seal(KEY, time.time)
        held = await run_command(client, "HGET", keys.record, VALUE_FIELD)
        assert seal.opened(Kind.RECORD, keys.record, held).fault is None
        await client.aclose()
