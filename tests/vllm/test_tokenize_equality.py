"""Our ids are those of a real engine, for every conversation of the shared text data.

Tiny models with random weights are served with the qwen3 and tiny-chat tokenizers and templates,
one engine at a time, vLLM or the bundled worker; and a router that has no tokenizer asks them for
theirs. ``make test-vllm WARMROUTE_VLLM=/path/to/vllm``.
"""

from __future__ import annotations

import asyncio
import json
import os
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import pytest
import pytest_asyncio
from msgspec import Struct

from prompt.codec import load_codec
from prompt.question import RENDER_SUFFIX, TOKENIZE_PATH, question_of, rendered, tokenized
from prompt.reader import CHAT_PATH, COMPLETION_PATH, MESSAGE_PATH, RESPONSE_PATH, PromptReader
from support.conversation import ask, sdk
from support.data import json_lines
from support.engine_process import Engines
from support.fleet import FleetPlan, LocalFleet, until
from support.vllm import (
    MODEL,
    PAGE_TOKENS,
    VARIABLE,
    NoEngineError,
    vllm_command,
    vllm_executable,
    write_text_model,
)
from support.worker_engine import worker_command

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.data,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="module"),
]

PAGES: Final = 256
AT_ONCE: Final = 4
TEXTS: Final = ("arena_hard_v2", "glaive_tools", "oasst1_en", "taubench_airline")
CONVERSATIONS: Final = 2_514
"""All there are; their prompts come to 4 million characters."""


class Stand(Struct, frozen=True):
    """One engine and a reader with its tokenizer. ``can_render``: it serves ``/render`` too."""

    url: str
    can_render: bool
    http: aiohttp.ClientSession
    reader: PromptReader

    async def engine_tokens(self, target: str, body: dict[str, Any]) -> bytes:
        """Return the ids that the engine's ``target`` answers for ``body``."""
        return tokenized(await self.engine_answer(target, json.dumps(body).encode()))

    async def engine_answer(self, target: str, raw: bytes) -> bytes:
        """Return what the engine's ``target`` answers to a JSON body."""
        headers = {"Content-Type": "application/json"}
        async with self.http.post(f"{self.url}{target}", data=raw, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.read()

    async def our_tokens(self, path: str, body: dict[str, Any]) -> bytes:
        """Return what the router makes of ``body``; it must be sure."""
        read = await self.reader.read(path, json.dumps(body).encode())
        assert read.unroutable is None
        [tokens] = read.prompts
        assert tokens.is_exact
        return tokens.packed


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[
        ("tiny-chat", "vllm", True),
        ("qwen3", "vllm", False),
        ("tiny-chat", "worker", False),
        ("qwen3", "worker", False),
    ],
    ids=["tiny-chat-renders", "qwen3", "tiny-chat-worker", "qwen3-worker"],
)
async def stand(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stand]:
    try:
        vllm = vllm_executable(os.environ.get(VARIABLE))
    except NoEngineError as error:
        pytest.fail(str(error), pytrace=False)
    folder = tmp_path_factory.mktemp("equality")
    name, kind, can_render = request.param
    model = write_text_model(name, folder / "model", vllm)
    if kind == "worker":
        command = worker_command(model, PAGES)
    else:
        command = vllm_command(vllm, model, PAGES, *(["--enable-scale-out"] if can_render else []))
    codec = load_codec(model)
    async with (
        Engines(folder, command) as engines,
        aiohttp.ClientSession() as http,
        PromptReader({MODEL: codec}, load_codec(None)) as reader,
    ):
        engine = engines.add("equality")
        await engines.ready(engine)
        yield Stand(engine.url, can_render, http, reader)


def conversations() -> list[dict[str, Any]]:
    """Return the messages and tools of every shared conversation."""
    found = [
        {key: item[key] for key in ("messages", "tools") if key in item}
        for name in TEXTS
        for item in json_lines(f"text/{name}.jsonl.zst")
    ]
    assert len(found) == CONVERSATIONS
    return found


def text_of(conversation: dict[str, Any]) -> str:
    """Return all that is said in a conversation, as one text."""
    return "\n".join(message["content"] or "" for message in conversation["messages"])


def chat_body(ordinal: int, conversation: dict[str, Any]) -> dict[str, Any]:
    """Return a chat; every other one has no generation prompt."""
    is_open = ordinal % 2 == 0
    return {"model": MODEL, **conversation, "add_generation_prompt": is_open}


def text_body(ordinal: int, conversation: dict[str, Any]) -> dict[str, Any]:
    """Return a completion; every other one wants no special tokens added."""
    text = text_of(conversation)
    return {"model": MODEL, "prompt": text, "add_special_tokens": ordinal % 2 == 0}


