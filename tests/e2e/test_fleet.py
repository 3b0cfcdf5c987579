"""What is in flight, across processes: clients that leave, routers that die, replicas that go."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from state.timing import StoreTiming
from support.conversation import ask, sdk
from support.fleet import MODEL, FleetPlan, LocalFleet, Router, until
from support.raw import RawClient
from support.stage import allow_sockets, chat_body, post_to
from support.tokenizer import write_tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.asyncio(loop_scope="module")

LEASE_TTL_S = StoreTiming().lease_ttl_s
ENDLESS_TOKENS = 4_000
"""At 6 ms a token this runs for longer than any test."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalFleet]:
    allow_sockets()
    folder = tmp_path_factory.mktemp("fleet")
    plan = FleetPlan(
        tokenizer=write_tokenizer(folder / "tokenizer"),
        preset="llama-8b-h100",
        pages=32_768,
        config={"receipts": True},
    )
    async with LocalFleet(folder, plan) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def second(fleet: LocalFleet) -> AsyncIterator[Router]:
    """Start another router on the same state, for tests that may kill it."""
    router = await fleet.start_router()
    await fleet.all_up(router)
    yield router
    if router.child.is_alive():
        assert await asyncio.to_thread(fleet.processes.stop, router.child) == 0


async def open_streams(
    router: Router, count: int, output_tokens: int = ENDLESS_TOKENS
) -> list[RawClient]:
    """Start streams and wait for the first event of each."""
    clients = [await RawClient.connect(router.port) for _ in range(count)]
    for number, client in enumerate(clients):
        body = chat_body(f"{number} foxes", max_tokens=output_tokens, ignore_eos=True)
        client.send(post_to(body))
    for client in clients:
        await client.reader.readuntil(b"data: ")
    return clients


def abort(clients: list[RawClient]) -> None:
    for client in clients:
        client.abort()


async def elsewhere(fleet: LocalFleet, router: Router) -> int:
    """Return what ``router`` knows of the requests of other routers."""
    return sum(one["inflight_elsewhere"] for one in (await fleet.seen(router)).values())


async def test_four_hundred_clients_that_leave_mid_stream_leave_nothing_behind(
    fleet: LocalFleet,
) -> None:
    """A18, C01: no lease, no request on a worker, no page held."""
    for _ in range(8):
        clients = await open_streams(fleet.router, 50)
        assert await fleet.inflight() == 50
        abort(clients)
        await fleet.settled()
    gauges = await fleet.gauges(fleet.router.url)
    assert gauges["warmroute_inflight_requests"] == 0


async def test_a_client_that_leaves_during_prefill_frees_the_worker(fleet: LocalFleet) -> None:
    """C10, A29: before the first byte, with half a second of prefill ahead."""

    async def generated() -> float:
        each = [await fleet.gauges(replica.url) for replica in fleet.replicas]
        return sum(one["vllm:generation_tokens_total"] for one in each)

    before = await generated()
    client = await RawClient.connect(fleet.router.port)
    client.send(post_to(chat_body("lazy dogs " * 30_000, max_tokens=1, x=1)))

    async def is_prefilling() -> bool:
        return sum([await fleet.in_engine(replica) for replica in fleet.replicas]) == 1

    await until(is_prefilling, "the prompt is on a worker")
    client.abort()
    await fleet.settled()
    assert await generated() == before, "its prompt was not computed to the end"
    [record] = await fleet.decisions(1)
    assert (record["status"], record["ttft_s"]) == (499, None)


async def test_only_the_request_whose_client_leaves_is_aborted(fleet: LocalFleet) -> None:
    """A45: ids that begin alike, and one request with several answers."""
    clients = {name: await RawClient.connect(fleet.router.port) for name in ("abc", "abcd")}
    for name, client in clients.items():
        body = chat_body(max_tokens=150, ignore_eos=True, n=3 if name == "abc" else 1)
        client.send(post_to(body, x_request_id=name))
    for client in clients.values():
        await client.reader.readuntil(b"data: ")
    clients["abc"].abort()

    async def is_one_left() -> bool:
        return sum([await fleet.in_engine(replica) for replica in fleet.replicas]) == 1

    await until(is_one_left, "all answers of the first request end")
    rest = await clients["abcd"].reader.readuntil(b"data: [DONE]\n\n")
    assert rest.count(b"data: ") > 100
    await clients["abcd"].close()
    await fleet.settled()
    assert (await fleet.decision("abc"))["outcome"] == "cancelled"
    assert (await fleet.decision("abcd"))["outcome"] == "done"


