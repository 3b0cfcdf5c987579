"""Tokens asked of engines: within bounds, and believed only where they can be right."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import pytest

from prompt.model import Unroutable
from prompt.reader import CHAT_PATH, COMPLETION_PATH
from router.config import TokenSettings
from router.observer import Usage
from router.token_call import UNABLE_S
from router.token_source import BACKOFF_CAP_S, DISTRUST_S, MAX_OPEN_PER_REPLICA
from state.prefix import pack_tokens
from support.token_engine import TokenEngine
from support.token_rig import WORDS, Rig, chat_body, is_by_bytes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@pytest.fixture
async def engine() -> AsyncIterator[TokenEngine]:
    async with TokenEngine() as running:
        yield running


@pytest.fixture
async def rig(engine: TokenEngine) -> AsyncIterator[Rig]:
    async with Rig() as made:
        await made.register(engine)
        yield made


async def test_a_chat_gets_the_tokens_of_an_engine_and_keeps_its_bytes(
    rig: Rig, engine: TokenEngine
) -> None:
    read = await rig.chat()
    [tokens] = read.prompts
    assert tokens.is_exact
    assert tokens.packed == pack_tokens(engine.ids_of(chat_body()))
    assert (
        read.shadows == (await rig.reader.read(CHAT_PATH, json.dumps(chat_body()).encode())).prompts
    )
    assert rig.results() == {"answered": 1}


async def test_a_text_gets_the_tokens_of_an_engine(rig: Rig, engine: TokenEngine) -> None:
    engine.statuses[COMPLETION_PATH + "/render"] = 403
    body = {"model": "m", "prompt": WORDS, "add_special_tokens": False, "max_tokens": 3}
    [tokens] = (await rig.read(COMPLETION_PATH, body)).prompts
    assert tokens.packed == pack_tokens(engine.ids_of(body))
    del body["max_tokens"]
    assert engine.asked[-1] == ("/tokenize", body)


async def test_an_answer_is_kept_for_all_that_have_the_same_prompt(
    rig: Rig, engine: TokenEngine
) -> None:
    first = await rig.chat(max_tokens=5)
    again = await rig.chat(temperature=0.5, stream=True)
    assert again.prompts == first.prompts
    assert engine.paths().count("/tokenize") == 1
    await rig.chat(tools=[{"type": "function", "function": {"name": "f"}}])
    assert rig.results() == {"answered": 2, "known": 1}


async def test_rendering_is_preferred_and_what_is_not_there_is_remembered(
    rig: Rig, engine: TokenEngine
) -> None:
    render = CHAT_PATH + "/render"
    await rig.chat("1" + WORDS)
    await rig.chat("2" + WORDS)
    assert engine.paths() == [render, "/tokenize", "/tokenize"]
    rig.now_s += UNABLE_S
    del engine.statuses[render]
    read = await rig.chat("3" + WORDS, max_tokens=7)
    assert engine.asked[3:] == [(render, chat_body("3" + WORDS, max_tokens=7))]
    assert read.prompts[0].packed == pack_tokens(engine.ids_of(chat_body("3" + WORDS)))


@pytest.mark.parametrize("status", [404, 405, 501])
async def test_an_engine_that_can_neither_is_left_alone(
    rig: Rig, engine: TokenEngine, status: int
) -> None:
    engine.statuses |= {"/tokenize": status}
    for number in range(4):
        assert is_by_bytes(await rig.chat(f"{number}" + WORDS))
    assert len(engine.asked) == 2
    assert rig.results() == {"unavailable": 4}
    rig.now_s += UNABLE_S
    await rig.chat()
    assert len(engine.asked) == 4


async def test_an_answer_that_comes_too_late_is_kept_for_the_next(engine: TokenEngine) -> None:
    hasty = TokenSettings(patience_s=0.02, patience_per_mib_s=0.0)
    async with Rig(hasty) as rig:
        await rig.register(engine)
        engine.gate.clear()
        assert is_by_bytes(await rig.chat())
        assert rig.results() == {"slow": 1}
        engine.gate.set()
        while "known" not in rig.results():
            await rig.chat()
            await asyncio.sleep(0.001)
        assert engine.paths().count("/tokenize") == 1


async def test_nobody_waits_long_for_an_engine_that_stays_silent(engine: TokenEngine) -> None:
    """The breaker: after a second without an answer in time, only a probe now and then."""
    hasty = TokenSettings(patience_s=0.005, patience_per_mib_s=0.0)
    async with Rig(hasty) as rig:
        await rig.register(engine)
        engine.gate.clear()
        for number in range(6):
            assert is_by_bytes(await rig.chat(f"{number}" + WORDS))
            rig.now_s += 1.0 if number < 2 else 0.0
        assert rig.results()["slow"] < 6
        assert rig.results()["unavailable"] >= 3


async def test_an_engine_that_fails_is_asked_rarely_until_it_answers(
    rig: Rig, engine: TokenEngine
) -> None:
    engine.statuses |= {"/tokenize": 500}
    for number in range(6):
        assert is_by_bytes(await rig.chat(f"{number}" + WORDS))
    assert rig.results() == {"failed": 3, "unavailable": 3}
    del engine.statuses["/tokenize"]
    rig.now_s += BACKOFF_CAP_S
    for number in range(3):
        assert not is_by_bytes(await rig.chat(f"{number}" + WORDS))
    assert rig.results()["answered"] == 3


async def test_an_engine_that_is_gone_fails_no_request(rig: Rig, engine: TokenEngine) -> None:
    await engine._server.close()
    assert is_by_bytes(await rig.chat())
    assert rig.results() == {"failed": 1}


@pytest.mark.parametrize(
    "answer",
    [
        b'{"tokens": [1, 2, 3], "count": 2}',
        b'{"tokens": [1, -2, 3], "count": 3}',
        b'{"tokens": [1, 4294967296], "count": 2}',
        b'{"tokens": ["1"], "count": 1}',
        b'{"tokens": [1.5], "count": 1}',
        b'{"tokens": [], "count": 0}',
        b'{"tokens": [1, 2]}',
        b"[1, 2]",
        b"<html>",
        b"",
    ],
    ids=range(10),
)
async def test_wrong_answers_are_not_believed(rig: Rig, engine: TokenEngine, answer: bytes) -> None:
    engine.answers["/tokenize"] = answer
    read = await rig.chat()
    assert (read.prompts, read.unroutable) == ((), Unroutable.WRONG_TOKENS)
    assert rig.results() == {"wrong": 1}


@pytest.mark.parametrize("answer", [b"[]", b'[{"token_ids": [1]}, {"token_ids": [2]}]'])
async def test_as_many_renderings_as_prompts_are_wanted(
    rig: Rig, engine: TokenEngine, answer: bytes
) -> None:
    engine.answers[COMPLETION_PATH + "/render"] = answer
    read = await rig.read(COMPLETION_PATH, {"model": "m", "prompt": WORDS})
    assert read.unroutable is Unroutable.WRONG_TOKENS


async def test_lengths_that_engines_report_otherwise_end_the_trust(
    rig: Rig, engine: TokenEngine
) -> None:
    """A template of the request's path that ``/tokenize`` does not use shows here."""
    read = await rig.chat()
    count = read.prompts[0].count
    for prompt_tokens in (count + 1, count - 1, count, None, count + 1, count + 1):
        rig.source.check(read, Usage(prompt_tokens, 1, None))
    rig.source.check(read, None)
    assert not (await rig.chat()).is_rough
    rig.source.check(read, Usage(count + 1, 1, None))
    assert is_by_bytes(await rig.chat())
    assert rig.results() == {"answered": 1, "known": 1, "wrong": 5, "distrusted": 1}
    rig.now_s += DISTRUST_S
    await rig.chat()
    assert engine.paths().count("/tokenize") == 2


