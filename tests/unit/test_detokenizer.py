"""Text from tokens: what the pieces of a stream add up to, and when they come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prompt.byte import ByteCodec
from prompt.codec import load_codec
from sidecar.detokenizer import LONGEST_WINDOW_TOKENS, Probe, TextStream, find_probe
from state.prefix import unpack_tokens
from support.byte_fallback import FIRST_BYTE, ByteFallbackCodec
from support.tokenizer import write_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sidecar.detokenizer import Decoder

TEXT: Final = " Ärger, naïve 你好世界 🦙🦙 привет\n  the end \ufffd."
FALLBACK: Final = ByteFallbackCodec()
BYTES: Final = ByteCodec()


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_codec(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


class CountingCodec:
    """Notes how many ids each decoding takes."""

    def __init__(self, codec: Decoder) -> None:
        self._codec = codec
        self.vocabulary_size = codec.vocabulary_size
        self.decoded: list[int] = []

    def decode(self, ids: Sequence[int]) -> str:
        self.decoded.append(len(ids))
        return self._codec.decode(ids)


def _streamed(codec: Decoder, parts: Sequence[Sequence[int]], probe: Probe | None = None) -> str:
    stream = TextStream(codec, probe)
    return "".join([*(stream.feed(part) for part in parts), stream.flush()])


def _cut(ids: Sequence[int], sizes: Sequence[int]) -> Iterator[Sequence[int]]:
    start = 0
    for size in sizes:
        yield ids[start : start + size]
        start += size
    yield ids[start:]


SIZES: Final = st.lists(st.integers(0, 9), max_size=20)


class TestSum:
    @given(ids=st.lists(st.integers(0, 1100), max_size=200), sizes=SIZES)
    @settings(max_examples=150)
    def test_random_ids_of_a_byte_level_vocabulary(
        self, bpe: Decoder, ids: list[int], sizes: list[int]
    ) -> None:
        parts = list(_cut(ids, sizes))
        assert _streamed(bpe, parts, Probe()) == bpe.decode(ids)

    @given(ids=st.lists(st.sampled_from([4, 5, *range(110, 260)]), max_size=200))
    @settings(max_examples=150)
    def test_mostly_broken_characters_of_a_byte_level_vocabulary(
        self, bpe: Decoder, ids: list[int]
    ) -> None:
        assert _streamed(bpe, [ids], Probe()) == bpe.decode(ids)

    @given(text=st.text(max_size=80), sizes=SIZES)
    def test_any_text_through_a_byte_level_vocabulary(
        self, bpe: Any, text: str, sizes: list[int]
    ) -> None:
        ids = unpack_tokens(bpe.text_tokens(text, add_special_tokens=False))
        assert _streamed(bpe, list(_cut(ids, sizes)), Probe()) == bpe.decode(ids)

    @given(ids=st.lists(st.integers(0, 300), max_size=300), sizes=SIZES)
    @settings(max_examples=150)
    def test_random_bytes(self, ids: list[int], sizes: list[int]) -> None:
        assert _streamed(BYTES, list(_cut(ids, sizes)), Probe()) == BYTES.decode(ids)

    @given(
        runs=st.lists(
            st.one_of(
                st.lists(st.integers(0, 2), max_size=3),
                st.lists(st.sampled_from(list(FALLBACK.words.values())), min_size=1, max_size=6),
                st.lists(st.integers(FIRST_BYTE, FIRST_BYTE + 255), max_size=8),
                st.text(max_size=8).map(FALLBACK.spelled),
            ),
            max_size=12,
        ),
        sizes=SIZES,
    )
    @settings(max_examples=250)
    def test_random_ids_of_a_vocabulary_with_byte_fallback(
        self, runs: list[list[int]], sizes: list[int]
    ) -> None:
        ids = [token for run in runs for token in [*run, FALLBACK.words["x"]]]
        parts = list(_cut(ids, sizes))
        assert _streamed(FALLBACK, parts, FALLBACK_PROBE) == FALLBACK.decode(ids)

    def test_spaces_and_special_tokens_at_the_start(self) -> None:
        words = FALLBACK.words
        for ids in (
            [words["▁"], words["▁the"]],
            [1, words["▁the"], 2, words["▁"], words["▁"]],
            [words["▁"]] * 3 + [words["x"]],
            [2] * 300 + [words["▁the"], words["▁a"]],
        ):
            parts = [[token] for token in ids]
            assert _streamed(FALLBACK, parts, FALLBACK_PROBE) == FALLBACK.decode(ids)

    def test_a_long_run_of_bytes_is_still_its_text(self) -> None:
        ids = FALLBACK.spelled("世界🦙é" * 200)
        assert _streamed(FALLBACK, [ids], FALLBACK_PROBE) == "世界🦙é" * 200

    @pytest.mark.parametrize("wrong_bytes", range(LONGEST_WINDOW_TOKENS - 4, 80))
    def test_a_character_after_many_wrong_bytes(self, wrong_bytes: int) -> None:
        ids = [0xFF] * wrong_bytes + list("🦙你".encode()) + [0xE4] * 80
        assert _streamed(BYTES, [ids], Probe()) == BYTES.decode(ids)

    def test_a_stream_finds_its_probe_by_itself(self) -> None:
        ids = [FIRST_BYTE + byte for byte in b"\n\xe4"]
        assert (
            _streamed(FALLBACK, [[token] for token in ids]) == FALLBACK.decode(ids) == "\ufffd" * 2
        )


class TestTime:
    def test_text_comes_with_the_token_that_completes_it(self) -> None:
        stream = TextStream(BYTES, Probe())
        pieces = [stream.feed([byte]) for byte in "a你b".encode()]
        assert pieces == ["a", "", "", "你", "b"]

    def test_an_incomplete_end_comes_with_the_flush(self) -> None:
        stream = TextStream(BYTES, Probe())
        assert stream.feed("x🦙".encode()[:-1]) == "x"
        assert stream.flush() == "\ufffd"
        assert stream.flush() == ""

    def test_a_run_of_fallback_bytes_comes_with_the_next_word(self) -> None:
        stream = TextStream(FALLBACK, FALLBACK_PROBE)
        run = FALLBACK.spelled("\n你")
        assert [stream.feed([token]) for token in run] == [""] * len(run)
        assert stream.feed([FALLBACK.words["▁a"]]) == "\n你 a"

    def test_words_are_not_held_back(self) -> None:
        stream = TextStream(FALLBACK, FALLBACK_PROBE)
        words = FALLBACK.words
        ids = [words["▁the"], words["▁a"], words["x"], words["▁"], words["▁▁"]]
        assert [stream.feed([token]) for token in ids] == ["the", " a", "x", " ", "  "]

    @pytest.mark.parametrize("token", [0xFF, 0x80, 0xE4, 300])
    def test_endless_wrong_bytes_are_shown_all_but_the_last(self, token: int) -> None:
        stream = TextStream(BYTES, Probe())
        shown = "".join(stream.feed([token]) for _ in range(1000))
        assert shown == "\ufffd" * 999

    def test_an_endless_run_of_fallback_bytes_is_shown_in_between(self) -> None:
        stream = TextStream(FALLBACK, FALLBACK_PROBE)
        shown = stream.feed(FALLBACK.spelled("世界" * 100))
        assert len("世界" * 100) - len(shown) <= LONGEST_WINDOW_TOKENS


class TestCost:
    @pytest.mark.parametrize(
        "ids",
        [
            BYTES.text_tokens("the end " * 200)[::4],
            [0xFF] * 2000,
            [0xE4] * 2000,
        ],
    )
    def test_a_token_costs_a_few_decodings_of_a_few_tokens(self, ids: Sequence[int]) -> None:
        codec = CountingCodec(BYTES)
        stream = TextStream(codec, Probe())
        for token in ids:
            stream.feed([token])
        assert len(codec.decoded) <= 8 * len(ids)
        assert max(codec.decoded) <= LONGEST_WINDOW_TOKENS + 5

    @pytest.mark.parametrize(
        "text", ["the end", "🦙世", "\udc80", "\udce4\udcbd"], ids=["text", "wide", "stray", "open"]
    )
    def test_so_it_is_with_byte_fallback(self, text: str) -> None:
        ids = [FIRST_BYTE + byte for byte in text.encode("utf-8", "surrogateescape")] * 500
        codec = CountingCodec(FALLBACK)
        TextStream(codec, FALLBACK_PROBE).feed(ids)
        assert len(codec.decoded) <= 9 * len(ids)
        assert max(codec.decoded) <= LONGEST_WINDOW_TOKENS + 6

    def test_text_is_not_decoded_again(self) -> None:
        codec = CountingCodec(BYTES)
        TextStream(codec, Probe()).feed(list("the end 🦙 ".encode() * 50))
        assert max(codec.decoded) <= 5

    def test_special_tokens_are_not_kept(self) -> None:
        codec = CountingCodec(FALLBACK)
        TextStream(codec, FALLBACK_PROBE).feed([2] * 1000)
        assert max(codec.decoded) == 2


class TestProbe:
    def test_only_a_byte_fallback_has_one(self, bpe: Decoder) -> None:
        assert find_probe(BYTES) == Probe()
        assert find_probe(bpe) == Probe()
        assert find_probe(FALLBACK) == Probe(FIRST_BYTE + 0x80)

    def test_a_vocabulary_without_bytes_has_none(self) -> None:
        class Words:
            vocabulary_size = 20

            def decode(self, ids: Sequence[int]) -> str:
                return " ".join(f"w{token}" for token in ids)

        assert find_probe(Words()) == Probe()
        assert _streamed(Words(), [[1, 2], [3]]) == "w1 w2 w3"


FALLBACK_PROBE: Final = find_probe(FALLBACK)
