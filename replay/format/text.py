"""Chains and token counts of text, without a tokenizer: a token is four bytes of UTF-8.

So the chain of a text is that of its bytes taken as packed tokens, a block of 64 tokens being 256
bytes.
"""

from __future__ import annotations

from typing import Final

import xxhash

from state.model import BlockId
from state.prefix import TOKEN_BYTES, chain_of

BLOCK_TOKENS: Final = 64
_ROOT: Final = BlockId(xxhash.xxh3_128_digest(b"warmroute trace text"))


def tokens_of(text_bytes: int) -> int:
    """Return the tokens of a text: at least one, the last one may be shorter."""
    return max(1, -(-text_bytes // TOKEN_BYTES))


class RunningText:
    """A prompt that grows: its tokens and the ids of its full blocks. The text is not kept."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._tail = b""
        self._chain: tuple[BlockId, ...] = ()
        self._text_bytes = 0

    def add(self, text: bytes) -> None:
        """Append to the prompt."""
        self._text_bytes += len(text)
        tail = self._tail + text
        parent = self._chain[-1] if self._chain else _ROOT
        chain = chain_of(parent, tail, self._block_tokens, 0)
        self._tail = tail[len(chain) * self._block_tokens * TOKEN_BYTES :]
        self._chain += chain

    @property
    def tokens(self) -> int:
        """The prompt's tokens."""
        return tokens_of(self._text_bytes)

    @property
    def chain(self) -> tuple[BlockId, ...]:
        """The ids of its full blocks."""
        return self._chain
