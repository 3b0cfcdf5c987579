"""Texts by their words have the ids of the whole, and cuts are where the pattern says."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

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
from prompt.native_word import NativeWords
from prompt.word import (
    MAX_SHORT,
    MAX_TEXT_CHARS,
    MAX_TEXTS,
    MAX_WORDS,
    WordTable,
    ascii_pattern,
)
from state.prefix import pack_tokens, unpack_tokens
from support.native import needs_compiler, word_library
from support.tokenizer import SPECIAL_TOKENS, write_tokenizer

if TYPE_CHECKING:
    import pytest

    from prompt.native_word import WordLibrary

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
MANY = 10_000
TEXTS = st.lists(st.sampled_from(PIECES), max_size=30).map("".join)
CUT_CHARS = "aZ9\u00b2_ \n\r\t\u00e9\u2028\x1c.\u0663\u4e2d"


def engine_of(
    pattern: str, library: WordLibrary | None = None, **changes: Any
) -> tuple[Any, Engine]:
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
    return pipeline, Engine(pipeline, definition, shape_of(definition), library)


FORMS = (None,) if word_library() is None else (None, word_library())
"""In Python, and where there is a compiler, by the helper."""
NFC = {"type": "NFC"}
ENGINES = {(one, form): engine_of(one, form) for one in PATTERNS for form in FORMS}
NORMALIZING = {
    (one, form): engine_of(one, form, normalizer=NFC) for one in PATTERNS for form in FORMS
}


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(PATTERNS), TEXTS | st.text(st.characters(max_codepoint=127), max_size=60))
@example(O200K_PATTERN, "fooBarBAZ'll/\n/x")
@example(QWEN2_PATTERN, "a   b\n\n  c \t d")
@example(GPT2_PATTERN, "  'S 's'tis\n\n  12345  --\n ")
@example(LLAMA3_PATTERN, "x\r\n \t\n  1234567 ab'RE\n")
def test_the_words_of_a_text_have_its_ids(pattern: str, text: str) -> None:
    for form in FORMS:
        pipeline, engine = ENGINES[pattern, form]
        whole = pipeline.encode_batch_fast([text], add_special_tokens=False)[0].ids
        assert engine._words is not None
        assert engine._words.packed(text) == pack_tokens(whole)
        assert engine.packed_short(text) == pack_tokens(whole)
        assert engine.packed_short(text + text) == engine.packed(text + text)


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
    for form in FORMS:
        pipeline, engine = (NORMALIZING if normalizer else ENGINES)[pattern, form]
        whole = pipeline.encode_batch_fast([text], add_special_tokens=False)[0].ids
        assert engine.packed_short(text) == pack_tokens(whole)
        assert engine.packed_again(text) == pack_tokens(whole)
        assert engine.packed(text) == pack_tokens(whole)


def test_words_of_any_script_are_looked_up() -> None:
    _, engine = ENGINES[QWEN2_PATTERN, None]
    assert engine._words is not None
    text = "\u043f\u0440\u0438\u0432\u0435\u0442 na\u00efve words caf\u00e9 \u2013 \u4e16\u754c"
    assert engine._words.packed(text) == engine.packed(text)
    assert "caf\u00e9" in engine._words._spaced.__self__  # type: ignore[attr-defined]


@needs_compiler
@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(PATTERNS),
    (TEXTS | st.text("aZ9 \n\r\t'sSlLvVeE./-\x1c", min_size=1)).map(lambda text: text[:40]),
)
@example(GPT2_PATTERN, "  'S 's'tis\n\n  12345  --\n ")
@example(LLAMA3_PATTERN, "x\r\n \t\n  1234567 ab'RE\n")
@example(QWEN2_PATTERN, "a  'll 'le 12\n  345 .\n\n/x")
@example(O200K_PATTERN, "  ABcd'VEx./\n/ 1234\x1c.")
@example(GPT2_PATTERN, "a  b'S'll'le\nc's")
@example(QWEN2_PATTERN, "a  b'S'LL'le\nc\rd'Re")
def test_the_helper_cuts_as_the_pattern_does(pattern: str, text: str) -> None:
    """A space behind other text begins a word; one with a space behind white space is cut."""
    numbers: dict[str, int] = {}

    def encode(word: str) -> bytes:
        return pack_tokens((numbers.setdefault(word, len(numbers)),))

    library = word_library()
    assert library is not None
    with patch("prompt.native_word._SOME_MISSES", MANY):
        words = NativeWords(library, pattern, encode, MANY)
        for _ in range(41):  # until it knows every piece, and goes through in one go
            cut = unpack_tokens(words.ascii(text))
    names = list(numbers)
    find = re.compile(ascii_pattern(pattern)).findall
    wanted: list[str] = []
    for word in re.split(r"(?<=[^\t-\r ])(?= )", text):
        is_wide = re.search(r"[\t-\r ] ", word)
        wanted += find(word) if is_wide else [word]
    assert [names[one] for one in cut] == [one for one in wanted if one]


@needs_compiler
def test_the_helper_keeps_so_many_words_and_no_long_ones() -> None:
    asked: list[str] = []

    def encode(word: str) -> bytes:
        asked.append(word)
        return pack_tokens(word.encode())

    library = word_library()
    assert library is not None
    words = NativeWords(library, QWEN2_PATTERN, encode, 1_000)
    for text in 2 * [f" v{number} w{number}" for number in range(5_000)]:
        assert words.ascii(text) == pack_tokens(text.encode())
        assert 0 < len(words) <= 1_000
    before = len(asked)
    assert words.ascii(" w4999 w4998") == pack_tokens(b" w4999 w4998")
    assert len(asked) == before
    long = " " + "x" * 60
    for _ in range(2):
        assert words.spaced(long) == pack_tokens(long.encode())
    assert asked[before:] == [long, long]
    accented = " café 世界"
    assert words.spaced(accented) == words.spaced(accented) == pack_tokens(accented.encode())
    assert asked[before + 2 :] == [" café", " 世界"]


@needs_compiler
def test_of_a_text_of_new_words_the_rest_is_asked_for_at_once() -> None:
    asked: list[str] = []

    def encode(word: str) -> bytes:
        asked.append(word)
        return pack_tokens(word.encode())

    library = word_library()
    assert library is not None
    words = NativeWords(library, QWEN2_PATTERN, encode, MANY)
    text = "".join(f" w{number}" for number in range(1_000))
    for _ in range(100):
        assert words.ascii(text) == pack_tokens(text.encode())
    assert len(words) == 1_000, "each time a few more were learned"
    assert (asked[0], len(asked) < 1_200) == (" w0", True)
    before = len(asked)
    assert words.ascii(text) == pack_tokens(text.encode())
    assert len(asked) == before


@needs_compiler
def test_threads_have_rooms_of_their_own() -> None:
    library = word_library()
    assert library is not None

    def encode(word: str) -> bytes:
        time.sleep(0)  # the other thread's turn, between two calls of the helper
        return pack_tokens(word.encode())

    words = NativeWords(library, QWEN2_PATTERN, encode, MANY)
    texts = ["".join(f" {mark}{number}" for number in range(2_000)) for mark in "ab"]
    with ThreadPoolExecutor(2) as threads, patch("prompt.native_word._SOME_MISSES", MANY):
        for _ in range(10):
            assert list(threads.map(words.ascii, texts)) == [
                pack_tokens(text.encode()) for text in texts
            ]


def test_other_text_goes_another_way() -> None:
    pipeline, engine = ENGINES[QWEN2_PATTERN, None]
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
    assert len(table._short.__self__) <= MAX_SHORT  # type: ignore[attr-defined]
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
    _, engine = ENGINES[pattern, FORMS[-1]]
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
