"""Calls of agents: every line has a whole prompt as text, its time and its session."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

from msgspec import Meta, Struct
from msgspec.json import Decoder

from replay.format.fault import BadLineError, decoded
from replay.format.order import from_first, in_order
from replay.format.reading import A_COUNT, A_NAME, Tokens, session_name
from replay.format.text import BLOCK_TOKENS, RunningText, tokens_of
from replay.trace import TraceRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from replay.format.reading import Reading

_MICROSECONDS: Final = 1_000_000
_EXPECTED: Final = {
    "timestamp_us": "a number of microseconds",
    "input": "the prompt, a string that is not empty",
    "session_id": A_NAME,
    "output": "the answer, a string",
    "output_tokens": A_COUNT,
}


class _Row(Struct, frozen=True):
    timestamp_us: int | float
    input: Annotated[str, Meta(min_length=1)]
    session_id: str | int | None = None
    output: str | None = None
    output_tokens: Tokens | None = None


class _Parser:
    def __init__(self, reading: Reading) -> None:
        self._block_tokens = reading.options.block_tokens or BLOCK_TOKENS
        self._decoder = Decoder(_Row)
        self._first: float | None = None

    def parse(self, number: int, line: bytes) -> tuple[float, int, TraceRequest]:
        row = decoded(self._decoder, line, _EXPECTED)
        output_tokens = row.output_tokens
        if output_tokens is None:
            if row.output is None:
                message = "output: expected the answer as a string, or output_tokens; both missing"
                raise BadLineError(message)
            output_tokens = tokens_of(len(row.output.encode()))
        if self._first is None:
            self._first = row.timestamp_us
        prompt = RunningText(self._block_tokens)
        prompt.add(row.input.encode())
        request = TraceRequest(
            arrival_s=(row.timestamp_us - self._first) / _MICROSECONDS,
            prompt_tokens=prompt.tokens,
            output_tokens=output_tokens,
            chain=prompt.chain,
            session=session_name(row.session_id),
            line=number,
        )
        return request.arrival_s, number, request


def read_agent(reading: Reading) -> Iterator[TraceRequest]:
    """Yield the calls by time; lines may be out of order within the window."""
    calls = reading.each(_Parser(reading).parse)
    ordered = in_order(calls, reading.options.window, reading.faults)
    return from_first(request for _, _, request in ordered)
