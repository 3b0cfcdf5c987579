"""The synthetic runner: tokens without arithmetic, deterministic and real.

Its text is made of words. Token ids are those that the codec gives to these words, so what it
generates enters the cache and is found again when a client sends it back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import xxhash
from msgspec import Struct

from sidecar.cache import unpack_tokens

if TYPE_CHECKING:
    from prompt.codec import Codec

_VOCABULARY: Final = (
    "the a of to and in that it is was for on are with as at be this have from or one had by "
    "word but not what all were we when your can said there use an each which she do how their "
    "if will up other about out many then them these so some her would make like him into time "
    "has look two more write go see number no way could people my than first water been call "
    "who oil its now find long down day did get come made may part over new sound take only "
    "little work know place year live me back give most very after thing our just name good "
    "sentence man think say great where help through much before line right too mean old any "
    "same tell boy follow came want show also around form three small set put end does another "
    "well large must big even such because turn here why ask went men read need land different "
    "home us move try kind hand picture again change off play spell air away animal house"
)
WORDS: Final = tuple(_VOCABULARY.split())
_TAIL_BYTES: Final = 4096
_SHORTEST_OUTPUT_TOKENS: Final = 32
_OUTPUT_TOKENS_SPREAD: Final = 224


class Piece(Struct, frozen=True):
    """One sampled token and the text that it adds."""

    token: int
    text: str


class Voice:
    """What one sequence will say: a stream of pieces that depends on its key only."""

    def __init__(self, key: int, lexicon: Lexicon) -> None:
        self._key = key
        self._lexicon = lexicon
        self._words = 0
        self._pending: list[Piece] = []

    def next_piece(self) -> Piece:
        """Return the next token."""
        if not self._pending:
            draw = xxhash.xxh3_64_intdigest(self._words.to_bytes(8, "little"), self._key)
            word = WORDS[draw % len(WORDS)]
            spelled = word if self._words == 0 else f" {word}"
            self._pending = list(reversed(self._lexicon.spell(spelled)))
            self._words += 1
        return self._pending.pop()

    def natural_length(self) -> int:
        """Return after how many tokens it stops where no limit was asked for."""
        draw = xxhash.xxh3_64_intdigest(b"length", self._key)
        return _SHORTEST_OUTPUT_TOKENS + draw % _OUTPUT_TOKENS_SPREAD


class Lexicon:
    """Spells words as tokens of one codec, each word once."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._spelled: dict[str, tuple[Piece, ...]] = {}

    def spell(self, text: str) -> tuple[Piece, ...]:
        """Return the pieces of ``text``; their texts add up to it."""
        pieces = self._spelled.get(text)
        if pieces is None:
            pieces = self._spelled[text] = self._split(text)
        return pieces

    def voice(self, packed_prompt: bytes, seed: int, choice: int) -> Voice:
        """Return the voice for the end of a prompt, a seed and the index among n choices."""
        tail = xxhash.xxh3_64_intdigest(packed_prompt[-_TAIL_BYTES:], seed % 2**64)
        return Voice(xxhash.xxh3_64_intdigest(choice.to_bytes(8, "little"), tail), self)

    def _split(self, text: str) -> tuple[Piece, ...]:
        """Cut ``text`` where its tokens end, as far as decoding tells; the last piece ends it."""
        token_ids = unpack_tokens(self._codec.text_tokens(text, add_special_tokens=False))
        pieces = []
        start = 0
        for count, token in enumerate(token_ids, start=1):
            spoken = self._codec.decode(token_ids[:count])
            is_last = count == len(token_ids)
            end = len(text) if is_last or not text.startswith(spoken) else len(spoken)
            pieces.append(Piece(token, text[start:end]))
            start = max(start, end)
        return tuple(pieces)
