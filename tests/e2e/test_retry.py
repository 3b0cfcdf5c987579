"""Which requests go to a second replica: the rows of the decision table, on scripted replicas."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from support.fleet import until
from support.raw import Received, Reply, Talk, sized
from support.stage import Actor, Stage, answer_at_once, chat_body, post_to, staged_router
from support.tokenizer import write_tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    Answer = Callable[[Talk, Received], Awaitable[None]]

pytestmark = pytest.mark.asyncio(loop_scope="module")
NUMBERS = itertools.count()
CHAT = "/v1/chat/completions"
WORDS = " ".join(f"word {number}" for number in range(900))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    folder = tmp_path_factory.mktemp("retry")
    async with staged_router(
        folder,
        [Actor("a"), Actor("b")],
        write_tokenizer(folder / "tokenizer"),
        policy={"kind": "expected_ttft"},
        upstream={"first_byte_timeout_s": 1.5},
        ejection={"failures": 1_000},
        # Every test shares the budget: a reserve for all of them.
        retry={"reserve": 100, "per_s": 1000.0},
        paths=["/v1/audio/speech"],
    ) as stage:
        yield stage


@pytest_asyncio.fixture(loop_scope="module")
async def stage(running: Stage) -> Stage:
    running.reset()
    await calm(running)
    return running


async def calm(stage: Stage) -> None:
    """Wait until nobody is held, and no back-pressure is left."""

    async def is_so() -> bool:
        seen = (await stage.fleet.seen()).values()
        return all(one["standing"]["standing"] in {"up", "slow_start"} for one in seen)

    await until(is_so, "nobody is held")


def busy(status: int, retry_after: str | None) -> Answer:
    line = b"" if retry_after is None else b"\r\nRetry-After: " + retry_after.encode()
    head = sized(b'{"own":"words"}', status=b"%d Busy" % status + line)

    async def answer(talk: Talk, _: Received) -> None:
        await talk.say(head)

    return answer


async def close_at_once(talk: Talk, _: Received) -> None:
    talk.writer.close()
    raise EOFError


async def never(talk: Talk, _: Received) -> None:
    await talk.until_gone()


def only_once(first: Answer, then: Answer = answer_at_once) -> Answer:
    """Return what is ``first`` for whoever is asked first, and then ``then``."""
    asked = 0

    async def answer(talk: Talk, received: Received) -> None:
        nonlocal asked
        asked += 1
        await (first if asked == 1 else then)(talk, received)

    return answer


async def outcome(stage: Stage, path: str = CHAT, **fields: Any) -> tuple[Reply, int, list[str]]:
    """Send one request; return the reply, how often replicas were asked, and the attempts' ends."""
    request_id = f"t-{next(NUMBERS)}"
    before = len(stage.posts())
    body = chat_body(stream=False, **fields)
    reply = await stage.ask(post_to(body, path, x_request_id=request_id))
    record = await stage.fleet.decision(request_id)
    ends = [attempt["error"] for attempt in record["attempts"]]
    return reply, len(stage.posts()) - before, ends


@pytest.mark.parametrize(("status", "retry_after"), [(429, None), (503, "0"), (503, "1")])
async def test_a_busy_replica_is_followed_by_another_one(
    stage: Stage, status: int, retry_after: str | None
) -> None:
    stage.cast(only_once(busy(status, retry_after)))
    reply, asked, ends = await outcome(stage)
    assert (reply.status, asked, ends) == (200, 2, ["replica_busy", "complete"])


@pytest.mark.parametrize("retry_after", ["3", "Wed, 21 Oct 2026 07:28:00 GMT"])
async def test_one_that_asks_for_patience_is_believed(stage: Stage, retry_after: str) -> None:
    stage.cast(only_once(busy(503, retry_after)))
    reply, asked, _ = await outcome(stage)
    assert (reply.status, asked, reply.body) == (503, 1, b'{"own":"words"}')
    assert reply.all(b"retry-after") == [retry_after.encode()]


async def test_two_busy_replicas_are_asked_once_each_and_the_last_word_is_passed_on(
    stage: Stage,
) -> None:
    stage.cast(busy(503, None))
    reply, asked, ends = await outcome(stage)
    assert (reply.status, asked, reply.body) == (503, 2, b'{"own":"words"}')
    assert ends == ["replica_busy", "complete"]


@pytest.mark.parametrize("status", [500, 502, 504])
async def test_an_error_of_the_replica_is_passed_on(stage: Stage, status: int) -> None:
    stage.cast(only_once(busy(status, None)))
    reply, asked, _ = await outcome(stage)
    assert (reply.status, asked) == (status, 1)


async def test_a_living_replica_that_closes_the_connection_may_have_done_so_for_the_request(
    stage: Stage,
) -> None:
    """U-06: the default; see ``retry.after_send``."""
    await asyncio.sleep(0.4)  # no connection is pooled
    stage.cast(only_once(close_at_once))
    reply, asked, ends = await outcome(stage, n=2)
    assert (reply.status, asked, ends) == (502, 1, ["replica_closed"])


