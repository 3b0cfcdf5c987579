"""warmroute's own traces: one JSON object a line, ids instead of text.

The first line is ``{"warmroute":"trace","version":1,"block_tokens":64}``. Every other line has
``arrival_s``, ``prompt_tokens``, ``output_tokens``, and where they are not empty ``chain`` (base64
of the ids, 16 bytes each, one after another), ``session`` and ``tenant``.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Literal

import msgspec
from msgspec import Struct
from msgspec.json import Decoder, Encoder

from replay.format.fault import BadLineError, decoded
from replay.format.order import Forward
from replay.format.reading import A_COUNT, SECONDS, Tokens
from replay.trace import TraceError, TraceRequest
from state.model import BlockId

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from replay.format.reading import Reading

VERSION: Final = 1
_ID_BYTES: Final = 16
_HEADER_EXPECTED: Final = {
    "warmroute": '"trace"',
    "version": str(VERSION),
    "block_tokens": A_COUNT,
}
_EXPECTED: Final = {
    "arrival_s": SECONDS,
    "prompt_tokens": A_COUNT,
    "output_tokens": A_COUNT,
    "chain": "base64 of ids of 16 bytes",
    "session": "a string",
    "tenant": "a string",
}


class Header(Struct, frozen=True):
    """The first line of a recording."""

    warmroute: Literal["trace"]
    version: Literal[1]
    block_tokens: Tokens


class _Row(Struct, frozen=True, omit_defaults=True):
    arrival_s: int | float
    prompt_tokens: Tokens
    output_tokens: Tokens
    chain: bytes = b""
    session: str = ""
    tenant: str = ""


def header_of(number: int, line: bytes) -> Header:
    """Return the header that a recording starts with; raises TraceError when it is another."""
    try:
        return decoded(Decoder(Header), line, _HEADER_EXPECTED)
    except BadLineError as bad:
        message = f"line {number}: {bad}"
        raise TraceError(message) from None


class _Parser:
    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._decoder = Decoder(_Row)
        self._arrivals = Forward("arrival_s", 1)

    def parse(self, number: int, line: bytes) -> TraceRequest:
        row = decoded(self._decoder, line, _EXPECTED)
        packed = row.chain
        if len(packed) % _ID_BYTES:
            message = f"chain: expected {_EXPECTED['chain']}, got {len(packed)} bytes"
            raise BadLineError(message)
        covered = len(packed) // _ID_BYTES * self._block_tokens
        if covered > row.prompt_tokens:
            message = (
                f"chain: expected at most the {row.prompt_tokens} tokens of the prompt, got ids of"
                f" {covered}"
            )
            raise BadLineError(message)
        return TraceRequest(
            arrival_s=self._arrivals.since_first_s(row.arrival_s),
            prompt_tokens=row.prompt_tokens,
            output_tokens=row.output_tokens,
            chain=tuple(
                BlockId(packed[start : start + _ID_BYTES])
                for start in range(0, len(packed), _ID_BYTES)
            ),
            session=row.session,
            tenant=row.tenant,
            line=number,
        )


def read_recording(reading: Reading) -> Iterator[TraceRequest]:
    """Yield the requests of a recording; raises TraceError for a wrong header."""
    for number, line in reading.lines:
        header = header_of(number, line)
        return reading.each(_Parser(header.block_tokens).parse)
    return iter(())


def write_trace(path: Path, requests: Iterable[TraceRequest], block_tokens: int) -> int:
    """Write ``requests``, which come by arrival, as a recording; return how many there were.

    The file appears when it is complete. Raises ValueError for a request that no reader would take.
    """
    partial = path.with_name(f"{path.name}.partial")
    count = 0
    try:
        with partial.open("wb") as file:
            encoder = Encoder()
            header = Header("trace", VERSION, block_tokens)
            file.write(msgspec.json.encode(header) + b"\n")
            last_s = -math.inf
            for count, request in enumerate(requests, start=1):  # noqa: B007 - counted
                _check(request, last_s, block_tokens)
                last_s = request.arrival_s
                file.write(encoder.encode(_row_of(request)) + b"\n")
        partial.replace(path)
    finally:
        with suppress(FileNotFoundError):
            partial.unlink()
    return count


def _row_of(request: TraceRequest) -> _Row:
    return _Row(
        arrival_s=request.arrival_s,
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.output_tokens,
        chain=b"".join(request.chain),
        session=request.session,
        tenant=request.tenant,
    )


def _check(request: TraceRequest, last_s: float, block_tokens: int) -> None:
    if not (math.isfinite(request.arrival_s) and request.arrival_s >= last_s):
        problem = f"arrival_s: expected at least {last_s}, got {request.arrival_s}"
    elif min(request.prompt_tokens, request.output_tokens) < 1:
        problem = f"tokens: expected at least 1, got {request.prompt_tokens, request.output_tokens}"
    elif any(len(block) != _ID_BYTES for block in request.chain):
        problem = f"chain: expected ids of {_ID_BYTES} bytes"
    elif len(request.chain) * block_tokens > request.prompt_tokens:
        problem = f"chain: expected at most {request.prompt_tokens // block_tokens} blocks"
    else:
        return
    message = f"line {request.line}: {problem}"
    raise ValueError(message)
