"""Ids of texts that resume from known prefixes are those of the whole text."""

from __future__ import annotations

from array import array
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prompt.boundary import shape_of
from prompt.engine import Engine, load_pipeline
from prompt.model import TemplateFailureError
from prompt.radix import PrefixTree
from prompt.segment import SHORT_CHARS, SegmentCache
from state.model import BlockId
from state.prefix import chain_of
from support.text import histories, texts
from support.tokenizer import write_tokenizer

if TYPE_CHECKING:
    import tokenizers

ROOT = BlockId(b"r" * 16)
FLAGGED = [
    {"content": "<mask>", "lstrip": True},
    {"content": "<cut>", "rstrip": True},
    {"content": "word", "single_word": True},
]


def definition_of(**changes: Any) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        raw = (write_tokenizer(Path(folder)) / "tokenizer.json").read_bytes()
    return dict(msgspec.json.decode(raw)) | changes


def flagged_definition() -> dict[str, Any]:
    definition = definition_of()
    flags = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized", "special"), False)
    first = len(definition["model"]["vocab"])
    definition["added_tokens"] += [
        {"id": first + index, **flags, **token} for index, token in enumerate(FLAGGED)
    ]
    return definition


def parts_of(definition: dict[str, Any]) -> tuple[tokenizers.Tokenizer, Engine, SegmentCache]:
    pipeline = load_pipeline(msgspec.json.encode(definition), "generated")
    shape = shape_of(definition)
    assert shape is not None
    engine = Engine(pipeline, definition, shape)
    return pipeline, engine, SegmentCache(engine, shape, capacity_bytes=200_000)


PLAIN = parts_of(definition_of())
NFC = parts_of(definition_of(normalizer={"type": "NFC"}))
WITH_FLAGS = parts_of(flagged_definition())
KINDS = st.sampled_from((PLAIN, NFC, WITH_FLAGS))


def ids_of(packed: bytes) -> list[int]:
    return list(array("I", packed))


def whole_ids(pipeline: tokenizers.Tokenizer, text: str) -> list[int]:
    return list(pipeline.encode_batch_fast([text], add_special_tokens=False)[0].ids)


@settings(max_examples=150, deadline=None)
@given(KINDS, histories())
def test_every_edit_of_a_known_text_has_the_ids_of_the_whole(
    kind: tuple[tokenizers.Tokenizer, Engine, SegmentCache], known: list[str]
) -> None:
    pipeline, _, cache = kind
    for text in known:
        tokens = cache.encode(text).tokens
        assert ids_of(tokens.packed()) == whole_ids(pipeline, text)
        assert tokens.count == len(tokens.packed()) // 4
    for text in known:
        assert ids_of(cache.encode(text).tokens.packed()) == whole_ids(pipeline, text)


@settings(max_examples=100, deadline=None)
@given(KINDS, texts(), texts(), st.data())
def test_a_checkpoint_stands_for_the_text_before_it(
    kind: tuple[tokenizers.Tokenizer, Engine, SegmentCache],
    first: str,
    second: str,
    data: st.DataObject,
) -> None:
    pipeline, _, cache = kind
    text = "Some words stand here. " * data.draw(st.integers(0, 100)) + first
    points = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=4)))
    encoded = cache.encode(text, points)
    for point, checkpoint in zip(points, encoded.checkpoints, strict=True):
        if checkpoint is not None:
            resumed = cache.resume(checkpoint, second, [len(second)])
            assert ids_of(resumed.tokens.packed()) == whole_ids(pipeline, text[:point] + second)
            (last,) = resumed.checkpoints
            assert last is not None
            again = cache.resume(last, first).tokens
            assert ids_of(again.packed()) == whole_ids(pipeline, text[:point] + second + first)
    assert ids_of(encoded.tokens.packed()) == whole_ids(pipeline, text)


