"""The real tokenizers: ids of resumed texts and conversations are those of the whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prompt.boundary import shape_of
from prompt.engine import Engine, load_pipeline
from prompt.segment import SegmentCache
from state.prefix import pack_tokens
from support.data import data_file, unpacked
from support.text import histories, texts

if TYPE_CHECKING:
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
