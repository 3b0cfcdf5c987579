"""Mooncake traces: lengths, and ids of 512-token blocks instead of text.

``hash_ids`` cover the prompt up to its end, so the last one may name a partial block. Nobody else
can reuse that: it is left out of the chain. Every id is hashed with the chain before it: two chains
then share exactly what they should, whether ids name prefixes or contents (replay/format/kind.py).
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final, cast

import xxhash
from msgspec import Struct
from msgspec.json import Decoder

from replay.format.fault import BadLineError, decoded, shown
from replay.format.order import Forward
from replay.format.reading import A_COUNT, A_NAME, Tokens, session_name
from replay.trace import TraceRequest
from state.model import BlockId

if TYPE_CHECKING:
    from collections.abc import Iterator

    from replay.format.reading import Reading

BLOCK_TOKENS: Final = 512
_ROOT: Final = xxhash.xxh3_128_digest(b"warmroute trace ids")
_ID_BYTES: Final = 8
_EXPECTED: Final = {
    "timestamp": "a number of milliseconds",
    "input_length": A_COUNT,
    "output_length": A_COUNT,
    "hash_ids": "a list of integers",
    "session_id": A_NAME,
}


class _Row(Struct, frozen=True, gc=False):
    timestamp: int | float
    input_length: Tokens
    output_length: Tokens
    hash_ids: list[int]
    session_id: str | int | None = None


def chained(ids: list[int]) -> tuple[BlockId, ...]:
    """Return the ids of the prefixes that end at each of ``ids``, which have 64 bits.

    Raises OverflowError for wider ones. A negative one is taken by its bits.
    """
    try:
        packed = struct.pack(f"<{len(ids)}Q", *ids)
    except struct.error:
        packed = b"".join(own.to_bytes(_ID_BYTES, "little", signed=own < 0) for own in ids)
    digest = xxhash.xxh3_128_digest
    parent = _ROOT
    chain = []
    for start in range(0, len(packed), _ID_BYTES):
        parent = digest(parent + packed[start : start + _ID_BYTES])
        chain.append(parent)
    return cast(tuple[BlockId, ...], tuple(chain))


class _Parser:
    def __init__(self, reading: Reading) -> None:
        self._block_tokens = reading.options.block_tokens or BLOCK_TOKENS
        self._ids = reading.ids
        self._decoder = Decoder(_Row)
        self._arrivals = Forward("timestamp", 1000)

    def parse(self, number: int, line: bytes) -> TraceRequest:
        row = decoded(self._decoder, line, _EXPECTED)
        ids = row.hash_ids
        full, partial = divmod(row.input_length, self._block_tokens)
        if not 0 <= len(ids) - full <= (partial > 0):
            message = (
                f"hash_ids: expected {full + (partial > 0)} ids for {row.input_length} tokens in"
                f" blocks of {self._block_tokens}, got {len(ids)}"
            )
            raise BadLineError(message)
        del ids[full:]
        try:
            chain = chained(ids)
        except OverflowError:
            wide = max(ids, key=abs)
            message = f"hash_ids: expected integers of 64 bits, got {shown(wide)}"
            raise BadLineError(message) from None
        request = TraceRequest(
            arrival_s=self._arrivals.since_first_s(row.timestamp),
            prompt_tokens=row.input_length,
            output_tokens=row.output_length,
            chain=chain,
            session=session_name(row.session_id),
            line=number,
        )
        self._ids.observe(ids)
        return request


def read_mooncake(reading: Reading) -> Iterator[TraceRequest]:
    """Yield the requests of a Mooncake trace."""
    return reading.each(_Parser(reading).parse)
