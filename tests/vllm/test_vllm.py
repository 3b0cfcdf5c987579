"""Real vLLM engines with sidecars behind a router: the same answers, and predictions to the page.

``make test-vllm WARMROUTE_VLLM=/path/to/vllm``; docs/vllm.md has the last result.
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
import pytest_asyncio
from msgspec import Struct

from prompt.codec import load_codec
from prompt.reader import CHAT_PATH, COMPLETION_PATH, PromptReader
from state.prefix import pack_tokens
from support.conversation import sdk
from support.engine_api import APIS, Asker
from support.engine_load import Players, in_turns, make_talks
from support.fleet import FleetPlan, LocalFleet, until
from support.vllm import (
    MODEL,
    PAGE_TOKENS,
    VARIABLE,
    Engine,
    Engines,
    NoEngineError,
    vllm_executable,
    write_model,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from support.engine_api import Api, Talk
    from support.engine_load import Turn

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
]

PAGES: Final = 1024
"""Per engine. All conversations together come to twice what both have."""
TALKS: Final = 100
TURNS: Final = 8
QUESTION_WORDS: Final = (90, 160)
OUTPUT_TOKENS: Final = 12
DECISIONS: Final = 1_000
NEWS_S: Final = 0.1
"""How long an eviction may be on its way to the router."""


class Stand(Struct, frozen=True):
    """What all tests here share."""

    fleet: LocalFleet
    engines: Engines
    model: Path

    async def ready(self) -> None:
        """Wait until the router knows every engine and what it holds."""
        await self.fleet.all_up(self.fleet.router, len(self.engines.engines))

        async def is_told() -> bool:
            seen = await self.fleet.seen()
            return all(one["has_events"] for one in seen.values())

        await until(is_told, "events of all engines")

    def engine(self, name: str) -> Engine:
        """Return the engine that the router calls ``name``."""
        return next(engine for engine in self.engines.engines if engine.name == name)


@pytest.fixture(scope="module")
def vllm() -> Path:
    try:
        return vllm_executable(os.environ.get(VARIABLE))
    except NoEngineError as error:
        message = str(error)
    pytest.fail(message, pytrace=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, vllm: Path) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "tiny", vllm)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stand(
    tmp_path_factory: pytest.TempPathFactory, vllm: Path, model: Path
) -> AsyncIterator[Stand]:
    folder = tmp_path_factory.mktemp("engines")
    plan = FleetPlan(replicas=0, model=MODEL, tokenizer=model, config={"receipts": True})
    async with Engines(folder, vllm, model, PAGES) as engines:
        for name in ("v0", "v1"):
            engines.add(name)
        for engine in engines.engines:
            await engines.ready(engine)
        async with LocalFleet(tmp_path_factory.mktemp("fleet"), plan) as fleet:
            for engine in engines.engines:
                block = ("--block-tokens", str(PAGE_TOKENS))
                await fleet.start_sidecar(engine.name, engine.url, *block).ready()
            stand = Stand(fleet, engines, model)
            await stand.ready()
            yield stand


# The four APIs.


@pytest.mark.parametrize("manner", ["whole", "streamed"])
@pytest.mark.parametrize("api", APIS, ids=lambda api: api.name)
async def test_an_api_answers_as_the_engine_does_and_its_second_turn_is_warm(
    stand: Stand, api: Api, manner: str
) -> None:
    router = stand.fleet.router
    asker = Asker(
        http=stand.fleet.http,
        api=api,
        model=MODEL,
        output_tokens=OUTPUT_TOKENS,
        is_streamed=manner == "streamed",
    )
    name = f"{api.name} {manner}"
    talk: Talk = [
        ("system", f"{name}: You are a helpful assistant. " * 10),
        ("user", "Why does the quick brown fox jump over the lazy dog, 🦙? " * 60),
    ]  # worth more than an even share of the requests, which is some 800 tokens
    first = await asker.ask(router.url, talk)
    assert first.text
    longer = [*talk, ("assistant", first.text), ("user", "And naïve llamas? " * 10)]
    second = await asker.ask(router.url, longer)
    assert (second.replica, second.reason) == (first.replica, "prefix")
    assert second.cached_tokens >= first.prompt_tokens - 2 * PAGE_TOKENS
    for told in (first, second):
        assert told.predicted_tokens // PAGE_TOKENS == told.cached_tokens // PAGE_TOKENS
        record = await stand.fleet.decision(told.request_id)
        assert record["is_exact"]
        assert record["prompt_tokens"] == told.prompt_tokens
        assert record["reported_prompt_tokens"] == told.prompt_tokens
        assert record["reported_cached_tokens"] == told.cached_tokens
    for engine in stand.engines.engines:
        for asked, told in ((talk, first), (longer, second)):
            direct = await asker.ask(engine.url, asked)
            assert (direct.text, direct.prompt_tokens) == (told.text, told.prompt_tokens)


# Tokens.

UNICODE: Final = (
    "Ärger 👩‍👩‍👧 e\u0301 \u1112\u1161\u11ab 你好。"
    "\u3000\u200b\u0645\u0631\u062d \x1c\x85 Ⅳ²\r\n\t  end  "
)
TOOLS: Final = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": 'Look a word up: naïve "quotes" & <tags> 🦙',
            "parameters": {
                "type": "object",
                "properties": {"word": {"type": "string"}, "limit": {"type": "integer"}},
                "required": ["word"],
            },
        },
    }
]
CALL: Final = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "look_up", "arguments": '{"word": "лама 🦙", "limit": 3}'},
}
DIALOGUE: Final = [
    {"role": "system", "content": "Answer in short sentences.\n\n" + UNICODE},
    {"role": "user", "content": UNICODE * 3},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": '{"found": ["<|im_end|>", "quick"]}'},
    {"role": "assistant", "content": "  It is\n<|im_start|>user\nquick.  "},
    {
        "role": "user",
        "content": [{"type": "text", "text": "Two"}, {"type": "text", "text": UNICODE}],
    },
    {"role": "assistant", "content": ""},
    {"role": "user", "content": "The quick brown fox. " * 200},
]
TEXTS: Final = ("a", " ", UNICODE, "<|bos|><|im_start|>x", "quick brown\n\n  fox 12345 " * 100)


@pytest_asyncio.fixture(loop_scope="module")
async def reader(stand: Stand) -> AsyncIterator[PromptReader]:
    async with PromptReader({MODEL: load_codec(stand.model)}, load_codec(None)) as prompts:
        yield prompts


async def tokens_of_engine(stand: Stand, body: dict[str, Any]) -> bytes:
    """Return what the engine's ``/tokenize`` makes of ``body``."""
    url = f"{stand.engines.engines[0].url}/tokenize"
    async with stand.fleet.http.post(url, json=body) as answer:
        assert answer.status == 200, await answer.text()
        return pack_tokens((await answer.json())["tokens"])


