"""S-10: nothing of a prompt is kept once all prompts are to be forgotten, and none reads wrong."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from prompt.codec import load_codec
from prompt.engine import Engine
from prompt.radix import PrefixTree
from prompt.reader import CHAT_PATH, COMPLETION_PATH, PromptReader
from support.token_engine import TokenEngine
from support.token_rig import Rig
from support.tokenizer import write_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TEXT = "The clerk, naïve as ever, wrote the quick brown fox into the book. " * 200


def body_of(path: str, text: str) -> bytes:
    """Return a request with ``text`` for its prompt."""
    if path == CHAT_PATH:
        return json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
    return json.dumps({"model": "m", "prompt": text}).encode()


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Return what tells how many characters were encoded since the last call."""
    chars = 0

    def counting(encode: Any) -> Any:
        def counted(engine: Engine, text: str) -> Any:
            nonlocal chars
            chars += len(text)
            return encode(engine, text)

        return counted

    for name in ("packed", "packed_short", "ids"):
        monkeypatch.setattr(Engine, name, counting(getattr(Engine, name)))

    def taken() -> int:
        nonlocal chars
        count, chars = chars, 0
        return count

    return taken


@pytest.mark.parametrize("path", [CHAT_PATH, COMPLETION_PATH])
async def test_a_forgotten_prompt_is_read_anew_and_to_the_same_tokens(
    path: str, tmp_path: Path, encoded: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chats and completions, in every tree that keeps texts."""
    trees: list[PrefixTree[Any]] = []
    begin = PrefixTree.__init__

    def noted(tree: PrefixTree[Any], capacity_bytes: int) -> None:
        begin(tree, capacity_bytes)
        trees.append(tree)

    monkeypatch.setattr(PrefixTree, "__init__", noted)
    async with PromptReader(
        {"m": load_codec(write_tokenizer(tmp_path))}, load_codec(None)
    ) as reader:

        async def tokens(text: str) -> bytes:
            [prompt] = (await reader.read(path, body_of(path, text))).prompts
            return prompt.packed

        await tokens(TEXT)
        assert encoded() >= len(TEXT)
        longer = await tokens(TEXT + "And so on.")
        assert encoded() < len(TEXT) // 4
        assert sum(tree.used_bytes for tree in trees) > len(TEXT)
        reader.forget()
        assert [tree.used_bytes for tree in trees] == [0] * len(trees)
        assert await tokens(TEXT + "And so on.") == longer
        assert encoded() >= len(TEXT)
        await tokens(TEXT + "And so on. And on.")
        assert encoded() < len(TEXT) // 4


def test_an_insertion_that_began_before_goes_on_in_the_empty_tree() -> None:
    """A thread may be at work on a prompt when all are forgotten."""
    tree: PrefixTree[int] = PrefixTree(1 << 20)
    for key, mark in ((b"abcdef", 1), (b"abcxyz", 2)):
        tree.insert(key, 6, [(6, mark)], tree.find(key))
    found = tree.find(b"abcdefghi")
    assert found.payload == 1
    tree.clear()
    assert tree.find(b"abcdef").payload is None
    tree.insert(b"abcdefghi", 9, [(9, 3)], found)
    assert tree.find(b"abcdefghi").payload == 3
    assert tree.find(b"abcxyz").matched == 3


async def test_tokens_that_an_engine_told_are_asked_for_again() -> None:
    """They are the prompt, in other words."""
    async with TokenEngine() as engine, Rig() as rig:
        await rig.register(engine)
        first = await rig.chat()
        await rig.chat()
        assert rig.results() == {"answered": 1, "known": 1}
        rig.source.forget()
        assert (await rig.chat()).prompts == first.prompts
        assert rig.results() == {"answered": 2, "known": 1}
