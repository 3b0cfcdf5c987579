"""Completions read from their known prompts on have the ids of the whole."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from prompt.codec import Codec, load_codec
from prompt.model import BadPromptError, ReadPrompt
from prompt.passage import Passages
from prompt.reader import COMPLETION_PATH, PromptReader
from prompt.request import decode_completion
from support.text import texts
from support.tokenizer import write_tokenizer


def codec_here() -> Codec:
    with TemporaryDirectory() as folder:
        return load_codec(write_tokenizer(Path(folder)))


CODEC = codec_here()
FIELDS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"add_special_tokens": False},
    {"model": "other"},
    {"model": "bytes"},
    {"cache_salt": "x"},
)


@st.composite
def completions(draw: st.DrawFn) -> list[bytes]:
    """Return bodies whose prompts continue each other, in several spellings."""
    filler = draw(st.sampled_from(("One more line.\n", "x", "你好", "🦙", "a\t", "   ")))
    known = [filler * draw(st.sampled_from((1_000, 3_000, 9_000)))]
    bodies = []
    for _ in range(draw(st.integers(2, 6))):
        base = draw(st.sampled_from((known[-1], known[-1], known[0])))
        kept = draw(st.sampled_from((len(base), len(base), len(base) - 3, len(base) // 2)))
        text = base[:kept] + draw(texts(10))
        known.append(text)
        fields = {"model": "tiny", "prompt": text, **draw(st.sampled_from(FIELDS))}
        is_escaped = draw(st.sampled_from((False, False, True)))
        body = json.dumps(fields, ensure_ascii=is_escaped)
        bodies.append(body.encode("utf-8", "surrogatepass"))
    return bodies


@settings(max_examples=80, deadline=None)
@given(completions())
def test_every_prompt_that_goes_on_has_the_ids_of_the_whole(sent: list[bytes]) -> None:
    fallback = load_codec(None)

    async def read_all() -> list[ReadPrompt | str]:
        codecs = {"tiny": CODEC, "other": CODEC}
        reads: list[ReadPrompt | str] = []
        async with PromptReader(codecs, fallback) as reader:
            for body in sent:
                try:
                    reads.append(await reader.read(COMPLETION_PATH, body))
                except BadPromptError as error:
                    reads.append(str(error))
        return reads

    for body, read in zip(sent, asyncio.run(read_all()), strict=True):
        try:
            call = decode_completion(body)
        except BadPromptError as error:
            reason = str(error)
            assert read == reason
            continue
        assert isinstance(read, ReadPrompt)
        codec = CODEC if call.model != "bytes" else fallback
        (text,) = call.prompts
        expected = codec.text_tokens(str(text), add_special_tokens=call.add_special_tokens)
        assert read.prompts[0].packed == expected
        assert (read.model, read.salt) == (call.model, call.salt)


@settings(max_examples=150, deadline=None)
@given(completions(), st.data())
def test_a_known_body_that_is_spoiled_is_blamed_as_an_unknown_one(
    sent: list[bytes], data: st.DataObject
) -> None:
    passages = Passages()
    for body in sent:
        outcome_of(passages, body)
        at = data.draw(st.one_of(st.integers(0, 40), st.integers(len(body) - 60, len(body) - 1)))
        put = data.draw(st.sampled_from((b"", b'"', b"\\", b",", b"}", b'","prompt":"', b"\xff")))
        spoiled = body[:at] + put + body[at + data.draw(st.integers(0, 1)) :]
        assert outcome_of(passages, spoiled) == outcome_of(Passages(), spoiled)


def outcome_of(passages: Passages, body: bytes) -> object:
    """Return the whole call, or the error."""
    try:
        passage = passages.decode(body)
    except BadPromptError as error:
        return str(error)
    return passage.call.model, passage.call.unroutable, decode_completion(passage.body)


def test_a_prompt_that_goes_on_is_read_from_there() -> None:
    passages = Passages()
    text = 'A line with "quotes" and\ttabs.\n' * 2_000
    passages.decode(json.dumps({"model": "m", "prompt": text}).encode())
    grown = json.dumps({"model": "m", "prompt": text + "More.\n", "n": 2}).encode()
    passage = passages.decode(grown)
    assert passage.fresh_bytes < 100
    assert passage.chunks == ("More.\n",)
    assert passage.call.choices == 2


def test_memory_of_prompts_is_bounded() -> None:
    passages = Passages(capacity_bytes=100_000)
    for number in range(40):
        body = json.dumps({"model": "m", "prompt": f"{number}" * 6_000}).encode()
        passages.decode(body)
        assert passages.used_bytes <= 100_000
    assert passages.used_bytes > 50_000
