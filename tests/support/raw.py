"""Raw sockets around the relay: a scriptable replica, a client that sees bytes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import socket
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import uvloop

from router.upstream import Endpoint

if TYPE_CHECKING:
    import ssl
    from collections.abc import Awaitable, Callable, Coroutine

SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
SSE_CLOSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
DONE = b"data: [DONE]\n\n"
LAST = b"0\r\n\r\n"


def sized(body: bytes, kind: bytes = b"application/json", status: bytes = b"200 OK") -> bytes:
    """Return a response with Content-Length."""
    head = b"HTTP/1.1 %b\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n"
    return head % (status, kind, len(body)) + body


def chunk(data: bytes) -> bytes:
    """Return one chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def get(path: str = "/v1/models", extra: bytes = b"", host: bytes = b"router") -> bytes:
    """Return a GET request; operators' listeners take no other names than their own."""
    return b"GET %b HTTP/1.1\r\nHost: %b\r\n%b\r\n" % (path.encode(), host, extra)


def post(body: bytes = b"{}", extra: bytes = b"") -> bytes:
    """Return a chat request."""
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: router\r\nContent-Length: %d\r\n%b\r\n"
    return head % (len(body), extra) + body


def with_both_loops(
    test: Callable[..., Coroutine[Any, Any, None]],
) -> Callable[..., None]:
    """Run an async test on asyncio's loop and on uvloop; nothing may be left or logged."""

    @functools.wraps(test)
    def run(loop_factory: Callable[[], asyncio.AbstractEventLoop], **others: object) -> None:
        complaints: list[dict[str, Any]] = []

        async def watched() -> None:
            loop = asyncio.get_running_loop()
            loop.set_exception_handler(lambda _, context: complaints.append(context))
            await test(**others)
            for _ in range(5):
                await asyncio.sleep(0)
            left = asyncio.all_tasks() - {asyncio.current_task()}
            assert not left, left

        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(watched())
        assert not complaints, complaints

    signature = inspect.signature(test)
    loop_parameter = inspect.Parameter("loop_factory", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    run.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[loop_parameter, *signature.parameters.values()]
    )
    factories = [asyncio.new_event_loop, uvloop.new_event_loop]
    both = pytest.mark.parametrize("loop_factory", factories, ids=["asyncio", "uvloop"])
    return both(run)  # type: ignore[no-any-return]


@dataclass(slots=True)
class Received:
    """A request as the replica saw it."""

    line: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes

    def all(self, name: bytes) -> list[bytes]:
        """Return the values of every header called ``name``, in lower case."""
        return [value for key, value in self.headers if key.lower() == name]


def split_head(head: bytes) -> tuple[bytes, list[tuple[bytes, bytes]]]:
    """Return the first line and the headers."""
    line, *rest = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    pairs = [tuple(header.split(b": ", 1)) for header in rest]
    return line, [(name, value) for name, value in pairs]


@dataclass(slots=True)
class Talk:
    """One connection, as the replica has it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    replica: FakeReplica

    async def request(self) -> Received:
        """Read a whole request; raises EOFError or ConnectionError when there is none."""
        line, headers = split_head(await self.reader.readuntil(b"\r\n\r\n"))
        sizes = [int(value) for name, value in headers if name.lower() == b"content-length"]
        body = await self.reader.readexactly(sum(sizes))
        received = Received(line, headers, body)
        self.replica.requests.append(received)
        return received

    async def say(self, data: bytes) -> None:
        """Send bytes as one write."""
        if self.writer.is_closing():  # uvloop raises RuntimeError on a closed transport
            raise ConnectionResetError
        self.writer.write(data)
        await self.writer.drain()

    async def say_slowly(self, data: bytes, step_bytes: int) -> None:
        """Send bytes in small segments."""
        for start in range(0, len(data), step_bytes):
            await self.say(data[start : start + step_bytes])
            await asyncio.sleep(0)

    async def until_gone(self) -> None:
        """Wait until the router closed the connection."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(65536):
                pass

    def reset(self) -> None:
        """Close with a TCP reset."""
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