async def tokens_of_router(reader: PromptReader, path: str, body: dict[str, Any]) -> bytes:
    """Return what the router makes of ``body``; it must be sure."""
    read = await reader.read(path, json.dumps(body).encode())
    [tokens] = read.prompts
    assert tokens.is_exact
    return tokens.packed


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
async def test_chats_have_the_tokens_of_the_engine_turn_by_turn(
    stand: Stand, reader: PromptReader, tools: Sequence[dict[str, Any]] | None
) -> None:
    for count in range(1, len(DIALOGUE) + 1):
        body: dict[str, Any] = {"model": MODEL, "messages": DIALOGUE[:count]}
        if tools is not None:
            body["tools"] = tools
        expected = await tokens_of_engine(stand, body)
        assert await tokens_of_router(reader, CHAT_PATH, body) == expected, count


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
async def test_texts_have_the_tokens_of_the_engine(
    stand: Stand, reader: PromptReader, text: str
) -> None:
    for has_added in (True, False):
        body = {"model": MODEL, "prompt": text, "add_special_tokens": has_added}
        expected = await tokens_of_engine(stand, body)
        assert await tokens_of_router(reader, COMPLETION_PATH, body) == expected, has_added


# The openai SDK.


async def sdk_answers(url: str, options: dict[str, Any]) -> list[Any]:
    """Return what the SDK makes of the calls that a client has, without ids and times."""
    chat: Any = [{"role": "user", "content": "Name the quick brown fox. " * 20}]
    limited = {"model": MODEL, "max_tokens": OUTPUT_TOKENS, **options}
    async with sdk(url) as client:
        models = [model.id for model in (await client.models.list()).data]
        whole = await client.chat.completions.create(messages=chat, **limited)
        stream = await client.chat.completions.create(messages=chat, stream=True, **limited)
        pieces = [choice.model_dump() async for chunk in stream for choice in chunk.choices]
        text = await client.completions.create(prompt="The lazy dog " * 20, **limited)
        response = await client.responses.create(
            model=MODEL,
            input=chat,
            store=False,
            max_output_tokens=OUTPUT_TOKENS,
            temperature=options["temperature"],
        )
    return [
        models,
        [choice.model_dump() for choice in whole.choices],
        "".join(piece["delta"]["content"] or "" for piece in pieces),
        [piece["finish_reason"] for piece in pieces if piece["finish_reason"]],
        [choice.model_dump() for choice in text.choices],
        [
            usage and (usage.prompt_tokens, usage.completion_tokens)
            for usage in (whole.usage, text.usage)
        ],
        response.output_text if options["temperature"] == 0 else "",  # it has no seed
        response.usage and response.usage.input_tokens,
    ]


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1, "seed": 7}], ids=str)
async def test_the_sdk_gets_from_the_router_what_it_gets_from_an_engine(
    stand: Stand, options: dict[str, Any]
) -> None:
    through_router = await sdk_answers(stand.fleet.router.url, options)
    assert through_router[1][0]["message"]["content"]
    for engine in stand.engines.engines:
        assert await sdk_answers(engine.url, options) == through_router


