"""Turns read by their tails have the ids that a reader without memory gives."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest

from prompt.codec import load_codec
from prompt.history import Stability
from prompt.model import BadPromptError, ReadPrompt
from prompt.reader import CHAT_PATH, PromptReader
from prompt.request import decode_chat
from prompt.stability import stability_of
from prompt.template import ChatTemplate
from prompt.tokenizer_codec import TokenizerCodec
from prompt.turn import ChatTurns
from support.dialogue import bodies_of
from support.tokenizer import CHAT_TEMPLATE, write_tokenizer

if TYPE_CHECKING:
    from prompt.codec import Codec

DROPS_REASONING = """\
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.reasoning_content and loop.index0 > ns.last %}
        {{- '(' + message.reasoning_content + ')' }}
    {%- endif %}
    {{- message.content.split('</think>')[-1] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
COUNTS_MESSAGES = """\
{{- 'There are ' ~ messages|length ~ ' messages.\\n' }}
{%- for message in messages %}{{- message.role + ': ' + message.content + '\\n' }}{%- endfor %}
"""
NUMBERS_MESSAGES = """\
{%- for message in messages %}
    {{- loop.index ~ '. ' + message.role + ': ' + message.content + '\\n' }}
{%- endfor %}
"""
DATED = "{{- strftime_now('%H:%M:%S') + '\\n' }}" + CHAT_TEMPLATE


def codec_of(template: str, clock: Any = lambda: 0.0) -> Codec:
    with TemporaryDirectory() as folder:
        return load_codec(write_tokenizer(Path(folder), chat_template=template), clock=clock)


TEMPLATES = {
    "plain": CHAT_TEMPLATE,
    "reasoning": DROPS_REASONING,
    "counting": COUNTS_MESSAGES,
    "numbering": NUMBERS_MESSAGES,
}
CODECS = {name: codec_of(template) for name, template in TEMPLATES.items()}


def template_of(source: str) -> ChatTemplate:
    return ChatTemplate(source, special_tokens={}, clock=lambda: 0.0)


def reader_of(codec: Codec, **limits: Any) -> PromptReader:
    return PromptReader({"tiny": codec, "other": codec}, codec, short_body_bytes=0, **limits)


async def read_once(codec: Codec, body: bytes) -> ReadPrompt:
    async with reader_of(codec) as reader:
        return await reader.read(CHAT_PATH, body)


@pytest.mark.parametrize("name", sorted(CODECS))
async def test_every_turn_has_the_ids_of_a_reader_without_memory(name: str) -> None:
    codec = CODECS[name]
    assert isinstance(codec, TokenizerCodec)
    tails = 0
    for seed in range(150):
        async with reader_of(codec) as reader:
            for body in bodies_of(Random(seed)):
                tails += known_tail(reader, codec, body)
                read = await reader.read(CHAT_PATH, body)
                assert read == await read_once(codec, body)
                call = decode_chat(body)
                whole = codec.chat_tokens(call.messages, call.tools, options=call.options)
                assert read.prompts[0].packed == whole
    is_cut = stability_of(template_of(TEMPLATES[name])) is not Stability.UNSTABLE
    assert (tails > 100) is is_cut


def known_tail(reader: PromptReader, codec: TokenizerCodec, body: bytes) -> bool:
    """Return whether the body will be read by its tail."""
    turn = reader._turns.decode(body)
    return codec.turn_tail(turn) is not None


@pytest.mark.parametrize("seed", range(150))
def test_a_known_body_that_is_spoiled_is_blamed_as_an_unknown_one(seed: int) -> None:
    """Whatever byte is changed or cut: the same fields, or the same error, as without memory."""
    random = Random(seed)
    turns = ChatTurns()
    for body in bodies_of(random):
        turns.decode(body)
        for _ in range(4):
            at = random.randrange(len(body))
            put = random.choice((b"", b'"', b"]", b",", b"}", b'],"messages":[', b"\xff"))
            spoiled = body[:at] + put + body[at + random.randrange(2) :]
            assert outcome_of(turns, spoiled) == outcome_of(ChatTurns(), spoiled)


def outcome_of(turns: ChatTurns, body: bytes) -> object:
    try:
        return turns.decode(body).call
    except BadPromptError as error:
        return str(error)


def test_kinds_of_templates_are_told_apart() -> None:
    kinds = {
        CHAT_TEMPLATE: Stability.STABLE,
        DROPS_REASONING: Stability.EPISODIC,
        COUNTS_MESSAGES: Stability.UNSTABLE,
        NUMBERS_MESSAGES: Stability.UNSTABLE,
        "{{ messages[0].content }}": Stability.UNSTABLE,
    }
    assert {source: stability_of(template_of(source)) for source in kinds} == kinds


def long_chat(turns: int) -> list[dict[str, Any]]:
    return [
        {"role": role, "content": f"Turn {turn} says a few words, as {role}s do. " * 20}
        for turn in range(turns)
        for role in ("user", "assistant")
    ]


def body_of(messages: list[dict[str, Any]], **fields: Any) -> bytes:
    return json.dumps({"model": "tiny", "messages": messages} | fields).encode()


async def test_a_turn_decodes_renders_and_encodes_only_what_is_new() -> None:
    codec = codec_of(CHAT_TEMPLATE)
    assert isinstance(codec, TokenizerCodec)
    turns = ChatTurns()
    chat = long_chat(40)
    codec.turn_prompt(turns.decode(body_of(chat[:-2])))
    grown = turns.decode(body_of([*chat, {"role": "user", "content": "And now?"}]))
    assert grown.fresh_bytes < 5_000
    tail = codec.turn_tail(grown)
    assert tail is not None
    call = grown.call
    assert tail.packed == codec.chat_tokens(call.messages, call.tools, options=call.options)


async def test_a_date_that_changed_is_seen() -> None:
    """The clock goes on between two turns: the second one is rendered anew."""
    now_s = [0.0]
    codec = codec_of(DATED, clock=lambda: now_s[0])
    chat = long_chat(12)
    async with reader_of(codec, inline_body_bytes=10**6) as reader:
        for count in (20, 22, 24):
            now_s[0] += 61.0
            body = body_of(chat[:count])
            (tokens,) = (await reader.read(CHAT_PATH, body)).prompts
            assert tokens.packed == codec.chat_tokens(chat[:count], None, options={})


async def test_long_known_chats_stay_on_the_event_loop_and_in_order() -> None:
    """Turns of one conversation at the same time, and its branches, do not disturb each other."""
    codec = codec_of(CHAT_TEMPLATE)
    chat = long_chat(60)
    async with reader_of(codec, inline_body_bytes=2_000) as reader:
        counts = (20, 24, 60, 22, 21, 58, 40, 59, 120, 2, 100)
        reads = [reader.read(CHAT_PATH, body_of(chat[:count])) for count in counts * 2]
        for count, read in zip(counts * 2, await asyncio.gather(*reads), strict=True):
            expected = codec.chat_tokens(chat[:count], None, options={})
            assert read.prompts[0].packed == expected


def test_memory_of_bodies_is_bounded() -> None:
    turns = ChatTurns(capacity_bytes=100_000)
    for number in range(40):
        turns.decode(body_of([{"role": "user", "content": f"{number}" * 3_000}]))
        assert turns.used_bytes <= 100_000
    assert turns.used_bytes > 50_000


def test_variants_that_change_with_every_turn_do_not_add_up() -> None:
    codec = codec_of(CHAT_TEMPLATE)
    assert isinstance(codec, TokenizerCodec)
    turns = ChatTurns()
    chat = long_chat(3)
    for number in range(20):
        documents = [{"title": str(number), "text": "x"}]
        turn = turns.decode(body_of(chat, documents=documents))
        codec.turn_prompt(turn)
    assert turn.conversation is not None
    assert 1 < len(turn.conversation.rendered) <= 4
