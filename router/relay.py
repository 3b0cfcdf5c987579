"""One attempt of one request on one replica: send, wait for the head, commit, stream, end.

Before the commit a failure is raised as ``ReplicaError`` and the client has seen nothing. After it,
a failure is told in the stream where the stream has a way to (server-sent events) and by a broken
connection otherwise; it comes back as the outcome of ``Relayed``. When the client leaves, the
handler is cancelled and the replica's connection closed at once, which makes an engine stop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import Struct

from router.connection import StaleConnectionError
from router.endpoint import Endpoint
from router.error import ReplicaClosedError, ReplicaDiedError, ReplicaUnreachableError
from router.exchange import Exchange, Outcome
from router.header import added_lines, kv_source_line, public_line, rank_line, request_head
from router.observer import BodyObserver, Usage
from router.race import Lane, RacingExchange
from router.request import NO_HEADERS, ClientHeaders
from router.wire import ClientStream
from state.public import PublicMark

if TYPE_CHECKING:
    from router.connection import UpstreamConnection
    from router.observer import StreamObserver
    from router.request import Request
    from router.upstream import UpstreamPool

SERVER_ERROR = 500
ERROR_BYTES = 4_096
"""So much of an error's body is looked at."""


class RelayRequest(Struct):
    """What goes to the replica. ``headers`` are the client's; those that may pass go on.

    ``headers`` and ``body`` are forgotten once the answer goes on for long; ``on_long`` is called
    then.

    ``lines`` go in their place where they are given.
    ``done_marker`` is the data of the event that ends a whole stream, None for APIs without one.
    ``raised_statuses`` are raised as ReplicaBusyError instead of being passed on, unless
    Retry-After asks for more than ``raised_retry_after_s`` (None: whatever it says).
    ``can_replay``: a pooled connection may be used, and the request be sent anew where that one
    turns out dead; where it took the request and the replica lives, only if ``may_replay`` says so
    (None: always). ``first_byte_timeout_s`` is shorter than that of the settings.
    ``allows_keep_alive`` is False when the client shall not send more on its connection.
    ``kv_source`` is where the replica may fetch KV pages of the prompt. ``mark`` is what of it is
    public. ``rank`` is the engine's data-parallel rank that is the replica; None where the replica
    is the engine. ``lane`` is its place in a race with another attempt.
    """

    method: str
    target: str
    headers: ClientHeaders
    body: bytes
    request_id: str
    done_marker: bytes | None = b"[DONE]"
    raised_statuses: frozenset[int] = frozenset()
    raised_retry_after_s: int | None = None
    can_replay: bool = True
    first_byte_timeout_s: float | None = None
    allows_keep_alive: bool = True
    kv_source: Endpoint | None = None
    mark: PublicMark | None = None
    rank: int | None = None
    lines: bytes | None = None
    may_replay: Callable[[], bool] | None = None
    lane: Lane | None = None
    on_long: Callable[[], None] | None = None

    def lighten(self) -> None:
        """Let go of what was sent, and have ``on_long`` do the same: nothing is sent again."""
        self.body, self.lines, self.headers, self.may_replay = b"", None, NO_HEADERS, None
        on_long, self.on_long = self.on_long, None
        if on_long is not None:
            on_long()


class Relayed(Struct, frozen=True):
    """A relay that was committed: return ``response`` from the handler, whatever the outcome.

    ``error_body`` is the beginning of a JSON answer of 5xx; ``retry_after_s`` that of 429 and 503.
    """

    response: ClientStream
    status: int
    outcome: Outcome
    reason: str
    usage: Usage | None
    body_bytes: int
    first_byte_s: float | None
    is_done_seen: bool
    error_body: bytes = b""
    retry_after_s: int | None = None


class LeftAfterEndError(asyncio.CancelledError):
    """The client closed its connection when it had been told the end of the stream.

    Clients do: the last event says that nothing follows, the end of the body comes after it.
    """

    def __init__(self, relayed: Relayed) -> None:
        super().__init__()
        self.relayed = relayed


