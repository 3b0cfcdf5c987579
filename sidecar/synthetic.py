"""The synthetic runner: a calibrated clock instead of arithmetic, with deterministic, real tokens.

A step takes as long as its cost model says; what earlier sleeps were late is made up for. Its text
is made of words. Token ids are those that the codec gives to these words, so what it generates
enters the cache and is found again when a client sends it back. Pages have no content.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import xxhash
from msgspec import Struct

from sidecar.clock import StepCost
from sidecar.runner import Outcome, Sampled
from state.prefix import unpack_tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from prompt.codec import Codec
    from sidecar.pool import PageId
    from sidecar.runner import Batch, Draw

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
_SHORTEST_SLEEP_S: Final = 0.0005
_LONGEST_LAG_S: Final = 0.02
_MOST_VOICES: Final = 8192
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
        self.pieces = 0
        """How many tokens it said."""

    def next_piece(self) -> Piece:
        """Return the next token."""
        self.pieces += 1
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

    def voice(self, draw: Draw, seed: int) -> Voice:
        """Return the voice for the end of a prompt, a seed and the index among n answers."""
        prompt = draw.prompt_key.to_bytes(8, "little")
        key = xxhash.xxh3_64_intdigest(prompt, (seed ^ draw.seed) % 2**64)
        return Voice(xxhash.xxh3_64_intdigest(draw.sample.to_bytes(8, "little"), key), self)

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


class SyntheticOptions(Struct, frozen=True, kw_only=True):
    """``page_bytes`` and ``link_bytes_per_s`` say what moving a page between tiers would take."""

    cost: StepCost
    page_bytes: int
    link_bytes_per_s: float
    speed_up: float = 1.0
    seed: int = 0


class SyntheticRunner:
    """Sleeps for the duration of a step, then says the next words."""

    content_bytes: Final = 0

    def __init__(
        self, lexicon: Lexicon, options: SyntheticOptions, time_s: Callable[[], float]
    ) -> None:
        self._lexicon = lexicon
        self._options = options
        self._time_s = time_s
        self._due_s = 0.0
        self._voices: dict[tuple[int, int, int], Voice] = {}

    @property
    def page_bytes(self) -> int:
        """See ``Runner``."""
        return self._options.page_bytes

    @property
    def kv_parameters(self) -> str:
        """See ``Runner``."""
        return "synthetic"

    async def run(self, batch: Batch) -> Outcome:
        """See ``Runner``."""
        options = self._options
        page_s = options.page_bytes / options.link_bytes_per_s / options.speed_up
        save_s, load_s = page_s * len(batch.saves), page_s * len(batch.loads)
        compute_s = options.cost.step_s(batch.load) / options.speed_up
        if batch.is_after_idle:
            self._due_s = self._time_s()
        await self._pace(save_s + load_s + compute_s)
        samples = tuple(tuple(map(self._say, slot.draws)) for slot in batch.slots)
        return Outcome(samples=samples, save_s=save_s, load_s=load_s, compute_s=compute_s)

    async def read(self, pages: tuple[PageId, ...]) -> list[bytes]:
        """See ``Runner``."""
        return [b""] * len(pages)

    def close(self) -> None:
        """See ``Runner``."""

    async def _pace(self, duration_s: float) -> None:
        now_s = self._time_s()
        self._due_s = max(self._due_s, now_s - _LONGEST_LAG_S) + duration_s
        wait_s = self._due_s - now_s
        await asyncio.sleep(wait_s if wait_s > _SHORTEST_SLEEP_S else 0)

    def _say(self, draw: Draw) -> Sampled:
        key = (draw.prompt_key, draw.seed, draw.sample)
        voice = self._voices.pop(key, None)
        if voice is None or voice.pieces != draw.index:
            voice = self._lexicon.voice(draw, self._options.seed)
            for _ in range(draw.index):
                voice.next_piece()
        piece = voice.next_piece()
        is_end = not draw.is_limited and voice.pieces >= voice.natural_length()
        self._voices[key] = voice
        if len(self._voices) > _MOST_VOICES:
            del self._voices[next(iter(self._voices))]
        return Sampled(piece.token, is_end=is_end)
