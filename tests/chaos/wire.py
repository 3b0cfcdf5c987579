"""A small HTTP client that sees every byte and every way in which an answer can end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Self

from chaos.link import HOST, RESET

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

LIMIT_BYTES: Final = 1 << 20


@dataclass(slots=True)
class Head:
    """Status and fields of an answer."""

    status: int
    fields: dict[str, str] = field(default_factory=dict)

    @property
    def is_chunked(self) -> bool:
        """Whether the body comes in chunks."""
        return self.fields.get("transfer-encoding") == "chunked"


class CutError(Exception):
    """The connection ended before the answer did."""


class Wire:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, port: int) -> Self:
        """Connect; raises CutError."""
        try:
            return cls(*await asyncio.open_connection(HOST, port, limit=LIMIT_BYTES))
        except OSError as error:
            raise CutError(str(error)) from None

    def send(self, data: bytes) -> None:
        """Send without waiting."""
        self._writer.write(data)

    def close(self) -> None:
        """Close in good order."""
        self._writer.close()

    def reset(self) -> None:
        """End as a killed process with unread data does."""
        sock = self._writer.get_extra_info("socket")
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self._writer.transport.abort()

    def half_close(self) -> None:
        """Say that no more comes, and stay to listen."""
        with contextlib.suppress(OSError):  # the other side may be gone
            self._writer.write_eof()

    async def head(self) -> Head:
        """Return the head of the next answer; raises CutError."""
        try:
            raw = await self._reader.readuntil(b"\r\n\r\n")
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
            raise CutError(str(error)) from None
        lines = raw.decode("latin-1").split("\r\n")
        told = (line.partition(":") for line in lines[1:] if line)
        return Head(
            int(lines[0].split(" ")[1]), {name.lower(): value.strip() for name, _, value in told}
        )

    async def body(self, head: Head) -> AsyncIterator[bytes]:
        """Yield the body as it comes; raises CutError when it is cut off."""
        try:
            if head.is_chunked:
                while True:
                    size = int((await self._reader.readuntil(b"\r\n")).split(b";")[0], 16)
                    data = await self._reader.readexactly(size + 2)
                    if not size:
                        return
                    yield data[:-2]
            left = int(head.fields["content-length"])
            while left:
                data = await self._reader.read(min(left, 65_536))
                if not data:
                    raise CutError
                left -= len(data)
                yield data
        except (OSError, ValueError, asyncio.IncompleteReadError) as error:
            raise CutError(str(error)) from None


def request_bytes(path: str, body: bytes, fields: dict[str, str], method: str = "POST") -> bytes:
    """Return one request as it goes over the wire."""
    more = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{more}Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body
