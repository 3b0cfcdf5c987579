"""Byte prompts that go on from known ones have the ids, and the chains, of the whole."""

from __future__ import annotations

import json
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from prompt.byte import ByteCodec
from prompt.reader import CHAT_PATH, COMPLETION_PATH, PromptReader
from prompt.request import decode_chat
from prompt.turn import ChatTurns
from state.model import BlockId
from state.prefix import chain_of
from support.dialogue import bodies_of

if TYPE_CHECKING:
    from prompt.model import PromptTokens

ROOT = BlockId(b"\1" * 16)
BLOCK_BYTES = 32
SEED = 7
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"add_generation_prompt": False, "continue_final_message": True},
    {"add_generation_prompt": False},
)


def is_equal(tokens: PromptTokens, whole: bytes) -> bool:
    """Return whether ids, count and chain are those of ``whole``, in bytes."""
    packed = whole.decode("latin-1").encode("utf-32-le")
    chain = chain_of(ROOT, packed, BLOCK_BYTES, SEED)
    return (
        not tokens.is_exact
        and tokens.chain(ROOT, BLOCK_BYTES, SEED) == chain
        and tokens.count == len(whole)
        and tokens.packed == packed
    )


def whole_chat(body: bytes) -> bytes:
    """Return the bytes of a chat as a codec without memory writes it."""
    call = decode_chat(body)
    packed = ByteCodec().chat_tokens(call.messages, call.tools, options=call.options)
    return packed.decode("utf-32-le").encode("latin-1")


@pytest.mark.parametrize("first_seed", range(0, 300, 50))
async def test_every_chat_has_the_chain_of_a_codec_without_memory(first_seed: int) -> None:
    codec = ByteCodec()
    tails = 0
    for seed in range(first_seed, first_seed + 50):
        random = Random(seed)
        async with PromptReader({}, codec, short_body_bytes=0) as reader:
            for body in bodies_of(random):
                sent = json.dumps(json.loads(body) | random.choice(OPTIONS)).encode()
                tails += codec.turn_tail(reader._turns.decode(sent)) is not None
                [tokens] = (await reader.read(CHAT_PATH, sent)).prompts
                assert is_equal(tokens, whole_chat(sent))
    assert tails > 50


@pytest.mark.parametrize("first_seed", range(0, 60, 20))
async def test_every_text_has_the_chain_of_its_bytes(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 20):
        random = Random(seed)
        known = [random.choice(("One more line.\n", "你好", "🦙\\u0000", "a\t")) * 4_000]
        async with PromptReader({}, ByteCodec(), inline_body_bytes=10**6) as reader:
            for _ in range(6):
                base = random.choice(known)
                kept = random.choice((len(base), len(base) - 3, len(base) // 2, len(base) // 3))
                known.append(base[:kept] + random.choice(("", "é", "more " * 3_000)))
                sent = {"model": "m", "prompt": known[-1]}
                body = json.dumps(sent, ensure_ascii=random.random() < 0.5).encode()
                [tokens] = (await reader.read(COMPLETION_PATH, body)).prompts
                assert is_equal(tokens, known[-1].encode())


def test_a_turn_writes_and_hashes_only_what_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work on a known conversation with one new turn does not depend on its history."""
    codec, turns = ByteCodec(), ChatTurns()
    chat = [{"role": "user", "content": f"{number} " + "word " * 400} for number in range(100)]
    codec.turn_prompt(turns.decode(body_of(chat))).chain(ROOT, BLOCK_BYTES, SEED)
    written = counted(monkeypatch)
    hashed: list[int] = []

    def hashing(parent: BlockId, packed: bytes, block: int, seed: int) -> tuple[BlockId, ...]:
        hashed.append(len(packed) // 4)
        return chain_of(parent, packed, block, seed)

    monkeypatch.setattr("prompt.run.chain_of", hashing)
    turn = turns.decode(body_of([*chat, {"role": "user", "content": "new " * 100}]))
    tokens = codec.turn_tail(turn)
    assert tokens is not None
    tokens.chain(ROOT, BLOCK_BYTES, SEED)
    assert 400 <= sum(written) < 500
    kept, own = hashed  # the new blocks of the conversation, and the rest that nobody shares
    assert 400 <= kept < 500
    assert own < 2 * BLOCK_BYTES


def test_a_branch_off_a_long_message_does_not_write_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A new question under a known long system prompt."""
    codec, turns = ByteCodec(), ChatTurns()
    system = {"role": "system", "content": "rule " * 50_000}
    first = [system, {"role": "user", "content": "one"}]
    second = [system, {"role": "user", "content": "two"}]
    codec.turn_prompt(turns.decode(body_of(first)))
    written = counted(monkeypatch)
    tokens = codec.turn_tail(turns.decode(body_of(second)))
    assert tokens is not None
    assert is_equal(tokens, whole_chat(body_of(second)))
    assert sum(written) < 100


def test_a_turn_that_is_overtaken_by_the_next_one_has_its_own_bytes() -> None:
    """A conversation may have grown on by the time that its earlier turn is written."""
    codec, turns = ByteCodec(), ChatTurns()
    chat = [{"role": "user", "content": f"{number} " * 40} for number in range(6)]
    bodies = [body_of(chat[:count]) for count in (2, 4, 6)]
    early, middle, late = map(turns.decode, bodies)
    for turn, body in ((late, bodies[2]), (early, bodies[0]), (middle, bodies[1])):
        assert is_equal(codec.turn_prompt(turn), whole_chat(body))


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list to which every writing of parts adds their characters."""
    written: list[int] = []
    seen = ByteCodec._grown

    def grown(self: ByteCodec, start: Any, parts: Any) -> Any:
        written.append(sum(map(len, parts)))
        return seen(self, start, parts)

    monkeypatch.setattr(ByteCodec, "_grown", grown)
    return written


def body_of(messages: list[dict[str, Any]]) -> bytes:
    return json.dumps({"model": "m", "messages": messages}).encode()
