"""Prompts for traces that have none: two share exactly the blocks that their chains share.

A block's content follows from its id and a seed: equal ids give equal content, different ones
differ, from the first token on as far as the vocabulary goes, else within ``HEAD_TOKENS``. What the
chain does not cover is each request's own. Content is token ids, or text that has about as many
tokens: letters with a space before each, which common vocabularies have as one token.
"""

from __future__ import annotations

import hashlib
import string
from typing import TYPE_CHECKING, Annotated, Final, Literal, Protocol

import numpy as np
from msgspec import Meta, Struct

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from replay.trace import TraceRequest

HEAD_TOKENS: Final = 16
"""A block that differs from all others differs here: an engine's pages are no smaller."""
TOKEN_LOW: Final = 100
"""Below, vocabularies tend to have their special tokens."""
ATTEMPTS: Final = 256
SIBLING_ATTEMPTS: Final = 16
"""How often another first token is tried where a sibling has the same."""
LETTERS: Final = string.ascii_letters.encode()
_DRAW_BYTES: Final = 4

Form = Literal["tokens", "text"]
Count = Annotated[int, Meta(ge=1)]


class SynthesisError(Exception):
    """Blocks are too short for the vocabulary: not all ids of the trace can be told apart."""


class SynthesisSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How prompts are made. Lengths, blocks' too, are divided by ``shrink``; sharing stays.

    Token ids are below ``vocabulary_size``, and from ``TOKEN_LOW`` on where it is large enough.
    """

    form: Form = "tokens"
    vocabulary_size: Annotated[int, Meta(ge=8)] = 1_000
    shrink: Count = 1
    seed: int = 0


class Prompt(Struct, frozen=True):
    """What is sent for one request; ``prompt_tokens`` is approximate where ``content`` is text."""

    content: list[int] | str
    prompt_tokens: int
    output_tokens: int


class Prompts(Protocol):
    """Where prompts come from: made up, or recorded with the trace."""

    def prompt_for(self, ordinal: int, request: TraceRequest) -> Prompt:
        """Return the prompt of the trace's request number ``ordinal``."""
        ...


class SyntheticPrompts:
    """The prompts of one trace; raises SynthesisError where ids cannot be told apart.

    It sees all of ``requests`` first: what a prompt is does not depend on which were sent before.
    """

    def __init__(
        self, requests: Iterable[TraceRequest], block_tokens: int, settings: SynthesisSettings
    ) -> None:
        self._settings = settings
        self._trace_block_tokens = block_tokens
        self.block_tokens = max(1, block_tokens // settings.shrink)
        """The tokens of a block in a prompt."""
        self._low = 0 if settings.form == "text" else min(TOKEN_LOW, settings.vocabulary_size // 4)
        self._span = len(LETTERS) if settings.form == "text" else settings.vocabulary_size
        self._span -= self._low
        self._seed = settings.seed.to_bytes(16, "little", signed=True)
        self._attempts: dict[bytes, int] = {}
        self._tell_apart(requests)

    def prompt_for(self, ordinal: int, request: TraceRequest) -> Prompt:
        """See ``Prompts``."""
        tail_tokens = self._tail_tokens(request)
        parts = [self._drawn(block, self.block_tokens) for block in request.chain]
        parts.append(self._drawn(_own_key(ordinal), tail_tokens))
        symbols = np.concatenate(parts)
        return Prompt(
            self._text(symbols)
            if self._settings.form == "text"
            else (symbols + self._low).tolist(),
            len(symbols),
            max(1, request.output_tokens // self._settings.shrink),
        )

    def _tail_tokens(self, request: TraceRequest) -> int:
        covered_tokens = len(request.chain) * self._trace_block_tokens
        tail_tokens = max(0, request.prompt_tokens - covered_tokens) // self._settings.shrink
        return tail_tokens if request.chain else max(1, tail_tokens)

    def _drawn(self, key: bytes, tokens: int) -> NDArray[np.uint32]:
        return self._symbols(key, self._attempts.get(key, 0), tokens)

    def _symbols(self, key: bytes, attempt: int, tokens: int) -> NDArray[np.uint32]:
        """Return the content of ``key``: the first of more tokens are those of fewer."""
        seeded = hashlib.shake_128(self._seed + attempt.to_bytes(2, "little") + key)
        drawn = np.frombuffer(seeded.digest(tokens * _DRAW_BYTES), dtype="<u4")
        return drawn % np.uint32(self._span)

    def _tell_apart(self, requests: Iterable[TraceRequest]) -> None:
        """Choose for every key the first attempt that makes it differ from the others."""
        taken: set[bytes] = set()
        known: set[bytes] = set()
        siblings: dict[bytes, set[int]] = {}
        head_tokens = min(HEAD_TOKENS, self.block_tokens)
        for ordinal, request in enumerate(requests):
            keys: list[bytes] = [*request.chain]
            if self._tail_tokens(request) >= self.block_tokens:
                keys.append(_own_key(ordinal))
            parent = b""
            for key in keys:
                if key not in known:
                    known.add(key)
                    firsts = siblings.setdefault(parent, set())
                    self._choose(key, head_tokens, taken, firsts)
                parent = key

    def _choose(self, key: bytes, head_tokens: int, taken: set[bytes], firsts: set[int]) -> None:
        for attempt in range(ATTEMPTS):
            symbols = self._symbols(key, attempt, head_tokens)
            head, first = symbols.tobytes(), int(symbols[0])
            if head in taken or (first in firsts and attempt < SIBLING_ATTEMPTS):
                continue
            taken.add(head)
            firsts.add(first)
            if attempt:
                self._attempts[key] = attempt
            return
        message = (
            f"blocks of {self.block_tokens} tokens, each one of {self._span}, cannot tell the"
            f" trace's prefixes apart, {len(taken):,} of them so far: shrink less, or take a"
            " larger vocabulary"
        )
        raise SynthesisError(message)

    def _text(self, symbols: NDArray[np.uint32]) -> str:
        spelled = np.full(2 * len(symbols), ord(" "), dtype=np.uint8)
        spelled[1::2] = np.frombuffer(LETTERS, dtype=np.uint8)[symbols]
        return spelled.tobytes().decode("ascii")


def _own_key(ordinal: int) -> bytes:
    """Return the key of what only this request has; ids of blocks are longer."""
    return ordinal.to_bytes(8, "little")