async def test_requests_of_a_killed_router_vanish_for_the_others(
    fleet: LocalFleet, second: Router
) -> None:
    """A22, C08: they count beyond the leases' time to live, until their router is gone."""
    clients = await open_streams(second, 50)

    async def are_seen() -> bool:
        return await elsewhere(fleet, fleet.router) == 50

    await until(are_seen, "the other router's requests")
    deadline_s = time.monotonic() + LEASE_TTL_S + 0.5
    while time.monotonic() < deadline_s:
        assert await are_seen()
        await asyncio.sleep(0.1)
    second.child.process.send_signal(signal.SIGKILL)
    second.child.process.wait()

    async def are_gone() -> bool:
        return await elsewhere(fleet, fleet.router) == 0

    await until(are_gone, "no requests of a dead router")
    abort(clients)
    await fleet.settled()


async def test_a_replica_that_goes_and_comes_back_starts_without_old_requests(
    fleet: LocalFleet,
) -> None:
    """A25, C06, C24: requests of its former life end without touching the count of the new one."""
    replica = fleet.replicas[1]
    assert await asyncio.to_thread(fleet.processes.stop, replica.sidecar) == 0
    flags = ("--drain-grace-s", "0")
    for _ in range(3):
        replica.sidecar = await fleet.start_sidecar(replica.name, replica.url, *flags).ready()
        await fleet.all_up(fleet.router)
        old = await open_streams(fleet.router, 8)
        before = (await fleet.seen())[replica.name]["inflight"]
        assert before > 0
        assert await asyncio.to_thread(fleet.processes.stop, replica.sidecar) == 0
        await fleet.all_up(fleet.router, replicas=1)
        replica.sidecar = await fleet.start_sidecar(replica.name, replica.url, *flags).ready()
        await fleet.all_up(fleet.router)
        assert (await fleet.seen())[replica.name]["inflight"] in {0, before}
        new = await open_streams(fleet.router, 8)
        abort(old)

        async def is_new_life() -> bool:
            return await fleet.inflight() == 8

        await until(is_new_life, "only the new requests count")
        assert all(one["inflight"] >= 0 for one in (await fleet.seen()).values())
        abort(new)
        await fleet.settled()
        assert await asyncio.to_thread(fleet.processes.stop, replica.sidecar) == 0
    replica.sidecar = await fleet.start_sidecar(replica.name, replica.url).ready()
    await fleet.all_up(fleet.router)


async def test_a_conversation_finds_its_worker_through_any_router(
    fleet: LocalFleet, second: Router
) -> None:
    """A89: turn 1 through one router, turn 2 through another."""
    async with sdk(fleet.router.url) as first_client, sdk(second.url) as second_client:
        for number in range(8):
            turns = [("user", f"Talk {number}: " + "quick brown foxes jump " * 1_500)]
            before = await fleet.seen(second)
            first = await ask(first_client, MODEL, turns)
            turns += [("assistant", first.text), ("user", "And then?")]
            told_blocks = before[first.replica]["resident_blocks"] + first.prompt_tokens // 64 - 1

            async def is_known(replica: str = first.replica, blocks: int = told_blocks) -> bool:
                seen = (await fleet.seen(second))[replica]
                return bool(seen["resident_blocks"] >= blocks and not seen["inflight_elsewhere"])

            await until(is_known, "the other router knows the prompt")
            again = await ask(second_client, MODEL, turns)
            assert again.replica == first.replica
            assert again.predicted_tokens >= first.prompt_tokens - 64
            assert abs(again.error_tokens) <= 64


async def test_a_router_that_is_told_to_stop_finishes_its_streams(fleet: LocalFleet) -> None:
    """Nothing new is accepted, what runs ends whole, the exit code is 0."""
    router = await fleet.start_router()
    await fleet.all_up(router)
    [client] = await open_streams(router, 1, output_tokens=150)
    router.child.process.send_signal(signal.SIGTERM)

    async def is_closed() -> bool:
        try:
            late = await RawClient.connect(router.port)
        except ConnectionError:
            return True
        await late.close()
        return False

    await until(is_closed, "the listener closed")
    assert router.child.is_alive()
    rest = await client.reader.readuntil(b"data: [DONE]\n\n")
    assert rest.count(b"data: ") > 100
    await client.close()
    assert await asyncio.to_thread(router.child.process.wait, 60) == 0


async def test_an_idle_router_stops_at_once(fleet: LocalFleet) -> None:
    """C30: SIGTERM without requests ends within seconds, with exit code 0."""
    router = await fleet.start_router()
    client = await RawClient.connect(router.port)
    assert await asyncio.to_thread(fleet.processes.stop, router.child) == 0
    assert await client.is_closed()
    await client.close()