async def test_no_answer_in_time_is_asked_of_another_one_once(stage: Stage) -> None:
    """C14, C-02."""
    stage.cast(only_once(never))
    reply, asked, ends = await outcome(stage)
    assert (reply.status, asked, ends) == (200, 2, ["replica_timeout", "complete"])
    stage.cast(never)
    reply, asked, _ = await outcome(stage)
    assert (reply.status, asked) == (504, 2)


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"n": 2}),
        ("/v1/responses", {"input": "hello", "store": True}),
        ("/v1/responses", {"input": "hello", "background": True}),
        ("/v1/responses", {"input": "hello", "tools": [{"type": "web_search"}]}),
        ("/v1/audio/speech", {}),
    ],
)
async def test_what_may_do_more_than_compute_is_sent_once(
    stage: Stage, path: str, fields: dict[str, Any]
) -> None:
    stage.cast(only_once(busy(503, None)))
    reply, asked, _ = await outcome(stage, path, **fields)
    assert (reply.status, asked) == (503, 1)
    stage.cast(only_once(never))
    await calm(stage)
    reply, asked, _ = await outcome(stage, path, **fields)
    assert (reply.status, asked) == (504, 1)


async def test_such_a_request_goes_on_a_connection_of_its_own(stage: Stage) -> None:
    """No connection that may turn out dead: there could be no replay."""
    await outcome(stage)
    before = sum(actor.replica.accepted for actor in stage.actors)
    for _ in range(3):
        assert (await outcome(stage, n=2))[0].status == 200
    assert sum(actor.replica.accepted for actor in stage.actors) >= before + 3


async def test_a_second_try_is_not_for_the_owner_of_the_prefix_which_keeps_its_entry(
    stage: Stage,
) -> None:
    """A51: the request goes elsewhere, the next one back to where its prefix is."""
    await stage.ask(post_to(chat_body(WORDS, stream=False)))
    owner = next(actor for actor in stage.actors if actor.posts())
    owner.answer = only_once(busy(503, None))
    reply = await stage.ask(post_to(chat_body(WORDS, stream=False), x_request_id="a51"))
    attempts = (await stage.fleet.decision("a51"))["attempts"]
    first, second = (one["decision"] for one in attempts)
    assert reply.status == 200
    assert (first["replica"], first["predicted_cached_tokens"] > 0) == (owner.name, True)
    assert second["replica"] != owner.name
    await calm(stage)
    await stage.ask(post_to(chat_body(WORDS + " more", stream=False), x_request_id="a51-next"))
    [attempt] = (await stage.fleet.decision("a51-next"))["attempts"]
    scores = {one["replica"]: one for one in attempt["decision"]["candidates"]}
    assert scores[owner.name]["cached_tokens"] > 0


async def test_a_closed_connection_is_followed_by_another_replica_where_that_is_wanted(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Once, as ``retry.after_send: always`` says."""
    actors = [Actor("a"), Actor("b")]
    folder = tmp_path_factory.mktemp("always")
    settings: dict[str, Any] = {
        "retry": {"after_send": "always"},
        "upstream": {"pool_idle_s": 0.001},
    }
    async with staged_router(folder, actors, **settings) as stage:
        stage.cast(only_once(close_at_once))
        reply, asked, ends = await outcome(stage)
        assert (reply.status, asked, ends) == (200, 2, ["replica_closed", "complete"])
        stage.cast(close_at_once)
        reply, asked, _ = await outcome(stage)
        assert (reply.status, asked) == (502, 2)


async def test_a_refused_connection_costs_nothing_whatever_the_request(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """A replica that is gone, and was not missed yet: also for what is sent once only."""
    actors = [Actor("a"), Actor("b")]
    folder = tmp_path_factory.mktemp("refused")
    async with staged_router(folder, actors, health={"interval_s": 60.0}) as stage:
        gone = stage.actors[0]
        await gone.replica.stop()
        replies = [await stage.ask(post_to(chat_body(stream=False, n=2))) for _ in range(4)]
        assert {reply.status for reply in replies} == {200}
        assert len(stage.actors[1].posts()) == 4
        assert (await stage.fleet.seen())[gone.name]["up"] is False


async def test_without_a_second_replica_the_answer_is_503(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    actors = [Actor("a")]
    async with staged_router(
        tmp_path_factory.mktemp("alone"), actors, health={"interval_s": 60.0}
    ) as stage:
        await stage.actors[0].replica.stop()
        reply = await stage.ask(post_to(chat_body(stream=False)))
        assert reply.status == 503
        assert json.loads(reply.body)["error"]["code"] == "no_replica"
        assert int(reply.all(b"retry-after")[0]) >= 1


async def test_a_lone_replica_that_is_late_is_told_as_late_and_not_as_missing(
    tmp_path: Path,
) -> None:
    """A second try needs somebody else: without one the client hears what the first one was."""
    async with staged_router(
        tmp_path,
        [Actor("a")],
        write_tokenizer(tmp_path / "tokenizer"),
        upstream={"first_byte_timeout_s": 1.5},
    ) as lone:
        lone.cast(never)
        reply, asked, ends = await outcome(lone)
        assert (reply.status, asked, ends) == (504, 1, ["replica_timeout"])
