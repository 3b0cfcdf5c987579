"""Log probabilities: texts of single tokens, and the two layouts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

import pytest

from prompt.byte import ByteCodec
from prompt.codec import load_codec
from sidecar.logprob import TokenSpeller, chat_logprobs, completion_logprobs, numbered
from sidecar.runner import Sampled
from state.prefix import unpack_tokens
from support.byte_fallback import FIRST_BYTE, ByteFallbackCodec
from support.tokenizer import write_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

FALLBACK: Any = ByteFallbackCodec()
SAMPLED: Final = (
    Sampled(99, logprob=-3.0, top=((97, -0.5), (98, -1.0))),
    Sampled(97, logprob=-0.25, top=((97, -0.25), (99, -math.inf))),
)


class TestSpelling:
    def test_the_tokens_of_a_text_spell_it(self, tmp_path: Path) -> None:
        codec = load_codec(write_tokenizer(tmp_path))
        speller = TokenSpeller(codec)
        ids = unpack_tokens(codec.text_tokens("You are a lazy fox.", add_special_tokens=False))
        assert "".join(map(speller.spelled, ids)) == "You are a lazy fox."
        assert speller.spelled(0) == ""

    def test_a_space_in_front_is_part_of_a_token(self) -> None:
        speller = TokenSpeller(FALLBACK)
        texts = ["▁", "▁▁", "▁the", "the", "你"]
        spelled = [speller.spelled(FALLBACK.words[text]) for text in texts]
        assert spelled == [" ", "  ", " the", "the", "你"]

    @pytest.mark.parametrize("codec", [FALLBACK, ByteCodec()])
    def test_part_of_a_character_is_a_replacement_character(self, codec: Any) -> None:
        offset = FIRST_BYTE if codec is FALLBACK else 0
        assert TokenSpeller(codec).spelled(offset + 0xE4) == "\ufffd"
        assert TokenSpeller(codec).spelled(offset + 0x0A) == "\n"


class TestLayouts:
    def test_a_chat_lists_the_best_first(self) -> None:
        told = chat_logprobs(SAMPLED, 2, chr)
        first, second = told["content"]
        assert (first["token"], first["logprob"], first["bytes"]) == ("c", -3.0, [99])
        assert [top["token"] for top in first["top_logprobs"]] == ["a", "b"]
        assert second["top_logprobs"][1]["logprob"] == -9999.0

    def test_without_alternatives_a_chat_tells_the_tokens(self) -> None:
        first, _ = chat_logprobs(SAMPLED, 0, chr)["content"]
        assert (first["token"], first["top_logprobs"]) == ("c", [])

    def test_bytes_are_those_of_the_text(self) -> None:
        [told] = chat_logprobs([Sampled(0x4F60, logprob=0.0)], 0, chr)["content"]
        assert bytes(told["bytes"]).decode() == told["token"] == "你"

    def test_a_completion_lists_the_token_among_its_alternatives(self) -> None:
        told = completion_logprobs(SAMPLED, 1, chr, 10)
        assert told == {
            "text_offset": [10, 11],
            "token_logprobs": [-3.0, -0.25],
            "tokens": ["c", "a"],
            "top_logprobs": [{"a": -0.5, "c": -3.0}, {"a": -0.25}],
        }

    def test_of_two_tokens_with_one_text_the_more_probable_is_told(self) -> None:
        sampled = [Sampled(1, logprob=-5.0, top=((2, -1.0), (3, -2.0)))]
        told = completion_logprobs(sampled, 2, lambda _: "same", 0)
        assert told["top_logprobs"] == [{"same": -1.0}]
        numbers = completion_logprobs(sampled, 2, numbered, 0)
        assert list(numbers["top_logprobs"][0]) == ["token_id:2", "token_id:3", "token_id:1"]

    def test_nothing_sampled_is_an_empty_list(self) -> None:
        assert completion_logprobs([], 1, chr, 4)["text_offset"] == []
        assert chat_logprobs([], 1, chr) == {"content": []}

    @pytest.mark.parametrize("logprob", [None, -math.inf, math.nan, -1e6])
    def test_what_json_cannot_say_is_very_unlikely(self, logprob: float | None) -> None:
        told = completion_logprobs([Sampled(97, logprob=logprob)], 1, chr, 0)
        assert told["token_logprobs"] == [-9999.0]
