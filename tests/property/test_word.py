"""Texts by their words have the ids of the whole, and cuts are where the pattern says."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import msgspec
from hypothesis import example, given, settings
from hypothesis import strategies as st

from prompt.boundary import (
    _CUT,
    _CUT_BESIDE_STRIPPING,
    GPT2_PATTERN,
    LLAMA3_PATTERN,
    O200K_PATTERN,
    QWEN2_PATTERN,
    Shape,
    shape_of,
)
from prompt.engine import Engine, load_pipeline
from prompt.word import MAX_TEXT_CHARS, MAX_TEXTS, MAX_WORDS, WordTable
from state.prefix import pack_tokens
from support.tokenizer import SPECIAL_TOKENS, write_tokenizer

if TYPE_CHECKING:
    import pytest

PATTERNS = (GPT2_PATTERN, LLAMA3_PATTERN, O200K_PATTERN, QWEN2_PATTERN)
PIECES = (
    *SPECIAL_TOKENS, "<|im_", "|>", "<", "the", "The", "THE", "quick", "'s", "'LL", "'d", "don't",
    " ", "  ", "   ", "\n", "\r\n", "\n\n", "\t", "\x0b", "\x1c", "\x1f", "\x00", "\x7f",
    "0", "12", "3456", ".", "...", "/", "//", "_", "{}", "(a)", "fooBarBAZ", "aB", "Ab", "x", "Z",
)  # fmt: skip
OTHERS = (
    "na\u00efve", "\u043f\u0440\u0438\u0432\u0435\u0442", "\u4e16\u754c", "\u0905\u0902",
    "\u00e9", "e\u0301", "\u0301", "\u0338", "\u00b2", "\u0663", "\u2160", "\U0001f642",
    "\u2019s", "\u2013", "\u201cA", "\u00a0", "\u2028", "\u3000", "\u0085", "\u200b", "\ufeff",
)  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES), max_size=30).map("".join)
CUT_CHARS = "aZ9\u00b2_ \n\r\t\u00e9\u2028\x1c.\u0663\u4e2d"


def engine_of(pattern: str, **changes: Any) -> tuple[Any, Engine]:
    with TemporaryDirectory() as folder:
        raw = (write_tokenizer(Path(folder)) / "tokenizer.json").read_bytes()
    definition: dict[str, Any] = dict(msgspec.json.decode(raw)) | changes
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    definition["pre_tokenizer"] = {
        "type": "Sequence",
        "pretokenizers": [split, byte_level | {"use_regex": False}],
    }
    pipeline = load_pipeline(msgspec.json.encode(definition), "generated")
    return pipeline, Engine(pipeline, definition, shape_of(definition))


ENGINES = {pattern: engine_of(pattern) for pattern in PATTERNS}
NORMALIZING = {pattern: engine_of(pattern, normalizer={"type": "NFC"}) for pattern in PATTERNS}


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(PATTERNS), TEXTS | st.text(st.characters(max_codepoint=127), max_size=60))
@example(O200K_PATTERN, "fooBarBAZ'll/\n/x")
@example(QWEN2_PATTERN, "a   b\n\n  c \t d")
def test_the_words_of_a_text_have_its_ids(pattern: str, text: str) -> None:
    pipeline, engine = ENGINES[pattern]
    whole = pipeline.encode_batch_fast([text], add_special_tokens=False)[0].ids
    assert engine._words is not None
    assert engine._words.packed(text) == pack_tokens(whole)
    assert engine.packed_short(text) == pack_tokens(whole)


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(PATTERNS),
    st.sampled_from([None, {"type": "NFC"}]),
    st.lists(st.sampled_from((*PIECES, *OTHERS)), max_size=30).map("".join),
)
@example(QWEN2_PATTERN, {"type": "NFC"}, "\u00e9 <|im_start|>\u0338 a")
@example(QWEN2_PATTERN, None, "\u00e9 a\u2028 b \u3000 c \u0301d")
def test_the_words_of_any_script_have_the_ids_of_the_whole(
    pattern: str, normalizer: dict[str, str] | None, text: str
) -> None:
    pipeline, engine = NORMALIZING[pattern] if normalizer else ENGINES[pattern]
    whole = pipeline.encode_batch_fast([text], add_special_tokens=False)[0].ids
    assert engine.packed_short(text) == pack_tokens(whole)
    assert engine.packed_again(text) == pack_tokens(whole)
    assert engine.packed(text) == pack_tokens(whole)


def test_words_of_any_script_are_looked_up() -> None:
    _, engine = ENGINES[QWEN2_PATTERN]
    assert engine._words is not None
    text = "\u043f\u0440\u0438\u0432\u0435\u0442 na\u00efve words caf\u00e9 \u2013 \u4e16\u754c"
    assert engine._words.packed(text) == engine.packed(text)
    assert "caf\u00e9" in engine._words._spaced.__self__  # type: ignore[attr-defined]


def test_other_text_goes_another_way() -> None:
    pipeline, engine = ENGINES[QWEN2_PATTERN]
    text = "na\u00efve  caf\u00e9"
    assert engine._words is not None
    assert engine._words.packed(text) is None
    whole = pipeline.encode_batch_fast([text], add_special_tokens=False)[0].ids
    assert engine.packed_short(text) == pack_tokens(whole)


def test_a_table_that_gives_other_ids_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prompt.word._CLASSES", ((r"\p{L}", "[a-z]"), (r"\p{N}", "[0-9]")))
    _, engine = engine_of(GPT2_PATTERN)
    assert engine._words is None


def test_words_are_bounded() -> None:
    asked: list[str] = []

    def encode(word: str) -> bytes:
        asked.append(word)
        return pack_tokens(word.encode())

    table = WordTable(GPT2_PATTERN, {}, encode)
    table.packed("".join(f" a{'b' * (number % 20)}{number:x}" for number in range(70_000)))
    table.packed("".join(f"  a{'b' * (number % 20)}{number:x}" for number in range(70_000)))
    for number in range(70_000):
        table.packed(f"{number:x}")
    for kept in (table._piece, table._spaced, table._short):
        assert 0 < len(kept.__self__) <= MAX_WORDS  # type: ignore[attr-defined]
    table.packed(" short")
    table.packed(" what is longer than a short text")
    before = len(asked)
    table.packed(" short")
    table.packed(" text is longer than what a short text is")
    assert len(asked) == before
    table.packed(" " + "x" * 60)
    table.packed(" " + "x" * 60)
    assert len(asked) == before + 2


@settings(max_examples=400, deadline=None)
@given(st.text(CUT_CHARS, max_size=14), st.integers(0, 14), st.integers(0, 14), st.booleans())
def test_the_last_cut_is_the_last_match(
    text: str,
    low: int,
    high: int,
    is_stripping: bool,  # noqa: FBT001 - drawn
) -> None:
    low, high = sorted((min(low, len(text)), min(high, len(text))))
    shape = Shape(pattern="", is_nfc=False, is_stripping=is_stripping, added={}, are_plain=True)
    cuts = _CUT_BESIDE_STRIPPING if is_stripping else _CUT
    last = None
    for match in cuts.finditer(text, low, high):
        last = match.end()
    assert shape.cut_before(text, low, high) == last


@settings(deadline=None)
@given(TEXTS, TEXTS, st.sampled_from(PATTERNS))
def test_a_text_that_comes_again_has_the_ids_that_it_had(
    first: str, second: str, pattern: str
) -> None:
    """Parts that are kept are those of the whole, also after they were forgotten."""
    _, engine = ENGINES[pattern]
    for text in (first + second, second + first, first + second):
        assert engine.packed_again(text) == engine.packed(text)
    engine.forget()
    assert engine.packed_again(first + second) == engine.packed(first + second)


def test_texts_are_kept_up_to_a_bound_and_forgotten_when_told() -> None:
    asked: list[str] = []

    def encode(text: str) -> bytes:
        asked.append(text)
        return text.encode()

    table = WordTable(QWEN2_PATTERN, {"<|x|>": b"X"}, encode)
    long = "a text of some words, kept as it is"
    assert table.packed_again(f"<|x|>{long}<|x|>") == b"X%bX" % long.encode()
    table._texts[long] = b"kept"
    assert table.packed_again(f"{long}<|x|>") == b"keptX"
    table.forget()
    assert table.packed_again(long) == long.encode()
    for number in range(MAX_TEXTS + 10):
        table.packed_again(f"{number} {long}")
    assert len(table._texts) <= MAX_TEXTS
    table.packed_again("word " * MAX_TEXT_CHARS)
    assert max(map(len, table._texts)) <= MAX_TEXT_CHARS
