"""The router's token ids are those of a real engine's ``/tokenize``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import pytest
import pytest_asyncio

from prompt.codec import load_codec
from prompt.reader import CHAT_PATH, COMPLETION_PATH, PromptReader
from state.prefix import pack_tokens
from support.vllm import MODEL
from support.vllm_stand import MARKS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from support.vllm_stand import Stand

pytestmark = MARKS

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


@pytest_asyncio.fixture(loop_scope="session")
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
