"""Questions between a supervisor and its processes: one HTTP/1.0 exchange over a Unix socket each.

Nobody else can connect there. HTTP/1.0, so that the end of the connection is the end of an answer.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Struct

from router.error import OverloadedError
from router.header import header_lines
from router.reply import Response

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from router.request import Request

TIMEOUT_S: Final = 10.0
MOST_BYTES: Final = 256 << 20
_FRAMING: Final = frozenset(
    {b"connection", b"content-length", b"date", b"keep-alive", b"transfer-encoding"}
)
_NOT_PASSED: Final = _FRAMING | {b"expect", b"upgrade"}


class AskError(Exception):
    """The process does not answer; the text says why, and not what was asked."""


class Answer(Struct, frozen=True):
    """What was answered; ``lines`` are headers without framing."""

    status: int
    lines: tuple[tuple[bytes, bytes], ...]
    body: bytes

    def response(self) -> Response:
        """Return the same as an answer of this listener."""
        flat = [part for line in self.lines for part in line]
        return Response(status=self.status, lines=header_lines(flat), body=self.body)

    def header(self, name: bytes) -> bytes | None:
        """Return the value of a header by its name in lower case."""
        return next((value for key, value in self.lines if key.lower() == name), None)

    def decoded(self, kind: Any) -> Any:
        """Return the JSON body as ``kind``; raises AskError for what is no such thing."""
        try:
            return msgspec.json.decode(self.body, type=kind)
        except msgspec.DecodeError as error:
            message = f"not an answer of this version: {error}"
            raise AskError(message) from None


async def ask(path: Path, request: Request, body: bytes = b"", target: str | None = None) -> Answer:
    """Pass ``request`` on, with another ``target`` if told; raises OverloadedError.

    That is where nobody answers.
    """
    lines = [
        (name, value) for name, value in request.headers.received if name.lower() not in _NOT_PASSED
    ]
    try:
        method = "GET" if request.method == "HEAD" else request.method  # the body goes on its way
        return await fetch(path, target or request.target, method, lines, body)
    except AskError:
        message = "the router process that knows does not answer"
        raise OverloadedError(message) from None


async def fetch(
    path: Path,
    target: str,
    method: str = "GET",
    lines: Iterable[tuple[bytes, bytes]] = (),
    body: bytes = b"",
    *,
    within_s: float = TIMEOUT_S,
) -> Answer:
    """Return the answer of the process that listens at ``path``; raises AskError."""
    try:
        async with asyncio.timeout(within_s):
            return await _exchange(path, _head(method, target, lines, body), body)
    except (OSError, TimeoutError, ValueError, asyncio.IncompleteReadError) as error:
        message = f"{path.name}: {error or type(error).__name__}"
        raise AskError(message) from None


def _head(method: str, target: str, lines: Iterable[tuple[bytes, bytes]], body: bytes) -> bytes:
    passed = b"".join(b"%b: %b\r\n" % (name, value.strip(b" \t")) for name, value in lines)
    length = b"Content-Length: %d\r\n" % len(body) if body or method not in {"GET", "HEAD"} else b""
    return b"%b %b HTTP/1.0\r\n%b%b\r\n" % (method.encode(), target.encode(), passed, length)


async def _exchange(path: Path, head: bytes, body: bytes) -> Answer:
    reader, writer = await asyncio.open_unix_connection(str(path))
    try:
        writer.write(head + body)
        raw = await reader.readuntil(b"\r\n\r\n")
        found = await reader.read(MOST_BYTES + 1)
        while chunk := await reader.read(MOST_BYTES + 1 - len(found)):
            found += chunk
        if len(found) > MOST_BYTES:
            message = "too long"
            raise ValueError(message)
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
    first, *rest = raw.removesuffix(b"\r\n\r\n").split(b"\r\n")
    lines = []
    for line in rest:
        name, _, value = line.partition(b":")
        if name.lower() not in _FRAMING:
            lines.append((name, value.strip()))
    return Answer(int(first.split(b" ", 2)[1]), tuple(lines), found)