@settings(max_examples=60, deadline=None)
@given(histories(), st.sampled_from((1, 3, 16, 64)))
def test_chains_are_those_of_the_packed_ids(known: list[str], block_tokens: int) -> None:
    prompts = [PLAIN[2].encode(text).tokens for text in known]
    for tokens in (*prompts, *reversed(prompts)):
        for size, seed in ((block_tokens, 0), (16, 7)):
            expected = chain_of(ROOT, tokens.packed(), size, seed)
            assert tokens.chain(ROOT, size, seed) == expected


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text(alphabet="ab\n", max_size=40), min_size=1, max_size=12), st.data())
def test_a_tree_finds_what_a_text_shares_with_known_ones(
    keys: list[str], data: st.DataObject
) -> None:
    tree: PrefixTree[bytes] = PrefixTree(10**6)
    stored: list[bytes] = []
    for text in keys:
        key = text.encode()
        found = tree.find(key)
        assert found.matched <= max((_common(key, other) for other in stored), default=0)
        assert found.payload is None or key[: found.matched].startswith(found.payload)
        end = data.draw(st.integers(0, len(key)))
        marks = [(offset, key[:offset]) for offset in range(1, end + 1, 3)]
        tree.insert(key, end, marks, found)
        stored.append(key[:end])
        again = tree.find(key)
        assert again.matched >= end
        if marks:
            assert again.payload is not None
            assert len(again.payload) >= len(marks[-1][1])
            assert key.startswith(again.payload)


def _common(left: bytes, right: bytes) -> int:
    same = 0
    for ours, theirs in zip(left, right, strict=False):
        if ours != theirs:
            break
        same += 1
    return same


def test_the_cache_keeps_to_its_bytes() -> None:
    _, engine, _ = PLAIN
    shape = shape_of(definition_of())
    assert shape is not None
    cache = SegmentCache(engine, shape, capacity_bytes=100_000)
    for number in range(60):
        cache.encode(f"{number} begins differently. " * 300)
        assert cache.used_bytes <= 100_000
    assert cache.used_bytes > 50_000


def test_a_long_text_that_grows_costs_only_what_is_new() -> None:
    pipeline, engine, cache = parts_of(definition_of())
    asked = CountingEngine(engine)
    cache._engine = asked  # type: ignore[assignment]
    text = "One more line of the log, as long as that.\n" * 500
    cache.encode(text)
    asked.chars = 0
    grown = text + "And what is new of it.\n"
    tokens = cache.encode(grown).tokens
    assert asked.chars < 100
    assert ids_of(tokens.packed()) == whole_ids(pipeline, grown)


class CountingEngine:
    looks_up_long_texts = False

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.chars = 0
        self.looked_up: list[int] = []

    def packed(self, text: str) -> bytes:
        self.chars += len(text)
        return self._engine.packed(text)

    def packed_short(self, text: str) -> bytes:
        self.chars += len(text)
        self.looked_up.append(len(text))
        return self._engine.packed_short(text)


def test_words_are_looked_up_in_short_pieces_of_a_long_text_and_in_no_long_piece() -> None:
    """What has no cut is one piece, however long: a look-up would go over it again and again."""
    pipeline, engine, cache = parts_of(definition_of())
    asked = CountingEngine(engine)
    asked.looks_up_long_texts = True
    cache._engine = asked  # type: ignore[assignment]
    uncut = "".join(f"\n x{number:x}" for number in range(5_000))
    assert len(uncut) > SHORT_CHARS
    text = "Words with cuts. " * 2_000 + uncut
    assert ids_of(cache.encode(text).tokens.packed()) == whole_ids(pipeline, text)
    assert sum(asked.looked_up) > 30_000
    assert max(asked.looked_up) <= SHORT_CHARS


@pytest.mark.parametrize("char", [" ", "\n", "a", "!", "你"])
def test_a_hostile_run_has_the_ids_of_the_whole(char: str) -> None:
    """A million spaces make one engine panic: nobody notices."""
    pipeline, engine, cache = PLAIN
    assert engine.is_fast
    text = char * (1_000_000 if char == " " else 30_000)
    assert ids_of(cache.encode(text).tokens.packed()) == whole_ids(pipeline, text)


def test_a_panic_of_the_fast_engine_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline, engine, _ = PLAIN
    monkeypatch.setattr("prompt.engine.MAX_FAST_CHARS", 2_000_000)
    text = " " * 1_000_000
    assert engine.ids(text) == whole_ids(pipeline, text)


def test_text_without_utf8_has_no_ids() -> None:
    with pytest.raises(TemplateFailureError, match="surrogate"):
        PLAIN[2].encode("a \ud800 b")


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "NFKC"}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": None},
        {"added_tokens": [{"id": 0, "content": "two words"}]},
        {"added_tokens": [{"id": 0, "content": "<pad", "rstrip": True}]},
        {"model": {"type": "WordPiece"}},
    ],
)
def test_other_shapes_are_not_cut(changes: dict[str, Any]) -> None:
    assert shape_of(definition_of()) is not None
    assert shape_of(definition_of(**changes)) is None


def test_flags_keep_the_fast_engine_out() -> None:
    assert PLAIN[1].is_fast
    assert not WITH_FLAGS[1].is_fast
