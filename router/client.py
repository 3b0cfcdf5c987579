"""A client's connection: its requests one after the other, a task for each while it is answered.

Answers go out in the order of the requests. A client that leaves is noticed at once and its handler
cancelled; one that only stops sending (a half-close) still gets what the router can answer without
waiting, as nothing tells it from one that left. One timer looks at the one deadline that counts.
"""

from __future__ import annotations

import asyncio
import logging
import select
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, cast

from router.address import INET, peer_address, send_at_once
from router.error import OverloadedError, RequestTimeoutError, RouterError
from router.intake import Intake
from router.reply import Response, error_response
from router.request import Request
from router.wire import ClientStream

if TYPE_CHECKING:
    from router.server import Server

Answer = Response | ClientStream
Handler = Callable[[Request], Awaitable[Answer]]

KEEP_ALIVE_S = 75.0
"""How long a connection may be idle between requests."""
LINGER_S = 2.0
"""How long bytes that nobody wants are read, so that a last answer is not lost to a reset."""
WAITING_BYTES = 64 * 1024
"""Reading stops while more than this waits behind a request that is being answered."""
TLS_UNSENT_BYTES = 64 * 1024
"""So much may wait to be encrypted before the client counts as slow; without TLS it is the same."""
_TCP_ESTABLISHED = 1
"""The first byte of Linux' ``tcp_info``, while neither side has closed."""
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

_log = logging.getLogger(__name__)


