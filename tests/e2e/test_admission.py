"""Limits, queue, rates and overload of a router process: who is served, who is to come again."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import openai
import pytest

from support.fleet import MODEL, FleetPlan, LocalFleet, until
from support.raw import RawClient
from support.stage import ANSWER, Actor, Stage, chat_body, post_to, staged_router
from support.tenancy import key_of, tenant, write_secret
from support.tokenizer import write_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from support.raw import Received, Reply, Talk

BODY = chat_body(stream=False)


class Silent:
    """Answers one kept request for each ``let``, the oldest first."""

    def __init__(self) -> None:
        self.slots = asyncio.Semaphore(0)

    async def answer(self, talk: Talk, _: Received) -> None:
        await self.slots.acquire()
        await talk.say(ANSWER)

    def let(self, count: int = 1) -> None:
        for _ in range(count):
            self.slots.release()


async def gauge(stage: Stage, name: str) -> float:
    url = stage.fleet.router.admin_url
    return (await stage.fleet.gauges(url)).get(f"warmroute_{name}", 0.0)


async def held(stage: Stage, count: int) -> None:
    async def is_so() -> bool:
        return await gauge(stage, "held_requests") == count

    await until(is_so, f"{count} requests wait")


async def arrived(stage: Stage, count: int) -> None:
    async def is_so() -> bool:
        return len(stage.posts()) == count

    await until(is_so, f"{count} requests at the replicas")


async def sent(stage: Stage, request: bytes) -> RawClient:
    client = await stage.client()
    client.send(request)
    return client


def code_of(reply: Reply) -> str:
    return str(json.loads(reply.body)["error"]["code"])


def from_tenant(name: str, body: bytes = BODY, **headers: str) -> bytes:
    return post_to(body, Authorization=f"Bearer {key_of(name)}", **headers)


async def sheds(stage: Stage, reason: str) -> int:
    url = f"{stage.fleet.router.admin_url}/metrics"
    async with stage.fleet.http.get(url) as answer:
        lines = (await answer.text()).splitlines()
    found = [line for line in lines if line.startswith("warmroute_sheds_total")]
    return sum(int(float(line.split()[-1])) for line in found if f'reason="{reason}"' in line)


async def test_of_a_burst_over_the_limit_the_excess_is_refused_at_once_and_the_rest_finishes(
    tmp_path: Path,
) -> None:
    """C-04: a bounded number at each replica; others wait, and no more wait than may."""
    silent = Silent()
    actors = [Actor(name, answer=silent.answer) for name in "ab"]
    limits = {"max_inflight_per_replica": 2, "pending": 3, "queue_timeout_s": 60.0}
    async with staged_router(tmp_path, actors, admission=limits) as stage:
        running = [await sent(stage, post_to(BODY)) for _ in range(4)]
        await arrived(stage, 4)
        assert [len(actor.posts()) for actor in actors] == [2, 2]
        waiting = [await sent(stage, post_to(BODY)) for _ in range(3)]
        await held(stage, 3)
        refused = [await stage.ask(post_to(BODY)) for _ in range(5)]
        assert {(one.status, code_of(one)) for one in refused} == {(503, "queue_full")}
        assert all(one.all(b"retry-after") == [b"1"] for one in refused)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n"
        assert (await stage.ask(head)).status == 503, "before its body came"
        told = await stage.fleet.get(f"{stage.fleet.router.admin_url}/admin/router")
        admission = told["admission"]
        assert (admission["inflight"], admission["places"], admission["waiting"]) == (4, 4, 3)
        assert admission["replicas"]["a"] == {"inflight": 2, "limit": 2, "slowness": None}
        ready = await stage.fleet.get(f"{stage.fleet.router.url}/readyz")
        assert (ready["ready"], ready["waiting"], ready["overload"]) == (True, 3, "normal")
        silent.let(7)
        replies = [await client.reply() for client in running + waiting]
        assert [reply.status for reply in replies] == [200] * 7
        assert len(stage.posts()) == 7
        assert await sheds(stage, "queue_full") == 6
        await held(stage, 0)
        assert await gauge(stage, "admission_inflight") == 0


async def test_a_client_that_leaves_the_queue_makes_room_and_a_late_one_is_told_so(
    tmp_path: Path,
) -> None:
    silent = Silent()
    limits = {"max_inflight": 1, "pending": 1, "queue_timeout_s": 3.0}
    async with staged_router(
        tmp_path, [Actor("a", answer=silent.answer)], admission=limits
    ) as stage:
        first = await sent(stage, post_to(BODY))
        await arrived(stage, 1)
        leaver = await sent(stage, post_to(BODY))
        await held(stage, 1)
        leaver.abort()
        await held(stage, 0)
        late = await stage.ask(post_to(BODY))
        assert (late.status, code_of(late)) == (503, "queue_timeout")
        silent.let()
        assert (await first.reply()).status == 200
        assert len(stage.posts()) == 1


async def test_tenants_take_turns_and_a_higher_priority_goes_first(tmp_path: Path) -> None:
    """A flood of one tenant; another one's requests, and an important one's, come later."""
    silent = Silent()
    tenants = [tenant("flood"), tenant("victim"), tenant("vip", priority="high")]
    limits = {"max_inflight": 1, "pending": 64, "client_priority": True, "queue_timeout_s": 60.0}
    async with staged_router(
        tmp_path,
        [Actor("a", answer=silent.answer)],
        admission=limits,
        tenants=tenants,
        deployment_key_file=str(write_secret(tmp_path)),
    ) as stage:
        clients = [await sent(stage, from_tenant("flood", x_request_id="first"))]
        await arrived(stage, 1)
        clients += [
            await sent(stage, from_tenant("flood", x_request_id=f"flood{number}"))
            for number in range(12)
        ]
        await held(stage, 12)
        clients += [
            await sent(stage, from_tenant("victim", x_request_id=f"victim{number}"))
            for number in range(3)
        ]
        humble = from_tenant("vip", x_request_id="humble", x_warmroute_priority="low")
        clients.append(await sent(stage, humble))
        await held(stage, 16)
        clients.append(await sent(stage, from_tenant("vip", x_request_id="vip")))
        await held(stage, 17)
        for count in range(2, len(clients) + 1):
            silent.let()
            await arrived(stage, count)
        silent.let()
        for client in clients:
            assert (await client.reply()).status == 200
        order = [one.all(b"x-request-id")[0].decode() for one in stage.posts()]
        assert order[:2] == ["first", "vip"]
        assert max(order.index(f"victim{number}") for number in range(3)) <= 9
        assert order[-1] == "humble"
        assert not any(one.all(b"x-warmroute-priority") for one in stage.posts())


async def test_a_rate_is_told_in_headers_and_the_openai_sdk_waits_as_it_is_told(
    tmp_path: Path,
) -> None:
    tenants = [
        tenant("a", rate={"requests_per_min": 6, "burst_s": 10}),
        tenant("sdk", rate={"requests_per_min": 20, "burst_s": 3}),
        tenant("b", rate={"tokens_per_min": 60, "burst_s": 1}),
        tenant("c"),
    ]
    usage = b'{"object":"chat.completion","id":"x","created":1,"model":"m","choices":[],'
    usage += b'"usage":{"prompt_tokens":2,"completion_tokens":30,"total_tokens":32}}'

    async def answer(talk: Talk, _: Received) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        await talk.say(head % len(usage) + usage)

    async with staged_router(
        tmp_path,
        [Actor("r", answer=answer)],
        tenants=tenants,
        deployment_key_file=str(write_secret(tmp_path)),
    ) as stage:
        first, second = [await stage.ask(from_tenant("a")) for _ in range(2)]
        assert first.all(b"x-ratelimit-limit-requests") == [b"1"]
        assert first.all(b"x-ratelimit-remaining-requests") == [b"0"]
        assert (second.status, code_of(second)) == (429, "rate_limit_exceeded")
        assert json.loads(second.body)["error"]["type"] == "rate_limit_exceeded"
        assert 5 < int(second.all(b"retry-after")[0]) <= 10
        assert second.all(b"x-ratelimit-remaining-requests") == [b"0"]
        replies = [await stage.ask(from_tenant("b")) for _ in range(2)]
        assert [reply.status for reply in replies] == [200, 429], "30 tokens of 1 were had"
        assert int(replies[1].all(b"retry-after")[0]) > 20
        assert [(await stage.ask(from_tenant("c"))).status for _ in range(3)] == [200] * 3
        url = f"{stage.fleet.router.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=key_of("sdk"), max_retries=5) as client:
            messages: Any = [{"role": "user", "content": "hello"}]
            for _ in range(2):
                await client.chat.completions.create(model=MODEL, messages=messages)
        assert await sheds(stage, "rate_requests") >= 2
        assert await sheds(stage, "rate_tokens") == 1


async def test_two_routers_share_a_rate(tmp_path: Path) -> None:
    tenants = [tenant("a", rate={"requests_per_min": 600, "burst_s": 1})]
    config: Any = {"tenants": tenants, "deployment_key_file": str(write_secret(tmp_path))}
    async with staged_router(tmp_path, [Actor("r")], **config) as stage:
        fleet = stage.fleet

        async def told() -> str:
            return str((await stage.ask(from_tenant("a"))).all(b"x-ratelimit-limit-requests")[0])

        assert await told() == "b'10'"
        second = await fleet.start_router()

        async def are_two() -> bool:
            return await gauge(stage, "live_routers") == 2

        await until(are_two, "both routers know of each other")
        assert await told() == "b'5'"
        await asyncio.to_thread(fleet.processes.stop, second.child)

        async def is_one() -> bool:
            return await gauge(stage, "live_routers") == 1

        await until(is_one, "the other router took itself off the board")


@pytest.mark.parametrize(
    ("rung", "statuses", "connection"),
    [
        ("shed_low", (429, 200), []),
        ("close", (429, 200), [b"close"]),
        ("refuse", (503, 503), [b"close"]),
    ],
)
async def test_a_router_short_of_memory_sheds_what_matters_least(
    tmp_path: Path, rung: str, statuses: tuple[int, int], connection: list[bytes]
) -> None:
    """C-17, with thresholds that any process is beyond; health is answered on every rung."""
    tenants = [tenant("low", priority="low"), tenant("other")]
    overload = {"memory_bytes": 1 << 30, "memory": {rung: 0.001}}
    async with staged_router(
        tmp_path,
        [Actor("r")],
        admission={"overload": overload},
        tenants=tenants,
        deployment_key_file=str(write_secret(tmp_path)),
    ) as stage:

        async def is_there() -> bool:
            told = await stage.fleet.get(f"{stage.fleet.router.url}/readyz")
            return bool(told["overload"] == rung)

        await until(is_there, f"rung {rung}")
        low, other = [await stage.ask(from_tenant(name)) for name in ("low", "other")]
        assert (low.status, other.status) == statuses
        assert code_of(low) == "overload"
        assert low.all(b"retry-after") == [b"1"]
        assert other.all(b"connection") == connection
        log = stage.fleet.router.child.log.read_text()
        assert log.count("router.overload: ") == 1
        assert f"rung {rung} after normal: memory " in log


async def test_a_limit_is_learned_from_a_real_engine_and_nobody_is_lost_meanwhile(
    tmp_path: Path,
) -> None:
    """More at a time than the limit starts with; all are answered, and the limit is told."""
    plan = FleetPlan(
        replicas=1,
        preset="llama-70b-fp8-2xh100",
        speed_up=20.0,
        tokenizer=write_tokenizer(tmp_path / "tokenizer"),
        config={"admission": {"learned": True, "learning": {"initial": 4}}},
    )
    async with LocalFleet(tmp_path, plan) as fleet:

        async def ask(number: int) -> int:
            body = chat_body(f"{number} " + "quick brown foxes " * 200, max_tokens=4)
            client = await RawClient.connect(fleet.router.port)
            client.send(post_to(body))
            reply = await client.reply()
            await client.close()
            return reply.status if reply.is_complete else 0

        statuses = await asyncio.gather(*map(ask, range(60)))
        assert statuses == [200] * 60
        told = await fleet.get(f"{fleet.router.admin_url}/admin/router")
        places = told["admission"]["replicas"]["w0"]
        assert places["limit"] >= 4
        assert places["slowness"] > 0
        assert (told["admission"]["inflight"], told["admission"]["waiting"]) == (0, 0)
        gauges = await fleet.gauges(fleet.router.admin_url)
        assert gauges["warmroute_replica_limit"] == places["limit"]
        assert gauges["warmroute_holds_total"] > 0