@dataclass(slots=True)
class FakeReplica:
    """A server that follows a script on each connection; ``path``: at a unix socket."""

    script: Callable[[Talk], Awaitable[None]]
    tls: ssl.SSLContext | None = None
    path: str | None = None
    requests: list[Received] = field(default_factory=list)
    accepted: int = 0
    open: int = 0
    server: asyncio.Server | None = None
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self) -> Endpoint:
        """Listen on a free port."""
        if self.path is not None:
            self.server = await asyncio.start_unix_server(self._serve, self.path)
            return Endpoint.configured(f"unix:{self.path}")
        self.server = await asyncio.start_server(
            self._serve, "127.0.0.1", 0, backlog=2048, ssl=self.tls
        )
        port: int = self.server.sockets[0].getsockname()[1]
        return Endpoint("127.0.0.1", port, is_tls=self.tls is not None)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
        self.accepted += 1
        self.open += 1
        try:
            await self.script(Talk(reader, writer, self))
        except (EOFError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self.open -= 1
            writer.close()

    async def stop(self) -> None:
        """Stop listening and end every script."""
        if self.server is not None:
            self.server.close()
        tasks = list(self.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def answering(*responses: bytes) -> Callable[[Talk], Awaitable[None]]:
    """Return a script that answers requests with ``responses``, the last one for ever."""

    async def script(talk: Talk) -> None:
        left = list(responses)
        while True:
            await talk.request()
            await talk.say(left.pop(0) if len(left) > 1 else left[0])

    return script


def answering_and_closing(response: bytes) -> Callable[[Talk], Awaitable[None]]:
    """Return a script that answers one request and closes the connection."""

    async def script(talk: Talk) -> None:
        await talk.request()
        await talk.say(response)

    return script


@dataclass(slots=True)
class Reply:
    """A response as the client saw it. ``is_complete``: the framing's end was seen."""

    line: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    is_complete: bool

    @property
    def status(self) -> int:
        """The status code."""
        return int(self.line.split(b" ")[1])

    def all(self, name: bytes) -> list[bytes]:
        """Return the values of every header called ``name``, in lower case."""
        return [value for key, value in self.headers if key.lower() == name]


@dataclass(slots=True)
class RawClient:
    """A client that writes bytes and reads strictly."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    async def connect(
        cls,
        port: int,
        limit_bytes: int = 2**26,
        address: str = "127.0.0.1",
        tls: ssl.SSLContext | None = None,
    ) -> RawClient:
        """Connect to the front, from ``address``."""
        reader, writer = await asyncio.open_connection(
            "127.0.0.1", port, limit=limit_bytes, local_addr=(address, 0), ssl=tls
        )
        return cls(reader, writer)

    @classmethod
    async def connect_unix(cls, path: str) -> RawClient:
        """Connect to a unix socket."""
        return cls(*await asyncio.open_unix_connection(path))

    def send(self, data: bytes) -> None:
        """Send bytes."""
        self.writer.write(data)

    async def reply(self, *, bodiless: bool = False) -> Reply:
        """Read one response."""
        line, headers = split_head(await self.reader.readuntil(b"\r\n\r\n"))
        names = {name.lower(): value for name, value in headers}
        reply = Reply(line, headers, b"", is_complete=True)
        try:
            if bodiless:
                return reply
            if names.get(b"transfer-encoding") == b"chunked":
                await self._chunks(reply)
            elif b"content-length" in names:
                reply.body = await self.reader.readexactly(int(names[b"content-length"]))
            else:
                reply.body = await self.reader.read(-1)
        except asyncio.IncompleteReadError as error:
            reply.body += error.partial
            reply.is_complete = False
        except ConnectionError:
            reply.is_complete = False
        return reply

    async def _chunks(self, reply: Reply) -> None:
        while True:
            size = await self.reader.readuntil(b"\r\n")
            data = await self.reader.readexactly(int(size, 16) + 2)
            assert data.endswith(b"\r\n")
            reply.body += data[:-2]
            if len(data) == 2:
                return

    async def is_closed(self) -> bool:
        """Return whether nothing more comes because the connection ended."""
        try:
            return await self.reader.read(1) == b""
        except ConnectionError:
            return True

    def abort(self) -> None:
        """Leave at once."""
        with contextlib.suppress(AttributeError):  # asyncio's, of a connection that is gone
            self.writer.transport.abort()

    async def close(self) -> None:
        """Leave politely."""
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()