class ClientConnection(asyncio.Protocol):
    """One connection of a client."""

    __slots__ = (
        "_has_eof",
        "_has_tls",
        "_intake",
        "_is_answered",
        "_is_head_timed",
        "_is_leaving",
        "_is_lingering",
        "_is_reading_paused",
        "_loop",
        "_request",
        "_server",
        "_since_s",
        "_task",
        "_timer",
        "is_trusted",
        "is_writing_paused",
        "on_writable",
        "peer",
        "transport",
    )

    transport: asyncio.Transport

    def __init__(self, server: Server) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._intake = Intake(server.limits, server.bodies)
        self._request: Request | None = None
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._since_s = self._loop.time()
        self._is_head_timed = True
        """Whether the end of a head is due; the first one is from the start."""
        self._has_eof = False
        self._has_tls = False
        self._is_answered = False
        self._is_leaving = False
        self._is_lingering = False
        self._is_reading_paused = False
        self.is_writing_paused = False
        self.on_writable: Callable[[], None] | None = None
        self.peer: str | None = None
        self.is_trusted = False
        """Whether the client is a proxy that may say who is before it."""

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport; small writes must not wait for acknowledgements."""
        self.transport = cast(asyncio.Transport, transport)
        send_at_once(self.transport)
        self._has_tls = transport.get_extra_info("sslcontext") is not None
        if self._has_tls:
            self.transport.set_write_buffer_limits(TLS_UNSENT_BYTES)
        self.peer = peer_address(transport.get_extra_info("peername"))
        self.is_trusted = self._server.peers.is_trusted(self.peer)
        self._tick()
        self._server.opened(self)

    def data_received(self, data: bytes) -> None:
        """Parse, and begin to answer where a head came to its end."""
        if self._is_lingering:
            return
        intake = self._intake
        intake.feed(data)
        if self._request is None:
            if intake.request is not None:
                self._begin(intake.request)
            elif not self._is_head_timed:
                self._is_head_timed = True
                self._since_s = self._loop.time()
        elif intake.waiting_bytes > WAITING_BYTES and not self._is_reading_paused:
            self._is_reading_paused = True
            self.transport.pause_reading()
            self._tick()

    def eof_received(self) -> bool:
        """Note that the client sends no more; True keeps the transport open to answer.

        TLS has no half-close: its transport closes, whatever is returned.
        """
        self._has_eof = True
        if self._is_lingering or self._request is None:
            return False
        self._loop.call_soon(self._give_up, self._request)
        return not self._has_tls

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - of no interest
        """Cancel what is being answered: nobody is there."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        self._intake.end()
        self.on_writable = None
        if self._task is None:
            self._let_go()
        else:
            self._task.cancel()
            self._task.add_done_callback(self._let_go)

    def _let_go(self, _: object = None) -> None:
        """Cut what refers to each other in a circle: it need not wait for the collector."""
        self._task = self._request = None
        self._intake.let_go()
        self._server.closed(self)

    def pause_writing(self) -> None:
        """Note that the client takes less than it is given."""
        self.is_writing_paused = True

    def resume_writing(self) -> None:
        """Go on: with the response, or with the next request."""
        self.is_writing_paused = False
        callback, self.on_writable = self.on_writable, None
        if callback is not None:
            callback()

    # Answering.

    def _begin(self, request: Request) -> None:
        self._request = request
        self._is_head_timed = True
        self._is_answered = False
        request.connection = self
        if self._server.is_stopping:
            request.keep_alive = False
        if request.refusal is not None:
            self._finish(request, error_response(request.refusal))
            return
        self._task = asyncio.Task(self._answer(request), loop=self._loop, name="request")
        if self._has_eof:
            self._loop.call_soon(self._give_up, request)

    async def _answer(self, request: Request) -> None:
        """Answer one request: the boundary of everything that its handler may raise."""
        answer: Answer
        try:
            answer = await self._server.find(request)(request)
        except RouterError as error:
            answer = error_response(error)
        except asyncio.CancelledError:
            self.abort()
            raise
        except Exception:  # noqa: BLE001 - the request boundary
            _log.exception("a request failed")
            answer = error_response(RouterError("the router failed on this request"))
            request.keep_alive = False
        self._task = None
        self._finish(request, answer)

    def _finish(self, request: Request, answer: Answer) -> None:
        """Send the answer and turn to the next request, or end the connection.

        An answer before the whole body came ends it: whether the rest still comes, or the next
        request does, could not be told apart.
        """
        transport = self.transport
        if isinstance(answer, ClientStream):
            answer.close()
            keep_alive = answer.keep_alive
        elif request.stream is not None:  # a response was begun already
            request.stream.abort()
            keep_alive = False
        else:
            keep_alive = request.keep_alive and request.is_complete
            if not transport.is_closing():
                date = self._server.date()
                transport.write(
                    answer.encode(
                        request.method, date, is_http10=request.is_http10, keep_alive=keep_alive
                    )
                )
        self._is_answered = True
        self._since_s = self._loop.time()
        if transport.is_closing():
            if transport.get_write_buffer_size():  # the client may never read it
                self._tick()
            return
        self._tick()
        if not keep_alive:
            self._end(has_unread=not request.is_complete or self._intake.waiting_bytes > 0)
        elif self.is_writing_paused:  # one answer at a time waits for the client to read
            self.on_writable = self._turn
        else:
            self._turn()

    def _turn(self) -> None:
        """Turn to the next request, which may have come."""
        self._request = None
        intake = self._intake
        intake.release()
        self._is_head_timed = intake.is_amid_head
        if self._is_reading_paused:
            self._is_reading_paused = False
            self.transport.resume_reading()
        if intake.request is not None:
            self._begin(intake.request)
        elif self._has_eof or self._is_leaving:
            self.transport.close()

    def ask_for_body(self, request: Request) -> None:
        """Tell a client that waits to be told so to send its body."""
        if not request.received_bytes and not self.transport.is_closing():
            self.transport.write(_CONTINUE)

    # Time.

    def _tick_s(self) -> float:
        """Return the longest pause between two looks: no deadline that begins later is shorter."""
        return min(self._server.limits.head_deadline_s, KEEP_ALIVE_S)

    @property
    def is_timed(self) -> bool:
        """Whether its deadlines are looked at: not while an answer goes on for long."""
        return self._timer is not None

    def _tick(self) -> None:
        """Look at the deadlines from now on."""
        if self._timer is None:
            self._timer = self._loop.call_later(self._tick_s(), self._on_timer)

    def _on_timer(self) -> None:
        now_s = self._loop.time()
        tick_s = self._tick_s()
        is_at_head = self._request is None and self._is_head_timed
        if self._request is not None and not self._is_answered:
            if not self._is_reading_paused:
                self._timer = None  # others look after what is being answered
                return
            if _is_left(self.transport):
                self.abort()
                return
            due_s = now_s + tick_s
        elif self._is_lingering and not self.transport.get_write_buffer_size():
            due_s = self._since_s + LINGER_S
        elif is_at_head:
            due_s = self._since_s + self._server.limits.head_deadline_s
        else:
            due_s = self._since_s + KEEP_ALIVE_S
        if now_s < due_s:
            self._timer = self._loop.call_at(min(due_s, now_s + tick_s), self._on_timer)
        elif is_at_head and self._intake.is_amid_head and not self.transport.is_closing():
            self._refuse_slow_head()
        else:
            self.transport.abort()

    def _refuse_slow_head(self) -> None:
        limit_s = self._server.limits.head_deadline_s
        error = RequestTimeoutError(f"head: expected within {limit_s:g} s")
        self._timer = None
        self._begin(Request.refused(error))

    # Endings.

    def _end(self, *, has_unread: bool) -> None:
        """Close after the last answer.

        Bytes that arrive at a closed socket, or were never read from it, make a reset of the close,
        and a reset may overtake the answer: where there may be some, they are read first. With TLS
        that happens without an end of what is written: the answer's framing has one.
        """
        self._intake.end()
        transport = self.transport
        if not has_unread or self._has_eof:
            transport.close()
            return
        self._is_lingering = True
        try:
            if transport.can_write_eof():
                transport.write_eof()
        except OSError:  # the answer met a socket that is closed already, which reset this one
            transport.abort()
            return
        if self._is_reading_paused:
            transport.resume_reading()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(LINGER_S, self._on_timer)

    def _give_up(self, request: Request) -> None:
        """Treat a client that sends no more, and has to wait for its answer, as gone."""
        if self._request is request and self._task is not None:
            self.abort()

    def abort(self) -> None:
        """End at once, whatever is being answered."""
        if self._task is not None:
            self._task.cancel()
        if self._request is not None and self._request.stream is not None:
            self._request.stream.abort()
        self.transport.abort()  # also where it is closing, and waits for the client to read

    def lighten(self) -> None:
        """Let go of what the request came in, and of the timer, while its answer goes on."""
        self._intake.lighten()
        if self._timer is not None and not self._is_answered and not self._is_reading_paused:
            self._timer.cancel()
            self._timer = None

    def stop(self) -> None:
        """Let the answer to the open request be the last one."""
        if self._request is not None:
            self._request.keep_alive = False

    def leave(self) -> None:
        """End now where no request is open, else after its answer."""
        self._is_leaving = True
        self.stop()
        if self._request is None:
            self.transport.close()

    def shed(self, message: str) -> None:
        """Tell a client that there are too many, and end."""
        self._begin(Request.refused(OverloadedError(message)))


def _is_left(transport: asyncio.Transport) -> bool:
    """Return whether the client closed or reset a connection that nobody reads, as far as known."""
    sock = transport.get_extra_info("socket")
    if sock is None or transport.is_closing():
        return False
    if sock.family not in INET:
        waiting = select.poll()
        waiting.register(sock.fileno(), 0)
        return any(events & select.POLLHUP for _, events in waiting.poll(0))
    if not hasattr(socket, "TCP_INFO"):
        return False
    state: int = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]
    return state != _TCP_ESTABLISHED
