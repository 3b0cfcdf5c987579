"""Bodies as a router meets them: known conversations, each with one new turn, no body twice.

A conversation grows by one turn per request: an answer of the model and what the user says to it.
Once it is a tenth above its size it goes back to what it was at the start and goes on differently
from there, as an agent does that tries something else.
"""

from __future__ import annotations

import itertools
import random
import struct
from typing import TYPE_CHECKING

import msgspec
from tokenizers import Tokenizer

from warmroute.corpus import Prose

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

TURN_SHARE = 0.4
"""A turn is at most this share of a body: 500 tokens do not fit into 1 KiB."""
GROWTH = 1.1
MODEL = "bench"
SAMPLE_CHARS = 20_000


def chars_per_token(tokenizer: Path) -> float:
    """Return how many characters of our prose a token has, for a directory's tokenizer.json."""
    text = Prose(random.Random(1)).task(SAMPLE_CHARS)  # noqa: S311 - reproducible
    ids = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).encode(text).ids
    return len(text) / len(ids)


class Conversations:
    """A few conversations of about ``body_bytes`` each, taken in turn.

    They grow to ``growth`` times that; with 1 every request branches off at the same place.
    ``stamp`` is what new turns ask of the stub (``pace-CHUNKS-GAP_US``); with one the bodies ask
    for a stream. It stands in what the user says: a peer drops the fields that it does not know.
    """

    def __init__(
        self,
        body_bytes: int,
        sessions: int,
        turn_chars: int,
        seed: int,
        *,
        stamp: str | None = None,
        growth: float = GROWTH,
    ) -> None:
        self._prose = Prose(random.Random(seed))  # noqa: S311 - reproducible
        self._most_bytes = int(body_bytes * growth)
        self._turn_chars = min(turn_chars, int(body_bytes * TURN_SHARE))
        self._serial = itertools.count()
        self._stamp = "" if stamp is None else f"{stamp} "
        self._tail = b"]}" if stamp is None else b'],"stream":true}'
        self._pool = self._sentences()
        self._openers = [self._opener(body_bytes) for _ in range(sessions)]
        self._grown = list(self._openers)

    def openers(self) -> list[bytes]:
        """Return the bodies that make the conversations known."""
        return [opener + self._tail for opener in self._openers]

    def __iter__(self) -> Iterator[bytes]:
        """Yield known conversations with a new turn, for ever."""
        for at in itertools.cycle(range(len(self._openers))):
            known = self._grown[at]
            if len(known) + self._turn_chars > self._most_bytes:
                known = self._openers[at]
            self._grown[at] = known + self._turn(self._stamp)
            yield self._grown[at] + self._tail

    def _sentences(self) -> Iterator[str]:
        """Yield the words of a long made-up text, from another place each time around."""
        text = self._prose.task(SAMPLE_CHARS).split(" ")
        for start in itertools.count():
            yield from text[start % 97 :]

    def _said(self, role: str, chars: int, stamp: str = "") -> bytes:
        words = [f"{stamp}{next(self._serial)}:"]
        left = chars - len(words[0])
        while left > 0:
            words.append(next(self._pool))
            left -= len(words[-1]) + 1
        return msgspec.json.encode({"role": role, "content": " ".join(words)})

    def _turn(self, stamp: str = "") -> bytes:
        half = self._turn_chars // 2
        return b"," + self._said("assistant", half) + b"," + self._said("user", half, stamp)

    def _opener(self, body_bytes: int) -> bytes:
        """Return a conversation with room for one turn up to its size."""
        known = b'{"model":"%b","messages":[' % MODEL.encode()
        known += self._said("system", min(2_000, self._turn_chars))
        known += b"," + self._said("user", min(300, self._turn_chars // 4))
        while len(known) + 2 * self._turn_chars <= body_bytes:
            known += self._turn()
        return known


def long_message(body_bytes: int, seed: int) -> bytes:
    """Return a chat of one message that fills ``body_bytes``."""
    prose = Prose(random.Random(seed))  # noqa: S311 - reproducible
    parts, left = [f"{seed}: "], body_bytes
    while left > 0:
        parts.append(prose.output(1_000))
        left -= len(parts[-1])
    messages = [{"role": "user", "content": "".join(parts)[:body_bytes]}]
    return msgspec.json.encode({"model": MODEL, "messages": messages})


def write_bodies(path: Path, bodies: Iterable[bytes]) -> Path:
    """Write bodies for the load generator, each after its length, and return the path."""
    with path.open("wb") as file:
        for body in bodies:
            file.write(struct.pack("<I", len(body)))
            file.write(body)
    return path