def _relayed(exchange: Exchange) -> Relayed:
    """Return how the committed exchange ended, or raise why it was not committed."""
    hand, observer, stream = exchange.hand, exchange.observer, exchange.stream
    if hand is None:
        error, exchange.error = exchange.error, None
        try:
            raise error or ReplicaClosedError("the replica sent no response")
        finally:
            del error  # its traceback refers to this frame
    return Relayed(
        hand,
        hand.status,
        exchange.outcome,
        exchange.reason,
        observer.usage() if observer is not None else None,
        hand.body_bytes,
        exchange.first_byte_s,
        stream is not None and stream.is_done,
        error_body=_beginning(observer) if hand.status >= SERVER_ERROR else b"",
        retry_after_s=exchange.retry_after_s,
    )


def _beginning(observer: StreamObserver | BodyObserver | None) -> bytes:
    return observer.body()[:ERROR_BYTES] if isinstance(observer, BodyObserver) else b""


async def relay(
    request: Request,
    outbound: RelayRequest,
    endpoint: Endpoint,
    pool: UpstreamPool,
    extra_headers: tuple[tuple[str, str], ...],
    on_first_byte: Callable[[], None],
) -> Relayed:
    """Relay one request to one replica; ``on_first_byte`` marks the first body byte.

    Raises ReplicaError (before anything was sent to the client), ClientError (a request that cannot
    be written) and CancelledError (after closing the replica's connection, and the client's too
    when the response had begun); LeftAfterEndError is one.
    """
    lines = outbound.headers.lines if outbound.lines is None else outbound.lines
    if outbound.kv_source is not None:
        lines += kv_source_line(outbound.kv_source.authority)
    if outbound.mark is not None:
        lines += public_line(outbound.mark)
    if outbound.rank is not None:
        lines += rank_line(outbound.rank)
    exchange = _exchange(request, outbound, pool, on_first_byte)
    exchange.head = request_head(
        outbound.method,
        outbound.target,
        lines,
        host=endpoint.authority,
        body_bytes=len(outbound.body),
        request_id=outbound.request_id,
        peer=request.forwarded_for,
    )
    del lines
    exchange.added = added_lines((("X-Request-Id", outbound.request_id), *extra_headers))
    connection = pool.take(endpoint) if outbound.can_replay else None
    try:
        if connection is None:
            fresh = await pool.connect(endpoint)
        else:
            await exchange.run(connection)
            if not isinstance(exchange.error, StaleConnectionError):
                return _relayed(exchange)
            fresh = await _connect_again(pool, endpoint)
            may_replay = outbound.may_replay
            if exchange.error.was_sent and may_replay is not None and not may_replay():
                fresh.discard()
                return _relayed(exchange)
        await exchange.run(fresh)
    except asyncio.CancelledError:
        if exchange.stream is not None and exchange.stream.is_done:
            raise LeftAfterEndError(_relayed(exchange)) from None
        raise
    return _relayed(exchange)


def _exchange(
    request: Request,
    outbound: RelayRequest,
    pool: UpstreamPool,
    on_first_byte: Callable[[], None],
) -> Exchange:
    if outbound.lane is None:
        return Exchange(request, outbound, pool, on_first_byte)
    return RacingExchange(request, outbound, pool, on_first_byte, outbound.lane)


async def _connect_again(pool: UpstreamPool, endpoint: Endpoint) -> UpstreamConnection:
    """Return a fresh connection in place of one that took the request and ended.

    Raises ReplicaDiedError where nobody listens any more.
    """
    try:
        return await pool.connect(endpoint)
    except ReplicaUnreachableError as error:
        if type(error) is not ReplicaUnreachableError:  # too slow, or not trusted: not dead
            raise
        message = "the replica closed the connection and refuses another one"
        raise ReplicaDiedError(message) from error
