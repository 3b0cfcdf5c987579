"""What the router remembers of prompts is remembered by salt: its own work tells no other tenant.

A prefix that is known costs microseconds and one that is not milliseconds, which a client can time.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from prompt.boundary import shape_of
from prompt.codec import load_codec
from prompt.engine import Engine, load_pipeline
from prompt.reader import CHAT_PATH, COMPLETION_PATH, PromptReader
from prompt.segment import SegmentCache
from state.prefix import unpack_tokens
from support.token_engine import TokenEngine
from support.token_rig import Rig
from support.tokenizer import write_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TEXT = "The clerk, naïve as ever, wrote the quick brown fox into the book. " * 200


class Encoded:
    """Counts the characters that engines encode."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.chars = 0
        for name in ("packed", "packed_short", "ids"):
            monkeypatch.setattr(Engine, name, self._counting(getattr(Engine, name)))

    def _counting(self, encode: Any) -> Any:
        def counted(engine: Engine, text: str) -> Any:
            self.chars += len(text)
            return encode(engine, text)

        return counted

    def taken(self) -> int:
        """Return how many there were since the last call."""
        chars, self.chars = self.chars, 0
        return chars


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> Encoded:
    return Encoded(monkeypatch)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path)


@pytest.fixture
def reader(directory: Path) -> Iterator[PromptReader]:
    made = PromptReader({"m": load_codec(directory)}, load_codec(None))
    yield made
    made.close()


def salted_body(path: str, salt: str, text: str = TEXT) -> bytes:
    """Return a body as the router makes it: the salt comes first."""
    fields: dict[str, Any] = {"cache_salt": salt, "model": "m"}
    if path == CHAT_PATH:
        fields["messages"] = [{"role": "user", "content": text}]
    else:
        fields["prompt"] = text
    return json.dumps(fields).encode()


@pytest.mark.parametrize("path", [CHAT_PATH, COMPLETION_PATH])
async def test_a_prompt_that_another_salt_had_is_tokenized_anew(
    reader: PromptReader, encoded: Encoded, path: str
) -> None:
    """S-05: the same prompt costs another tenant what a fresh one costs."""
    longer = TEXT + "And so on."
    await reader.read(path, salted_body(path, "acme"))
    fresh = encoded.taken()
    assert fresh >= len(TEXT)
    own = await reader.read(path, salted_body(path, "acme", longer))
    assert encoded.taken() < len(TEXT) / 10
    other = await reader.read(path, salted_body(path, "other", longer))
    assert encoded.taken() >= fresh
    assert other.prompts == own.prompts


def test_texts_of_two_salts_never_meet_however_they_are_written(
    directory: Path, encoded: Encoded
) -> None:
    """S-02: a text that begins like another one's salt is a text."""
    definition = (directory / "tokenizer.json").read_bytes()
    decoded = msgspec.json.decode(definition)
    shape = shape_of(decoded)
    assert shape is not None
    engine = Engine(load_pipeline(definition, "test"), decoded, shape)
    cache = SegmentCache(engine, shape)
    pairs = [("", "ab" + TEXT), ("a", "b" + TEXT), ("ab", TEXT), ("a", "\0b" + TEXT)]
    for _ in range(2):
        for salt, text in pairs:
            tokens = cache.encode(text, salt=salt).tokens
            assert tokens.packed() == engine.packed(text)
    encoded.taken()
    for salt, text in (("", TEXT), ("b", TEXT), ("x", "ab" + TEXT)):
        cache.encode(text, salt=salt)
        assert encoded.taken() >= len(text)
    cache.encode(TEXT + "and on", salt="ab")
    assert encoded.taken() < len(TEXT) / 10


async def test_tokens_that_an_engine_told_for_one_salt_are_asked_for_again_by_another() -> None:
    """S-05: an answer that is at hand is 25 ms faster than one that is not."""
    async with TokenEngine() as engine, Rig() as rig:
        await rig.register(engine)
        acme = await rig.chat(cache_salt="acme")
        other = await rig.chat(cache_salt="other")
        assert acme.prompts == other.prompts
        assert unpack_tokens(acme.prompts[0].packed)
        assert rig.results() == {"answered": 2}
        await rig.chat(cache_salt="acme")
        assert rig.results() == {"answered": 2, "known": 1}
