"""Replicas from a file and from names, as a router finds them while both change."""

from __future__ import annotations

import json
import random
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import dns.rcode
import pytest

from router.config import decode_config
from router.discovery.directory import Bouncer, Directory, Shelf
from router.discovery.dns import DnsWatch
from router.discovery.file import FileWatch
from router.discovery.setting import DnsSource
from router.discovery.source import Discovery
from router.fleet import FleetTable
from router.registration_setting import RegistrationSettings
from state.memory import MemoryState
from state.model import RouterId
from support import fleet
from support.dns_server import DnsServer
from support.placed_engine import MODEL, TEXT, PlacedEngine
from support.placed_router import curl, placed, ran
from support.raw import with_both_loops

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

NAME = "engines.test"
KNOWN = {(NAME, "A"): ["10.0.0.1", "10.0.0.2"]}


def shelf_of(empty_looks: int = 2) -> Shelf:
    return Directory(empty_looks, lambda _: None).shelf("a source")


def urls(shelf: Shelf) -> list[str]:
    return [member.endpoint.url for member in shelf.members]


def is_lost(shelf: Shelf) -> bool:
    return shelf.fault is not None


def listed(*ports: int) -> str:
    return json.dumps([{"url": f"http://10.0.0.1:{port}"} for port in ports])


def replace(path: Path, text: str) -> None:
    """Write as the page says: beside it, then renamed."""
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.rename(path)


# A file.


async def test_a_file_is_read_again_when_it_changes_and_only_then(tmp_path: Path) -> None:
    path, shelf = tmp_path / "r.json", shelf_of()
    watch = FileWatch(str(path), 1.0, shelf)
    replace(path, listed(1, 2))
    await watch.look()
    assert urls(shelf) == ["http://10.0.0.1:1", "http://10.0.0.1:2"]
    before = shelf.members
    await watch.look()
    assert shelf.members is before
    replace(path, listed(3))
    await watch.look()
    assert urls(shelf) == ["http://10.0.0.1:3"]