async def test_only_replicas_of_the_model_with_events_are_asked(engine: TokenEngine) -> None:
    async with Rig() as rig, TokenEngine() as other, TokenEngine() as silent:
        await rig.register(other, "o", model="n")
        await rig.register(silent, "s", has_events=False)
        assert is_by_bytes(await rig.chat())
        assert rig.results() == {}
        await rig.register(engine)
        for number in range(5):
            assert not is_by_bytes(await rig.chat(f"{number}" + WORDS))
        assert (other.asked, silent.asked) == ([], [])


async def test_questions_go_round(engine: TokenEngine) -> None:
    async with Rig() as rig, TokenEngine() as other:
        await rig.register(engine, "a")
        await rig.register(other, "b")
        for number in range(6):
            await rig.chat(f"{number}" + WORDS)
        counts = [one.paths().count("/tokenize") for one in (engine, other)]
        assert counts == [3, 3]


async def test_replicas_that_announce_different_tokenizers_are_not_asked(
    engine: TokenEngine,
) -> None:
    """The tokens of one would be taken for those of the other."""
    async with Rig() as rig, TokenEngine() as other:
        await rig.register(engine, "a", tokenizer="1")
        await rig.register(other, "b", tokenizer="2")
        assert is_by_bytes(await rig.chat())
        assert rig.results() == {"mixed": 1}
        assert engine.asked == other.asked == []


