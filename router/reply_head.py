"""The head of a replica's response, as far as it is repeated from one response to the next."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from router.header import Framing, RawHeaders, header_value, response_lines


class ReplyHeaders(Struct, frozen=True, kw_only=True):
    """What a replica's headers say, Content-Length and Date apart: it repeats the others.

    ``lines`` are what goes on to the client; ``transfer_codings`` are in lower case; ``content`` is
    what can be read on the way, None for compressed and all other bodies.
    """

    received: RawHeaders
    lines: bytes
    transfer_codings: tuple[bytes, ...]
    content: Literal["events", "json"] | None
    retry_after: bytes


def read_headers(received: RawHeaders) -> ReplyHeaders:
    """Return what the headers say; raises ReplicaProtocolError for unsafe ones."""

    def value(name: bytes, default: bytes) -> bytes:
        return (header_value(received, name) or default).strip().lower()

    content: Literal["events", "json"] | None = None
    if value(b"content-encoding", b"identity") == b"identity":
        kind = value(b"content-type", b"")
        if kind.startswith(b"text/event-stream"):
            content = "events"
        elif kind.startswith(b"application/json"):
            content = "json"
    return ReplyHeaders(
        received=received,
        lines=response_lines(received),
        transfer_codings=tuple(
            value.strip(b" \t").lower()
            for name, value in received
            if name.lower() == b"transfer-encoding"
        ),
        content=content,
        retry_after=value(b"retry-after", b""),
    )


class ReplyHead(Struct, frozen=True):
    """The head of a final response; ``content_length`` is None where there is none."""

    status: int
    headers: ReplyHeaders
    dates: list[bytes]
    framing: Framing
    content_length: int | None