@pytest.mark.parametrize(
    "text", ["- url: [", "- url: http://10.0.0.1:1\n- nonsense: 1", "\x00", "[" * 5000]
)
async def test_a_file_that_is_no_list_changes_nothing_until_it_is_one(
    tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, shelf = tmp_path / "r.yaml", shelf_of()
    watch = FileWatch(str(path), 1.0, shelf)
    replace(path, listed(1))
    await watch.look()
    replace(path, text)
    await watch.look()
    assert urls(shelf) == ["http://10.0.0.1:1"]
    assert is_lost(shelf)
    with monkeypatch.context() as patched:
        patched.setattr("router.discovery.file.members_of", None)
        await watch.look()  # the same text is not read again
    replace(path, listed(2))
    await watch.look()
    assert urls(shelf) == ["http://10.0.0.1:2"]
    assert not is_lost(shelf)


async def test_a_file_that_is_gone_or_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    path, shelf = tmp_path / "r.yaml", shelf_of()
    watch = FileWatch(str(path), 1.0, shelf)
    await watch.look()
    assert shelf.fault == "No such file or directory"
    replace(path, listed(1))
    await watch.look()
    path.unlink()
    await watch.look()
    assert urls(shelf) == ["http://10.0.0.1:1"]
    replace(path, listed(1))
    await watch.look()
    assert shelf.fault is None


async def test_a_file_that_comes_back_as_it_was_is_a_source_again(tmp_path: Path) -> None:
    path, aside, shelf = tmp_path / "r.yaml", tmp_path / "aside", shelf_of()
    watch = FileWatch(str(path), 1.0, shelf)
    replace(path, listed(1))
    await watch.look()
    path.rename(aside)
    await watch.look()
    assert is_lost(shelf)
    aside.rename(path)
    await watch.look()
    assert not is_lost(shelf)


async def test_an_empty_file_is_believed_at_the_second_look(tmp_path: Path) -> None:
    path, shelf = tmp_path / "r.yaml", shelf_of()
    watch = FileWatch(str(path), 1.0, shelf)
    replace(path, listed(1))
    await watch.look()
    replace(path, "[]")
    await watch.look()
    assert len(shelf.members) == 1
    await watch.look()
    assert urls(shelf) == []


async def test_a_file_of_any_length_is_not_read(tmp_path: Path) -> None:
    path, shelf = tmp_path / "r.yaml", shelf_of()
    path.write_bytes(b"#" * ((4 << 20) + 1))
    await FileWatch(str(path), 1.0, shelf).look()
    assert shelf.fault is not None
    assert "bytes" in shelf.fault


async def test_replicas_of_a_file_are_served_while_it_changes(tmp_path: Path) -> None:
    """A replica that joins the file gets requests, one that leaves it gets none; both are shown."""
    path = tmp_path / "replicas.yaml"
    chat = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hello"}]})
    async with PlacedEngine() as one, PlacedEngine() as other:
        path.write_text(f"- {{url: '{one.url}', name: one}}\n")
        settings = {"file": str(path), "file_interval_s": 0.05}
        async with placed(tmp_path, discovery=settings) as router:
            (view,) = await router.all_up()
            assert (view["replica"], view["source"], view["registered"]) == ("one", "file", False)
            told = await curl(
                "-H",
                "content-type: application/json",
                "-d",
                chat,
                f"{router.url}/v1/chat/completions",
            )
            assert TEXT in told
            replace(path, f"- {{url: '{other.url}', name: other}}\n")

            async def is_other() -> bool:
                return [each["replica"] for each in await router.all_up()] == ["other"]

            await fleet.until(is_other, "the other replica")
            await curl(
                "-H",
                "content-type: application/json",
                "-d",
                chat,
                f"{router.url}/v1/chat/completions",
            )
            assert (len(one.hosts), len(other.hosts)) == (1, 1)
            command = (sys.executable, "-m", "warmroute", "replicas", "--admin", router.admin_url)
            status, out, error = await ran(*command)
            assert status == 0, error
            assert "told by     file" in out


# Names.


@asynccontextmanager
async def watched(
    records: dict[tuple[str, str], list[str]], **settings: Any
) -> AsyncIterator[tuple[DnsServer, Shelf, DnsWatch]]:
    async with DnsServer(dict(records)) as server:
        told: dict[str, Any] = {"name": NAME, "port": 8000, "timeout_s": 5.0} | settings
        source = DnsSource(**told, servers=(server.address,))
        shelf = shelf_of()
        yield server, shelf, DnsWatch(source, shelf, Bouncer(RegistrationSettings()))


@with_both_loops
async def test_every_address_of_a_name_is_a_replica() -> None:
    records = {**KNOWN, (NAME, "AAAA"): ["fd00::1"]}
    async with watched(records) as (server, shelf, watch):
        await watch.look()
        assert urls(shelf) == [
            "http://10.0.0.1:8000",
            "http://10.0.0.2:8000",
            "http://[fd00::1]:8000",
        ]
        assert {member.source for member in shelf.members} == {"dns"}
        server.records[NAME, "A"] = ["10.0.0.2", "10.0.0.3"]
        del server.records[NAME, "AAAA"]
        await watch.look()
        assert urls(shelf) == ["http://10.0.0.2:8000", "http://10.0.0.3:8000"]


@with_both_loops
async def test_srv_records_name_hosts_and_their_ports() -> None:
    records = {
        (NAME, "SRV"): ["0 1 8001 a.test.", "0 1 8002 b.test.", "0 0 0 ."],
        ("a.test", "A"): ["10.0.0.1"],
        ("b.test", "A"): ["10.0.0.2"],
    }
    async with watched(records, port=None, scheme="https") as (server, shelf, watch):
        await watch.look()
        assert {name for _, name, _ in server.asked} == {NAME, "a.test", "b.test"}
        assert urls(shelf) == ["https://10.0.0.1:8001", "https://10.0.0.2:8002"]


@pytest.mark.parametrize(("ttl_s", "pause_s"), [(0, 1.0), (7, 7.0), (3_600, 30.0)])
async def test_a_name_is_looked_up_again_when_its_time_has_passed(
    ttl_s: int, pause_s: float
) -> None:
    async with watched(KNOWN) as (server, _, watch):
        server.ttl_s = ttl_s
        assert await watch.look() == pause_s


async def test_a_name_that_is_no_more_is_believed_at_the_second_look() -> None:
    async with watched(KNOWN) as (server, shelf, watch):
        await watch.look()
        server.records.clear()
        assert await watch.look() == 1.0
        assert len(shelf.members) == 2
        await watch.look()
        assert urls(shelf) == []


async def test_a_name_without_addresses_counts_as_nobody_too() -> None:
    async with watched(KNOWN) as (server, shelf, watch):
        await watch.look()
        server.records = {(NAME, "TXT"): ['"no address"']}
        await watch.look()
        await watch.look()
        assert urls(shelf) == []
        assert not is_lost(shelf)


@pytest.mark.parametrize("silent", ["A", "AAAA"])
async def test_a_question_that_nobody_answers_changes_nothing(silent: str) -> None:
    """Half an answer is none: the addresses of the other kind are not the whole fleet."""
    async with watched(KNOWN, timeout_s=0.3) as (server, shelf, watch):
        await watch.look()
        server.records[NAME, "A"] = ["10.0.0.9"]
        server.silent.add(silent)
        for _ in range(3):
            await watch.look()
        assert len(shelf.members) == 2
        assert shelf.fault is not None
        assert NAME in shelf.fault
        server.silent.clear()
        await watch.look()
        assert urls(shelf) == ["http://10.0.0.9:8000"]


async def test_a_resolver_that_fails_changes_nothing() -> None:
    async with watched(KNOWN) as (server, shelf, watch):
        await watch.look()
        server.rcode = dns.rcode.SERVFAIL
        for _ in range(3):
            await watch.look()
        assert len(shelf.members) == 2
        assert shelf.fault is not None


@with_both_loops
async def test_an_answer_that_was_cut_off_is_asked_for_over_tcp() -> None:
    many = [f"10.0.1.{number}" for number in range(1, 101)]
    async with watched({(NAME, "A"): many}) as (server, shelf, watch):
        server.truncated.add("A")
        await watch.look()
        assert len(shelf.members) == 100
        assert ("tcp", NAME, "A") in server.asked


async def test_an_address_that_no_replica_has_is_left_out() -> None:
    """Who can write a record must not make the router call a cloud's metadata service."""
    async with watched({(NAME, "A"): ["169.254.169.254", "10.0.0.1"]}) as (_, shelf, watch):
        await watch.look()
        assert urls(shelf) == ["http://10.0.0.1:8000"]


async def test_a_router_serves_what_a_name_stands_for(tmp_path: Path) -> None:
    async with PlacedEngine() as engine, DnsServer({(NAME, "A"): ["127.0.0.1"]}) as server:
        port = int(engine.url.rpartition(":")[2])
        source = {"name": NAME, "port": port, "servers": [server.address]}
        async with placed(tmp_path, discovery={"dns": [source]}) as router:
            (view,) = await router.all_up()
            assert (view["source"], view["endpoint"]) == ("dns", engine.url)


def test_no_source_means_no_loop_and_each_source_has_its_own() -> None:
    table = FleetTable(MemoryState(clock=lambda: 0.0).reader(RouterId("me")), ())
    rng = random.Random(1)
    assert Discovery(decode_config({}), table, rng).loops == {}
    dns_names = [{"name": NAME, "port": 1}, {"name": NAME, "port": 2}]
    all_of_them = {"file": "/r.yaml", "dns": dns_names, "kubernetes": {"service": "vllm"}}
    assert list(Discovery(decode_config({"discovery": all_of_them}), table, rng).loops) == [
        "replicas of r.yaml",
        "replicas of service vllm",
        f"replicas of {NAME} [0]",
        f"replicas of {NAME} [1]",
    ]
