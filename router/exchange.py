"""The state of one relay attempt: the sink of a replica's response, the source of the client's.

Each read of the replica's socket is written to the client's transport in the same callback: no task
runs, nothing is awaited. The replica is held back while the client is slow. An exchange settles
exactly once, whoever fails first.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Literal

from router.error import (
    ReplicaBusyError,
    ReplicaClosedError,
    ReplicaError,
    ReplicaProtocolError,
    ReplicaSilentError,
    ReplicaTimeoutError,
    RouterEndsError,
    error_event,
)
from router.header import date_line, response_head
from router.observer import BodyObserver, StreamObserver
from router.wire import ClientStream

if TYPE_CHECKING:
    from collections.abc import Callable

    from router.connection import UpstreamConnection
    from router.endpoint import Endpoint
    from router.relay import RelayRequest
    from router.reply_head import ReplyHead
    from router.request import Request
    from router.upstream import UpstreamPool

Outcome = Literal["done", "failed", "cancelled"]
"""How a committed relay ended: passed on whole, cut by the replica, cut by the client."""

_OK = 200
LONG_S = 0.5
"""An answer that takes longer lets go of its request."""
BUSY_STATUSES = frozenset({429, 503})
"""Those that say that there is no room now."""


class Exchange:
    """The sink of the replica's response; settles exactly once.

    ``head`` is what goes to the replica before the body, ``added`` what the client's response has
    besides the replica's headers. Neither is kept while an answer goes on for long.
    """

    __slots__ = (
        "_connection",
        "_has_body_begun",
        "_has_ended",
        "_is_paused",
        "_last_news_s",
        "_loop",
        "_on_first_byte",
        "_outbound",
        "_paused_bytes",
        "_paused_s",
        "_pool",
        "_request",
        "_sent_s",
        "added",
        "done",
        "error",
        "first_byte_s",
        "hand",
        "head",
        "heard_s",
        "observer",
        "outcome",
        "reason",
        "retry_after_s",
        "stream",
    )

    done: asyncio.Future[None]

    def __init__(
        self,
        request: Request,
        outbound: RelayRequest,
        pool: UpstreamPool,
        on_first_byte: Callable[[], None],
    ) -> None:
        self._request = request
        self._outbound = outbound
        self._pool = pool
        self._on_first_byte = on_first_byte
        self._loop = asyncio.get_running_loop()
        self._connection: UpstreamConnection | None = None
        self._has_body_begun = self._has_ended = self._is_paused = False
        self._paused_s = self._sent_s = self._last_news_s = self.heard_s = 0.0
        self._paused_bytes = 0
        self.head = self.added = b""
        self.observer: StreamObserver | BodyObserver | None = None
        self.stream: StreamObserver | None = None
        self.first_byte_s: float | None = None
        self.hand: ClientStream | None = None
        self.error: ReplicaError | None = None
        self.outcome: Outcome = "done"
        self.reason = "complete"
        self.retry_after_s: int | None = None

    async def run(self, connection: UpstreamConnection) -> None:
        """Send the request and wait until the exchange is settled."""
        self.done = self._loop.create_future()
        self.error = None
        self._connection = connection
        self._sent_s = self._last_news_s = self._loop.time()
        self.heard_s = 0.0
        self._pool.watch.add(self)
        connection.send(self, self._outbound.method, self.head, self._outbound.body)
        try:
            await self.done
        except asyncio.CancelledError:
            if self.hand is not None:  # whoever cancelled may answer: not on this connection
                self.hand.abort()
            raise
        finally:
            self._pool.watch.discard(self)
            connection.abandon(self)

    # The sink.

    def on_reply(self, head: ReplyHead, data: bytes) -> None:
        """Commit, unless the status is to be raised or the head cannot be passed on."""
        if head.status in BUSY_STATUSES:
            self.retry_after_s = _retry_after_s(head)
            if self._is_raised(head):
                self._refuse(ReplicaBusyError(head.status, self.retry_after_s))
                return
        try:
            head_bytes = self._commit(head)
        except ReplicaProtocolError as error:
            self._refuse(error)
            return
        self.heard_s = self._loop.time()
        if self.hand is not None:
            self._pass_on(self.hand, head_bytes, data)

    def on_body(self, data: bytes) -> None:
        """Pass on body bytes."""
        if self.hand is not None:
            self._pass_on(self.hand, b"", data)

    def on_chunk(self, chunk: bytes, content: bytes) -> None:
        """Pass on one chunk as it came: what ``on_body`` does, without a call more."""
        hand = self.hand
        if hand is None or not hand.send_chunk(chunk, content):
            self._leave()
            return
        self._last_news_s = self.heard_s = self._loop.time()
        if self.observer is not None:
            self.observer.feed(content)
        if not self._has_body_begun:
            self._begin_body()
        if hand.is_client_slow:
            self._pause(hand)

    def on_end(self) -> None:
        """End the response, unless it is a stream that does not know of its end."""
        hand = self.hand
        if hand is None:
            self._refuse(ReplicaClosedError("the replica sent no response"))
            return
        if not self._has_body_begun:
            self._begin_body()
        if self.observer is not None:
            self.observer.close()
        stream = self.stream
        if stream is None:
            hand.finish()
            self._end("done", "complete")
        elif stream.has_error:
            hand.finish()
            self._end("failed", "error_event")
        elif stream.is_done or self._outbound.done_marker is None:
            hand.finish()
            self._end("done", "complete")
        else:
            self._break_off("truncated", "the replica ended the stream early")

    def on_failure(self, error: ReplicaError) -> None:
        """Raise before the commit, break the response off after it."""
        if self.hand is None:
            self._refuse(error)
        else:
            self._break_off("truncated", "the replica broke the stream off")

    def _is_raised(self, head: ReplyHead) -> bool:
        """Return whether the caller wants to try elsewhere what this replica has no room for."""
        outbound = self._outbound
        if head.status not in outbound.raised_statuses:
            return False
        most_s = outbound.raised_retry_after_s
        if most_s is None or not head.headers.retry_after:
            return True
        return self.retry_after_s is not None and self.retry_after_s <= most_s

    # Passing on.

    def _commit(self, head: ReplyHead) -> bytes:
        """Decide about framing and keep-alive, make the response, return its head."""
        request = self._request
        is_http10 = request.is_http10
        framing = head.framing
        if framing in {"chunked", "close"}:
            framing = "close" if is_http10 else "chunked"
        keep_alive = self._outbound.allows_keep_alive and request.keep_alive and framing != "close"
        head_bytes = response_head(
            head.status,
            b"%b%b%b" % (head.headers.lines, date_line(head.dates, self._pool.date), self.added),
            framing=framing,
            length=head.content_length,
            is_http10=is_http10,
            keep_alive=keep_alive,
        )
        self.hand = ClientStream(request, head.status, framing, keep_alive=keep_alive)
        self._observe(head)
        return head_bytes

    def _observe(self, head: ReplyHead) -> None:
        """Choose what watches the body: nothing where its bytes cannot be read as text."""
        content = head.headers.content
        if content is None or head.framing == "none":
            return
        if content == "json":
            self.observer = BodyObserver()
        elif head.status == _OK:
            self.observer = self.stream = StreamObserver(self._outbound.done_marker)

    def _pass_on(self, hand: ClientStream, head: bytes, data: bytes) -> None:
        if not hand.send(head, data):
            self._leave()
            return
        if data:
            self._last_news_s = self.heard_s = self._loop.time()
            if self.observer is not None:
                self.observer.feed(data)
            if not self._has_body_begun:
                self._begin_body()
        if hand.is_client_slow:
            self._pause(hand)

    def _begin_body(self) -> None:
        self._has_body_begun = True
        self.first_byte_s = self._loop.time() - self._sent_s
        self._on_first_byte()

    # Back-pressure.

    def _pause(self, hand: ClientStream) -> None:
        if self._is_paused:
            return
        self._is_paused = True
        self._paused_s = self._loop.time()
        self._paused_bytes = hand.unsent_bytes
        if self._connection is not None:
            self._connection.pause_reading()
        hand.call_when_writable(self._resume)

    def _resume(self) -> None:
        hand = self.hand
        if hand is None or self.done.done():
            return
        if hand.is_client_gone:
            self._leave()
        elif hand.is_client_slow:
            hand.call_when_writable(self._resume)
        else:
            self._is_paused = False
            self._last_news_s = self._loop.time()
            if self._has_ended:
                self._settle(self.outcome, self.reason)
            elif self._connection is not None:
                self._connection.resume_reading()

    # Time.

    def look(self, now_s: float) -> None:
        """Act on the one limit that counts now, if it is reached."""
        settings = self._pool.settings
        if self._is_paused and self.hand is not None:
            unsent_bytes = self.hand.unsent_bytes
            if unsent_bytes < self._paused_bytes:
                self._paused_s, self._paused_bytes = now_s, unsent_bytes
            due_s = self._paused_s + settings.write_stall_timeout_s
        elif self._has_body_begun:
            due_s = self._last_news_s + settings.chunk_idle_timeout_s
        else:
            due_s = self._sent_s + (
                self._outbound.first_byte_timeout_s or settings.first_byte_timeout_s
            )
        if now_s < due_s:
            return
        if self._is_paused and self.hand is not None:
            self.hand.break_off(b"")
            self._settle("cancelled", "write_stall")
        elif self.hand is None:
            self._refuse(ReplicaTimeoutError("the replica did not answer in time"))
        else:
            reason = "chunk_idle" if self._has_body_begun else "first_byte_timeout"
            self._break_off(reason, "the replica sent nothing for too long")

    def lighten(self, now_s: float) -> bool:
        """Let go of what was sent, once the answer has been under way for a while.

        Nothing is sent again then.
        """
        if self.first_byte_s is None or now_s - self._sent_s - self.first_byte_s < LONG_S:
            return False
        self.head = self.added = b""
        self._outbound.lighten()
        if self._connection is not None:
            self._connection.lighten()
        return True

    # Endings.

    @property
    def endpoint(self) -> Endpoint | None:
        """Where the replica is."""
        return self._connection.endpoint if self._connection is not None else None

    def lose(self) -> None:
        """End an exchange with a replica that is lost, unless it is the client that is slow."""
        if self._is_paused:
            return
        if self.hand is None:
            self._refuse(ReplicaSilentError("the replica did not answer, nor its health checks"))
        else:
            error = ReplicaSilentError("the replica fell silent, and answers no health checks")
            self._cut(error)
            self._end("failed", error.code)

    def end_now(self) -> None:
        """End an exchange that the router does not outlive: that is no fault of the replica."""
        error = RouterEndsError("the router ends")
        if self.hand is None:
            self._refuse(error)
        else:
            self._cut(error)
            self._end("cancelled", error.code)

    def _refuse(self, error: ReplicaError) -> None:
        """Settle before the commit."""
        self.error = error
        self._settle("failed", error.code)

    def _break_off(self, reason: str, message: str) -> None:
        """Settle after the commit: the response cannot be completed."""
        if self.hand is not None:
            self._cut(ReplicaClosedError(message))
            self._end("failed", reason)

    def _cut(self, error: ReplicaError) -> None:
        """Break the response off, with an event that says why where it is a stream of events."""
        hand, stream = self.hand, self.stream
        if hand is None:
            return
        last_words = b""
        if stream is not None and not stream.is_done:
            gap = b"" if stream.is_between_events else b"\n\n"
            last_words = gap + error_event(error)
        hand.break_off(last_words)

    def _leave(self) -> None:
        self._settle("cancelled", "client_gone")

    def _end(self, outcome: Outcome, reason: str) -> None:
        """Settle, but not before a slow client took what there is."""
        if not self._is_paused:
            self._settle(outcome, reason)
            return
        self.outcome, self.reason = outcome, reason
        self._has_ended = True
        if self._connection is not None:
            self._connection.abandon(self)

    def _settle(self, outcome: Outcome, reason: str) -> None:
        if self.done.done():
            return
        self.outcome, self.reason = outcome, reason
        self._has_ended = True
        if self._connection is not None:
            self._connection.abandon(self)
        self.done.set_result(None)


def _retry_after_s(head: ReplyHead) -> int | None:
    """Return Retry-After where it is a number of seconds."""
    value = head.headers.retry_after
    return int(value) if value.isdigit() and len(value) < 7 else None  # noqa: PLR2004
