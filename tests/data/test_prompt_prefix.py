"""The real tokenizers: ids of resumed texts and conversations are those of the whole."""

from __future__ import annotations

import json
from itertools import islice
from random import Random
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prompt.boundary import shape_of
from prompt.codec import load_codec
from prompt.engine import Engine, load_pipeline
from prompt.model import TemplateFailureError
from prompt.segment import SegmentCache
from prompt.tokenizer_codec import TokenizerCodec
from prompt.turn import ChatTurns
from state.prefix import pack_tokens
from support.data import data_file, json_lines, unpacked
from support.dialogue import bodies_of
from support.text import histories, texts

if TYPE_CHECKING:
    from pathlib import Path

    import tokenizers

pytestmark = pytest.mark.data

NAMES = ("qwen3", "tiny-chat", "gpt-oss")
Parts = tuple["tokenizers.Tokenizer", SegmentCache]


def parts_of(name: str) -> Parts:
    folder = data_file(f"tokenizers/{name}")
    plain = folder / "tokenizer.json"
    raw = plain.read_bytes() if plain.exists() else unpacked(f"tokenizers/{name}/{plain.name}.zst")
    definition = msgspec.json.decode(raw)
    pipeline = load_pipeline(raw, name)
    shape = shape_of(definition)
    assert shape is not None, f"{name} is not cut"
    engine = Engine(pipeline, definition, shape)
    assert engine.is_fast, f"{name} is not converted"
    return pipeline, SegmentCache(engine, shape, capacity_bytes=300_000)


@pytest.fixture(scope="module")
def parts() -> dict[str, Parts]:
    return {name: parts_of(name) for name in NAMES}


def whole(pipeline: tokenizers.Tokenizer, text: str) -> bytes:
    return pack_tokens(pipeline.encode_batch_fast([text], add_special_tokens=False)[0].ids)


@pytest.mark.parametrize("name", NAMES)
def test_edits_of_known_texts_have_the_ids_of_the_whole(parts: dict[str, Parts], name: str) -> None:
    pipeline, cache = parts[name]

    @settings(max_examples=200, deadline=None, database=None)
    @given(histories())
    def each(known: list[str]) -> None:
        for text in known:
            assert cache.encode(text).tokens.packed() == whole(pipeline, text)

    each()


@pytest.mark.parametrize("name", NAMES)
def test_parts_at_a_cut_have_the_ids_of_the_whole(parts: dict[str, Parts], name: str) -> None:
    pipeline, cache = parts[name]
    shape = cache._shape

    @settings(max_examples=400, deadline=None, database=None)
    @given(texts(), st.data())
    def each(text: str, data: st.DataObject) -> None:
        cut = shape.cut_after(text, data.draw(st.integers(0, len(text))))
        if cut is not None:
            both = whole(pipeline, text[:cut]) + whole(pipeline, text[cut:])
            assert both == whole(pipeline, text)

    each()


TEMPLATES = ("Qwen-Qwen3-0.6B", "Qwen-Qwen2.5-7B-Instruct", "HuggingFaceTB-SmolLM3-3B")
TEXTS = ("glaive_tools", "taubench_airline", "oasst1_en")


def codec_of(folder: Path, tokenizer: str, template: str) -> TokenizerCodec:
    source = data_file(f"tokenizers/{tokenizer}")
    for path in source.glob("*.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    jinja = data_file(f"tokenizers/chat_templates/{template}.jinja")
    (folder / "chat_template.jinja").write_bytes(jinja.read_bytes())
    codec = load_codec(folder)
    assert isinstance(codec, TokenizerCodec)
    return codec


@pytest.mark.parametrize("template", TEMPLATES)
async def test_real_conversations_turn_by_turn_have_the_ids_of_the_whole(
    tmp_path: Path, template: str
) -> None:
    codec = codec_of(tmp_path, "tiny-chat", template)
    turns = ChatTurns()
    tails = 0
    for name in TEXTS:
        for conversation in islice(json_lines(f"text/{name}.jsonl.zst"), 60):
            messages, tools = conversation["messages"], conversation.get("tools")
            for count in range(1, len(messages) + 1):
                fields = {"model": "m", "messages": messages[:count]}
                fields |= {"tools": tools} if tools else {}
                turn = turns.decode(json.dumps(fields).encode())
                call = turn.call
                whole = codec.chat_tokens(call.messages, call.tools, options=call.options)
                tail = codec.turn_tail(turn)
                tails += tail is not None
                assert tail is None or tail.packed == whole
                assert codec.turn_prompt(turn).packed == whole
    assert tails > 300


@pytest.mark.parametrize("seed", range(40))
def test_generated_conversations_have_the_ids_of_the_whole(
    generated: TokenizerCodec, seed: int
) -> None:
    turns = ChatTurns()
    for body in bodies_of(Random(seed)):
        turn = turns.decode(body)
        call = turn.call
        try:
            whole = generated.chat_tokens(call.messages, call.tools, options=call.options)
        except TemplateFailureError:
            continue
        assert generated.turn_prompt(turn).packed == whole


@pytest.fixture(scope="module", params=TEMPLATES)
def generated(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> TokenizerCodec:
    return codec_of(tmp_path_factory.mktemp("codec"), "tiny-chat", request.param)
