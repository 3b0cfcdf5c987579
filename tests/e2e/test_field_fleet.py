"""Field cases of a fleet in bad shape, and of answers that are the router's own."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from support.fleet import until
from support.raw import FakeReplica, Received, Talk, sized
from support.stage import ANSWER, Actor, Stage, chat_body, post_to, staged_router

if TYPE_CHECKING:
    from pathlib import Path

    from support.fleet import Router

STUCK = 11
TIMEOUT_S = 4.0
"""Of a check. One after the other these would take twice the time that is waited."""
CHAT = "/v1/chat/completions"


class Stuck:
    """Takes connections and requests, checks among them, and never answers."""

    def __init__(self) -> None:
        self.replica = FakeReplica(self.play)

    @staticmethod
    async def play(talk: Talk) -> None:
        """Read and stay silent."""
        await talk.request()
        await talk.until_gone()


async def standing(stage: Stage, name: str, router: Router | None = None) -> str:
    """Return what a router makes of a replica."""
    found: dict[str, Any] = (await stage.fleet.seen(router))[name]["standing"]
    return str(found["standing"])


async def test_replicas_that_are_stuck_hold_up_neither_a_start_nor_the_checks_of_others(
    tmp_path: Path,
) -> None:
    """C18, C26: eleven that never answer, there from the start, and one that goes and comes."""
    good, stuck = Actor("good"), [Stuck() for _ in range(STUCK)]
    dialled = [await one.replica.start() for one in stuck]
    try:
        async with staged_router(tmp_path, [good]) as stage:
            replicas = [
                {"url": f"http://{one.authority}", "name": f"stuck{number}"}
                for number, one in enumerate(dialled)
            ]
            replicas.append({"url": good.url, "name": good.name})
            health = {"interval_s": 0.2, "timeout_s": TIMEOUT_S}
            router = await stage.fleet.start_router(replicas=replicas, health=health)
            stage.fleet.routers.append(router)
            await until_standing(stage, "up", router)
            good.is_healthy = False
            await until_standing(stage, "down", router)
            good.is_healthy = True
            await until_standing(stage, "slow_start", router)
            for _ in range(8):
                url = f"{router.url}{CHAT}"
                body = json.loads(chat_body(stream=False))
                async with stage.fleet.http.post(url, json=body) as answer:
                    assert answer.status == 200
            assert {await standing(stage, f"stuck{n}", router) for n in range(STUCK)} == {"down"}
    finally:
        for one in stuck:
            await one.replica.stop()


async def until_standing(stage: Stage, wanted: str, router: Router) -> None:
    """Wait until the good replica is something."""

    async def is_so() -> bool:
        return await standing(stage, "good", router) == wanted

    await until(is_so, f"the good one is {wanted}", STUCK * TIMEOUT_S / 2)


async def test_a_replica_that_takes_requests_and_drops_them_is_remembered_between_requests(
    tmp_path: Path,
) -> None:
    """C25: after five failures in a row nobody is sent there, although its checks go well."""

    async def drop(talk: Talk, _: Received) -> None:
        talk.writer.transport.abort()
        raise EOFError

    bad, good = Actor("bad"), Actor("good")
    bad.answer = drop
    policy = {"kind": "round_robin"}
    async with staged_router(tmp_path, [bad, good], policy=policy, receipts=True) as stage:
        replies = [await stage.ask(post_to(chat_body(stream=False))) for _ in range(30)]
        assert await standing(stage, "bad") == "ejected"
        assert len(bad.posts()) <= 10  # each at most once more, on a fresh connection
        assert [reply.status for reply in replies].count(200) == 25
        assert {reply.status for reply in replies[12:]} == {200}


async def counted(stage: Stage) -> float:
    """Return how many requests the router counted."""
    gauges = await stage.fleet.gauges(stage.fleet.router.admin_url)
    return sum(value for name, value in gauges.items() if name.startswith("warmroute_requests"))


async def test_an_answer_of_the_router_itself_is_counted_once_and_blames_no_replica(
    tmp_path: Path,
) -> None:
    """C60: with its own words, which no reader of replicas' answers touches."""
    actor = Actor("a")
    async with staged_router(tmp_path, [actor], receipts=True) as stage:
        for number, (body, status) in enumerate(
            ((b"{", 400), (chat_body(stream=False, model="unknown"), 404))
        ):
            before = await counted(stage)
            reply = await stage.ask(post_to(body, CHAT, x_request_id=f"own-{number}"))
            assert reply.status == status
            assert set(json.loads(reply.body)["error"]) >= {"message", "type", "code"}
            assert not reply.all(b"x-warmroute-replica")
            assert await counted(stage) == before + 1
            record = await stage.fleet.decision(f"own-{number}")
            assert (record["attempts"], record["status"]) == ([], status)
        assert actor.posts() == []
        assert await standing(stage, "a") == "up"


async def test_lengths_and_encodings_of_answers_are_those_of_their_bytes(tmp_path: Path) -> None:
    """C62: an empty compressed body passes; an error of the router's own has no encoding."""
    empty = sized(b"").replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n", 1)
    broken = ANSWER.replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\nBad\x01: 1\r\n\r\n", 1)
    answers = iter((empty, broken))

    async def answer(talk: Talk, _: Received) -> None:
        await talk.say(next(answers))

    actor = Actor("a")
    actor.answer = answer
    async with staged_router(tmp_path, [actor]) as stage:
        reply = await stage.ask(post_to(chat_body(stream=False)))
        assert (reply.status, reply.body) == (200, b"")
        assert reply.all(b"content-encoding") == [b"gzip"]
        reply = await stage.ask(post_to(chat_body(stream=False)))
        assert reply.status == 502
        assert reply.all(b"content-encoding") == []
        assert reply.all(b"content-length") == [str(len(reply.body)).encode()]
        assert json.loads(reply.body)["error"]["message"]


async def test_bodies_around_the_limits_of_others_pass(tmp_path: Path) -> None:
    """C66: 40 KiB and 5 MiB; the one limit is ``limits.body_bytes``, and said in the refusal."""
    actor = Actor("a")
    limit_bytes = 6 * 1024 * 1024
    async with staged_router(tmp_path, [actor], limits={"body_bytes": limit_bytes}) as stage:
        for text_bytes in (40 * 1024, 5 * 1024 * 1024):
            body = chat_body("x" * text_bytes, stream=False)
            assert (await stage.ask(post_to(body))).status == 200
            assert actor.posts()[-1].body == body
        reply = await stage.ask(post_to(chat_body("x" * limit_bytes, stream=False)))
        assert reply.status == 413
        assert str(limit_bytes).encode() in reply.body