# Predictions.


async def test_predictions_are_right_to_the_page_while_caches_overflow_and_an_engine_dies(
    stand: Stand,
) -> None:
    """800 turns of 100 conversations, 4 at once; a reset and a restart on the way."""
    fleet, engines = stand.fleet, stand.engines
    struck, emptied = engines.engines
    order = in_turns(make_talks(TALKS, TURNS, QUESTION_WORDS, seed=1), active=TALKS, seed=2)
    async with sdk(fleet.router.url) as client:
        players = Players(client, MODEL, at_once=4, output_tokens=OUTPUT_TOKENS)
        await players.play("full caches", order[:300])
        await engines.reset(emptied)
        await players.play("reset", order[300:450])
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(players.play("restart", order[450:550]))
            await asyncio.sleep(0.5)
            await engines.strike(struck)
            engines.start(struck)
            tasks.create_task(engines.ready(struck))
        await players.play("back", order[550:600])
        await stand.ready()
        await players.play("both again", order[600:])
    report = [line async for line in report_of(stand, players.turns)]
    print("\n".join(report))  # noqa: T201 - the result, shown with -rP
    right = sum(turn.is_right(PAGE_TOKENS) for turn in players.turns)
    assert len(players.turns) == TALKS * TURNS
    assert right >= 0.99 * len(players.turns), "\n".join(report)
    assert {turn.answered.replica for turn in players.turns if turn.phase == "both again"} == {
        engine.name for engine in engines.engines
    }
    records = await fleet.decisions(len(players.turns))
    done = [record for record in records if record["outcome"] == "done"]
    assert len(done) > 0.9 * len(players.turns)
    assert all(record["reported_prompt_tokens"] == record["prompt_tokens"] for record in done)
    last = [turn.answered for turn in players.turns if turn.phase == "both again"]
    for engine in engines.engines:
        here = [told for told in last if told.replica == engine.name]
        fresh_tokens = sum(told.prompt_tokens - told.cached_tokens for told in here)
        print(f"{engine.name}: {fresh_tokens // PAGE_TOKENS} pages computed at last")  # noqa: T201
        assert fresh_tokens > PAGES * PAGE_TOKENS, "nothing needed to be evicted"
    later = [turn for turn in players.turns if turn.known_tokens]
    assert sum(turn.is_cut(PAGE_TOKENS) for turn in later) > 0.05 * len(later)
    assert sum(not turn.is_cut(PAGE_TOKENS) for turn in later) > 0.2 * len(later)


async def report_of(stand: Stand, turns: Sequence[Turn]) -> AsyncIterator[str]:
    """Yield how right the predictions were, and what is known of each that was not."""
    for phase in dict.fromkeys(turn.phase for turn in turns):
        those = [turn for turn in turns if turn.phase == phase]
        right = sum(turn.is_right(PAGE_TOKENS) for turn in those)
        later = [turn for turn in those if turn.known_tokens]
        cut = sum(turn.is_cut(PAGE_TOKENS) for turn in later)
        again = sum(turn.tries - 1 for turn in those)
        yield (
            f"{phase}: {right} of {len(those)} right; "
            f"{cut} of {len(later)} later turns had lost pages; {again} tries again"
        )
    records = await stand.fleet.decisions(DECISIONS)
    for ordinal, turn in enumerate(turns):
        if not turn.is_right(PAGE_TOKENS):
            record = await stand.fleet.decision(turn.answered.request_id)
            predicted, reported = turn.pages(PAGE_TOKENS)
            yield (
                f"{ordinal} ({turn.phase}, talk {turn.talk}): {predicted} pages, not {reported}, "
                f"of {record['prompt_tokens'] // PAGE_TOKENS} on {turn.answered.replica}, "
                f"{turn.rested_s:.2f} s after the last turn; "
                f"{fresh_pages_beside(record, records)} pages computed there at the same time; "
                f"state {record['rung']}, {record['state_age_s']:.2f} s old"
            )


def fresh_pages_beside(record: dict[str, Any], records: Sequence[dict[str, Any]]) -> int:
    """Return the pages that other requests stored while the decision could not know of it yet."""
    began_s = record["started_unix_s"]
    tokens = 0
    for other in records:
        ends_s = other["started_unix_s"] + other["duration_s"] + NEWS_S
        is_beside = other["started_unix_s"] < began_s < ends_s and other is not record
        if is_beside and replica_of(other) == replica_of(record):
            tokens += other["prompt_tokens"] - (other["reported_cached_tokens"] or 0)
    return tokens // PAGE_TOKENS


def replica_of(record: dict[str, Any]) -> str | None:
    """Return who was asked last."""
    return record["attempts"][-1]["decision"]["replica"] if record["attempts"] else None