async def test_equal_questions_are_asked_once_and_few_at_a_time(
    rig: Rig, engine: TokenEngine
) -> None:
    engine.gate.clear()
    async with asyncio.TaskGroup() as tasks:
        same = [tasks.create_task(rig.chat()) for _ in range(5)]
        others = [tasks.create_task(rig.chat(f"{number}" + WORDS)) for number in range(20)]
        await engine.has_been_asked(MAX_OPEN_PER_REPLICA)
        await asyncio.sleep(0.01)
        assert len(engine.asked) == MAX_OPEN_PER_REPLICA
        engine.gate.set()
    assert len({task.result().prompts for task in same}) == 1
    rough = sum(is_by_bytes(task.result()) for task in others)
    assert rough == 20 - (MAX_OPEN_PER_REPLICA - 1)
    assert rig.results()["unavailable"] == rough


async def test_questions_that_ended_make_room(rig: Rig) -> None:
    for number in range(2 * MAX_OPEN_PER_REPLICA):
        assert not is_by_bytes(await rig.chat(f"{number}" + WORDS))


async def test_another_tokenizer_is_asked_for_its_own_tokens(rig: Rig, engine: TokenEngine) -> None:
    """The same replica came back with other files."""
    before = await rig.chat()
    engine.first_id = 5_000
    await rig.register(engine, tokenizer="2")
    after = await rig.chat()
    assert after.prompts != before.prompts
    assert rig.results() == {"answered": 2}


async def test_a_client_that_leaves_takes_no_answer_from_others(
    rig: Rig, engine: TokenEngine
) -> None:
    engine.gate.clear()
    leaving, staying = (asyncio.create_task(rig.chat()) for _ in range(2))
    await engine.has_been_asked(1)
    leaving.cancel()
    engine.gate.set()
    assert not (await staying).is_rough
    assert leaving.cancelled()


async def test_clients_cannot_make_an_engine_look_unable(rig: Rig, engine: TokenEngine) -> None:
    await rig.chat()
    engine.statuses["/tokenize"] = 400
    for number in range(6):
        assert is_by_bytes(await rig.chat(f"{number}" + WORDS))
    del engine.statuses["/tokenize"]
    assert not (await rig.chat("7" + WORDS)).is_rough
    assert rig.results() == {"answered": 2, "refused": 6}


async def test_a_path_that_only_ever_refuses_is_another_one(rig: Rig, engine: TokenEngine) -> None:
    engine.statuses["/tokenize"] = 422
    for number in range(6):
        assert is_by_bytes(await rig.chat(f"{number}" + WORDS))
    assert rig.results() == {"refused": 3, "unavailable": 3}


async def test_what_is_short_or_many_or_comes_as_ids_is_not_asked_for(
    rig: Rig, engine: TokenEngine
) -> None:
    assert is_by_bytes(await rig.chat("short"))
    assert (await rig.read(COMPLETION_PATH, {"model": "m", "prompt": [WORDS, WORDS]})).is_rough
    ids = list(range(1000))
    read = await rig.reader.read(
        COMPLETION_PATH, json.dumps({"model": "m", "prompt": ids}).encode()
    )
    assert not read.is_rough
    assert engine.asked == []
    assert rig.results() == {}


async def test_what_tokenize_cannot_be_told_is_only_rendered(rig: Rig, engine: TokenEngine) -> None:
    named = {"type": "function", "function": {"name": "f"}}
    assert is_by_bytes(await rig.chat(tools=[named], tool_choice=named))
    assert engine.paths() == [CHAT_PATH + "/render"]


async def test_a_model_may_be_read_as_bytes_or_not_at_all(engine: TokenEngine) -> None:
    async with Rig(m="bytes", n="off") as rig:
        await rig.register(engine)
        assert is_by_bytes(await rig.chat())
        read = await rig.chat(model="n")
        assert (read.prompts, read.unroutable) == ((), Unroutable.NO_TOKENIZER)
        assert engine.asked == []


async def test_long_prompts_are_taken_apart_in_a_thread_and_exact(
    rig: Rig, engine: TokenEngine
) -> None:
    text = WORDS * 100
    read = await rig.chat(text)
    assert read.prompts[0].packed == pack_tokens(engine.ids_of(chat_body(text)))
    assert read.prompts[0].count > 170_000


async def test_a_replica_that_left_or_moved_is_asked_where_it_is(engine: TokenEngine) -> None:
    async with Rig() as rig, TokenEngine() as other:
        await rig.register(engine)
        await rig.chat()
        await rig.register(other)
        await rig.chat("moved" + WORDS)
        assert other.paths().count("/tokenize") == 1