async def differing(stand: Stand, path: str, target: str, bodies: list[dict[str, Any]]) -> int:
    """Return how many of ``bodies`` have other ids at the engine's ``target`` than here."""
    waiting = iter(bodies)
    wrong = 0

    async def compare() -> None:
        nonlocal wrong
        for body in waiting:
            expected = await stand.engine_tokens(target, body)
            wrong += await stand.our_tokens(path, body) != expected

    await asyncio.gather(*(compare() for _ in range(AT_ONCE)))
    return wrong


async def test_every_conversation_has_the_ids_of_the_engine(stand: Stand) -> None:
    bodies = [chat_body(*numbered) for numbered in enumerate(conversations())]
    assert await differing(stand, CHAT_PATH, "/tokenize", bodies) == 0


async def test_every_text_has_the_ids_of_the_engine(stand: Stand) -> None:
    bodies = [text_body(*numbered) for numbered in enumerate(conversations())]
    assert await differing(stand, COMPLETION_PATH, "/tokenize", bodies) == 0


TOOLS: Final = [{"name": "look", "description": "Ü", "parameters": {"type": "object"}}]
SAID: Final = "The quick brown fox jumps over the lazy dog, naïve as ever. 🦙 " * 30
CALLS: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    (CHAT_PATH, {"messages": [{"role": "user", "content": SAID}]}),
    (
        CHAT_PATH,
        {
            "messages": [{"role": "user", "content": [{"type": "text", "text": SAID}]}],
            "tools": [{"type": "function", "function": tool} for tool in TOOLS],
            "tool_choice": "none",
            "chat_template_kwargs": {"enable_thinking": False},
        },
    ),
    (
        CHAT_PATH,
        {
            "messages": [
                {"role": "user", "content": SAID},
                {"role": "assistant", "content": "It was"},
            ],
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
    ),
    (CHAT_PATH, {"messages": [{"role": "user", "content": SAID}], "reasoning_effort": "none"}),
    (COMPLETION_PATH, {"prompt": SAID}),
    (COMPLETION_PATH, {"prompt": SAID, "add_special_tokens": False}),
    (RESPONSE_PATH, {"input": SAID, "instructions": "Be brief."}),
    (
        RESPONSE_PATH,
        {"input": [{"role": "user", "content": SAID}], "reasoning": {"effort": "low"}},
    ),
    (
        MESSAGE_PATH,
        {"messages": [{"role": "user", "content": SAID}], "system": "Be brief.", "max_tokens": 8},
    ),
)


@pytest.mark.parametrize(("path", "fields"), CALLS, ids=range(len(CALLS)))
async def test_a_question_has_the_answer_that_rendering_gives(
    stand: Stand, path: str, fields: dict[str, Any]
) -> None:
    """``/tokenize``, ``/render`` and our own tokenizer agree on every kind of call."""
    body = {"model": MODEL, **fields}
    raw = json.dumps(body).encode()
    question = question_of(path, raw)
    assert question is not None
    assert question.body is not None
    asked = await stand.engine_answer(TOKENIZE_PATH, question.body)
    ours = await stand.our_tokens(path, body)
    assert tokenized(asked) == ours
    if stand.can_render:
        assert rendered(await stand.engine_answer(path + RENDER_SUFFIX, raw), path) == ours


async def test_a_router_without_a_tokenizer_knows_what_the_engine_knows(
    stand: Stand, tmp_path: Path
) -> None:
    """Second turns are predicted to the page, from the engine's tokens and its events."""
    config = {"receipts": True, "tokens": {"patience_s": 2.0, "patience_cap_s": 2.0}}
    plan = FleetPlan(replicas=0, model=MODEL, config=config)
    async with LocalFleet(tmp_path, plan) as fleet:
        block = ("--block-tokens", str(PAGE_TOKENS))
        await fleet.start_sidecar("v", stand.url, *block).ready()
        await fleet.all_up(fleet.router, 1)

        async def is_told() -> bool:
            return all(one["has_events"] for one in (await fleet.seen()).values())

        await until(is_told, "events of the engine")
        for number in range(8):
            turns = [("user", f"{number}: {SAID}")]
            async with sdk(fleet.router.url) as client:
                first = await ask(client, MODEL, turns, output_tokens=8)
                await asyncio.sleep(0.3)  # the engine's events are on their way
                turns += [("assistant", first.text), ("user", "And the dog? " * 20)]
                second = await ask(client, MODEL, turns, output_tokens=8)
            for told in (first, second):
                record = await fleet.decision(told.request_id)
                assert record["is_exact"]
                assert record["prompt_tokens"] == record["reported_prompt_tokens"]
            assert second.cached_tokens > 300
            assert second.predicted_tokens == second.cached_tokens
        async with fleet.http.get(f"{fleet.router.admin_url}/metrics") as answer:
            shown = await answer.text()
    assert 'warmroute_engine_tokenizations_total{result="answered"} 16.0' in shown
