"""Conversations: a line is a list of messages, and every answer in it is a request.

The prompt of an answer is all that stands before it: the tools, then each message as its role, its
content and its tool calls. An answer before which no message stands is a greeting and no request.

The first request arrives at the line's time, or, where no line has one, some time after the one
before, drawn from an exponential distribution; the next ones after a drawn time to think each.
"""

from __future__ import annotations

import heapq
import random
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Raw, Struct
from msgspec.json import Decoder

from replay.format.date import NANOSECONDS, nanoseconds_of
from replay.format.fault import BadLineError, decoded, shown
from replay.format.order import from_first, in_order
from replay.format.reading import A_NAME, SECONDS, session_name
from replay.format.text import BLOCK_TOKENS, RunningText, tokens_of
from replay.trace import TraceRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from replay.format.reading import Reading
    from state.model import BlockId

ANSWERER: Final = "assistant"
_MILLISECOND: Final = 1_000_000
_EXPECTED: Final = {
    "messages": "a list of messages with role and content",
    "tools": "a list of tools",
    "timestamp": "a number of milliseconds or a date",
    "arrival_s": SECONDS,
    "session_id": A_NAME,
    "id": A_NAME,
}
_NOTHING: Final = (b"", b"null", b"[]")


class _Message(Struct, frozen=True):
    role: str
    content: str | list[Raw] | None = None
    tool_calls: Raw = Raw(b"")


class _Part(Struct, frozen=True):
    text: str


class _Row(Struct, frozen=True):
    messages: list[_Message]
    tools: Raw = Raw(b"")
    timestamp: int | float | str | None = None
    arrival_s: int | float | None = None
    session_id: str | int | None = None
    id: str | int | None = None


class _Parser:
    def __init__(self, reading: Reading) -> None:
        self._options = reading.options
        self._block_tokens = reading.options.block_tokens or BLOCK_TOKENS
        self._decoder = Decoder(_Row)
        self._draw = random.Random(reading.options.seed)  # noqa: S311 - reproducible, not secret
        self._first: float | None = None
        self._has_times: bool | None = None
        self._drawn_s = 0.0

    def parse(self, number: int, line: bytes) -> tuple[float, int, list[TraceRequest]]:
        row = decoded(self._decoder, line, _EXPECTED)
        turns = list(_turns(row, self._block_tokens))
        if not turns:
            message = f"messages: expected an {ANSWERER} message behind another one, got none"
            raise BadLineError(message)
        start_s = self._start_s(row)
        named = row.id if row.session_id is None else row.session_id
        session = f"line {number}" if named is None else session_name(named)
        requests = []
        arrival_s = start_s
        for place, (prompt_tokens, chain, output_tokens) in enumerate(turns):
            if place:
                arrival_s += self._drawn(self._options.think_s)
            requests.append(
                TraceRequest(
                    arrival_s=arrival_s,
                    prompt_tokens=prompt_tokens,
                    output_tokens=output_tokens,
                    chain=chain,
                    session=session,
                    line=number,
                )
            )
        return start_s, number, requests

    def _start_s(self, row: _Row) -> float:
        """Return when the conversation starts, from the first line's start on."""
        time = _nanoseconds(row)
        if self._has_times is None:
            self._has_times = time is not None
        elif self._has_times != (time is not None):
            wanted = "a time as in the first line" if self._has_times else "none, as before"
            message = f"arrival_s or timestamp: expected {wanted}"
            raise BadLineError(message)
        if time is None:
            start_s = self._drawn_s
            self._drawn_s += self._drawn(1 / self._options.sessions_per_s)
            return start_s
        if self._first is None:
            self._first = time
        return (time - self._first) / NANOSECONDS

    def _drawn(self, mean_s: float) -> float:
        return self._draw.expovariate(1.0) * mean_s


def _nanoseconds(row: _Row) -> float | None:
    if row.arrival_s is not None:
        return row.arrival_s * NANOSECONDS
    if not isinstance(row.timestamp, str):
        return None if row.timestamp is None else row.timestamp * _MILLISECOND
    date = nanoseconds_of(row.timestamp)
    if date is None or "-" not in row.timestamp:
        message = f"timestamp: expected {_EXPECTED['timestamp']}, got {shown(row.timestamp)}"
        raise BadLineError(message)
    return date


def _turns(row: _Row, block_tokens: int) -> Iterator[tuple[int, tuple[BlockId, ...], int]]:
    """Yield prompt tokens, chain and output tokens of every answer."""
    text = RunningText(block_tokens)
    if bytes(row.tools) not in _NOTHING:
        text.add(bytes(row.tools))
    for place, message in enumerate(row.messages):
        text.add(b"\x1e%b\x1f" % message.role.encode())
        content = _content(message)
        if place and message.role == ANSWERER:
            yield text.tokens, text.chain, tokens_of(len(content))
        text.add(content)


def _content(message: _Message) -> bytes:
    """Return what a message says, parts that are no text as JSON, and the tools that it calls."""
    if isinstance(message.content, str):
        content = message.content.encode()
    else:
        content = b"".join(_part(bytes(part)) for part in message.content or ())
    calls = bytes(message.tool_calls)
    return content if calls in _NOTHING else content + calls


def _part(part: bytes) -> bytes:
    try:
        return msgspec.json.decode(part, type=_Part).text.encode()
    except msgspec.MsgspecError:
        return part


def _interleaved(
    sessions: Iterable[tuple[float, int, list[TraceRequest]]],
) -> Iterator[TraceRequest]:
    """Yield the requests of sessions, which come by start, by arrival."""
    pending: list[tuple[float, int, int, TraceRequest]] = []
    for start_s, line, requests in sessions:
        while pending and pending[0][0] <= start_s:
            yield heapq.heappop(pending)[-1]
        for turn, request in enumerate(requests):
            heapq.heappush(pending, (request.arrival_s, line, turn, request))
    while pending:
        yield heapq.heappop(pending)[-1]


def read_conversation(reading: Reading) -> Iterator[TraceRequest]:
    """Yield the requests of all conversations by arrival."""
    sessions = reading.each(_Parser(reading).parse)
    window = reading.options.window
    return from_first(_interleaved(in_order(sessions, window, reading.faults)))
