"""A row of the corpus: bytes of a client, and what the parser of requests makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

HOST = b"Host: a\r\n"
POST = b"POST /x HTTP/1.1\r\nHost: a\r\n"
GET = b"GET /x HTTP/1.1\r\nHost: a\r\n"
TE = b"Transfer-Encoding: chunked\r\n"
NEXT = GET + b"\r\n"
"""Follows in most rows: it is answered only where the connection goes on."""
BODY_LIMIT_BYTES = 1000
UPGRADE = b"Connection: upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
UPGRADED = ("POST", "/x", b"abc")
NEXT_OUTCOME = ("GET", "/x", b"")


@dataclass(frozen=True, slots=True)
class Row:
    """``name`` begins with the row of RELIABILITY.md, section 2; N-.. is what any client may send.

    ``outcomes``: of each request, a refusal's status or (method, target, body).
    """

    name: str
    data: bytes
    outcomes: list[Any]


def refused(name: str, data: bytes, status: int = 400) -> Row:
    """Return a row whose request is refused and is the last one of its connection."""
    return Row(name, data + NEXT, [status])


def taken(name: str, data: bytes, body: bytes = b"", method: str = "POST") -> Row:
    """Return a row whose request is taken, and the next one too."""
    return Row(name, data + NEXT, [(method, "/x", body), NEXT_OUTCOME])


def length(value: bytes) -> bytes:
    """Return a request with this Content-Length and three bytes."""
    return POST + b"Content-Length: " + value + b"\r\n\r\nabc"


def coded(value: bytes, version: bytes = b"1.1") -> bytes:
    """Return a request with this Transfer-Encoding and one chunk."""
    head = b"POST /x HTTP/" + version + b"\r\nHost: a\r\nTransfer-Encoding: "
    return head + value + b"\r\n\r\n3\r\nabc\r\n0\r\n\r\n"


def header(line: bytes) -> bytes:
    """Return a request with this line among its headers."""
    return GET + line + b"\r\n"


def chunks(data: bytes) -> bytes:
    """Return a request with this chunked body."""
    return POST + TE + b"\r\n" + data


def line(data: bytes) -> bytes:
    """Return a request with this first line."""
    return data + b"\r\n" + HOST + b"\r\n"
