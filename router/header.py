"""Which headers pass the router, in each direction, and the bytes of both message heads.

Pure functions on raw ``(name, value)`` pairs; order, case and duplicates stay as received.
Hop-by-hop headers and whatever ``Connection`` nominates end here (RFC 9110, 7.6.1), except headers
that a sender must not be able to remove by nominating them. Framing is always computed, never
copied. Nothing is written before all bytes of the head were found free of control characters.
What passes is worked out apart from the rest of a head, as peers repeat their headers.
"""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import TYPE_CHECKING, Literal

from router.error import ClientError, ReplicaProtocolError
from state.public import PUBLIC_PREFIX_HEADER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from state.public import PublicMark

RawHeaders = tuple[tuple[bytes, bytes], ...]
"""Header names and values as received."""

Framing = Literal["none", "length", "chunked", "close"]
"""How a body ends: there is none, after Content-Length bytes, with the last chunk, at the end."""

OWN_PREFIX = b"x-warmroute-"
"""Headers of the router itself: dropped from both sides, set by the router only."""

KV_SOURCE_NAME = b"X-Warmroute-Kv-Source"
"""Tells an engine which other one may have KV pages of the prompt."""

RANK_NAME = b"X-data-parallel-rank"
"""Tells an engine which of its data-parallel ranks shall compute; a client's own is dropped."""

_DROPPED_PREFIXES = (OWN_PREFIX, b"proxy-")
_REQUEST_ID_NAME = "X-Request-Id"
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_CHAIN = re.compile(rb"[A-Za-z0-9._:\[\], -]{1,1024}")
_NAME_BYTES = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_BAD_VALUE_BYTE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_BAD_LINE_BYTE = re.compile(rb"[\x00-\x20\x7f]")
_LINES = re.compile(rb"(?:[!#$%&'*+.^_`|~0-9A-Za-z-]+: [\t\x20-\x7e\x80-\xff]*\r\n)*")
_DIGITS_MOST = 18

_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"http2-settings",
        b"keep-alive",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
_NOT_UPSTREAM = _HOP_BY_HOP | {
    b"accept-encoding",  # the replica's bytes are read on the way: plain ones, please
    b"content-length",
    b"expect",
    b"forwarded",
    b"host",
    b"x-forwarded-for",
    b"x-forwarded-host",
    b"x-forwarded-port",
    b"x-forwarded-proto",
    b"x-real-ip",
    b"x-request-id",
    RANK_NAME.lower(),
}
_NOT_DOWNSTREAM = _HOP_BY_HOP | {
    b"content-length",
    b"date",
    b"server",
    b"set-cookie",
    b"x-request-id",
}
NAMES_CLIENT = frozenset(
    {
        b"api-key",
        b"authorization",
        b"cookie",
        b"openai-organization",
        b"openai-project",
        b"x-api-key",
        b"x-cache-salt",
        b"x-org-id",
        b"x-session-id",
        b"x-tenant",
        b"x-tenant-id",
        b"x-user",
        b"x-user-id",
    }
)
"""What may say who a client is, or claims to be: not for engines where the router knows that."""
_NOMINATION_PROOF = frozenset({b"authorization", b"content-type", b"content-encoding", b"date"})
_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
_NO_CONTENT = 204
_NOT_MODIFIED = 304
_METHODS = _WITH_BODY | {"GET", "HEAD"}
_STATUS_LINES = {
    (is_http10, int(status)): b"HTTP/1.%d %d %b\r\n"
    % (not is_http10, status, status.phrase.encode("ascii"))
    for status in HTTPStatus
    for is_http10 in (False, True)
}


def accepted_request_id(values: Sequence[bytes]) -> str | None:
    """Return the client's X-Request-Id where it sent one plain one."""
    if len(values) == 1 and _REQUEST_ID.fullmatch(values[0]):
        return values[0].decode("ascii")
    return None


def forwarded_chain(values: Sequence[bytes]) -> str:
    """Return the addresses in all lines of X-Forwarded-For; none where they are no plain list."""
    chain = b", ".join(values)
    return chain.decode("ascii") if _CHAIN.fullmatch(chain) else ""


def _passing(headers: Iterable[tuple[bytes, bytes]], dropped: frozenset[bytes]) -> list[bytes]:
    """Return name, value, name, value... of the headers that go on."""
    kept: list[bytes] = []
    names: list[bytes] = []
    nominated: set[bytes] = set()
    for name, value in headers:
        lower = name.lower()
        if lower in dropped or lower.startswith(_DROPPED_PREFIXES):
            if lower == b"connection":
                nominated.update(token.strip() for token in value.lower().split(b","))
            continue
        names.append(lower)
        kept += (name, value)
    nominated -= _NOMINATION_PROOF
    if nominated.isdisjoint(names):
        return kept
    pairs = zip(names, kept[::2], kept[1::2], strict=True)
    return [part for lower, *pair in pairs if lower not in nominated for part in pair]


def _is_clean(flat: Sequence[bytes]) -> bool:
    """Return whether names are tokens and values hold no control character besides a tab."""
    return not flat or (
        all(flat[::2])
        and _NAME_BYTES.fullmatch(b"".join(flat[::2])) is not None
        and _BAD_VALUE_BYTE.search(b"".join(flat[1::2])) is None
    )


def header_lines(flat: Sequence[bytes]) -> bytes:
    """Return name, value, name, value... as header lines."""
    return (b"%b: %b\r\n" * (len(flat) // 2)) % tuple(flat)


def request_lines(
    headers: Iterable[tuple[bytes, bytes]], besides: frozenset[bytes] = frozenset()
) -> bytes:
    """Return the lines of a client's headers that go on, without those called as in ``besides``.

    Raises ClientError for unsafe ones.
    """
    flat = _passing(headers, _NOT_UPSTREAM | besides if besides else _NOT_UPSTREAM)
    if not _is_clean(flat):
        message = "a header has a name that is no token, or holds a control character"
        raise ClientError(message)
    return header_lines(flat)


def response_lines(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the lines of a replica's headers that go on, without Date.

    Raises ReplicaProtocolError for unsafe ones.
    """
    flat = _passing(headers, _NOT_DOWNSTREAM)
    if not _is_clean(flat):
        message = "the response has a control character in a header"
        raise ReplicaProtocolError(message)
    return header_lines(flat)


def presented_key(authorizations: Sequence[bytes], api_keys: Sequence[bytes]) -> bytes | None:
    """Return the API key in ``Authorization: Bearer`` or ``X-Api-Key``; None for none, or two."""
    keys = set(api_keys)
    for value in authorizations:
        scheme, _, key = value.partition(b" ")
        if scheme.lower() != b"bearer":
            return None
        keys.add(key.strip())
    keys.discard(b"")
    return keys.pop() if len(keys) == 1 else None


def key_line(api_key: str | None) -> bytes:
    """Return the line that shows an engine its key; empty for None."""
    return b"" if api_key is None else b"Authorization: Bearer %b\r\n" % api_key.encode("ascii")


def kv_source_line(authority: str) -> bytes:
    """Return the line that names the engine at ``authority``, a checked ``host:port``."""
    return b"%b: http://%b\r\n" % (KV_SOURCE_NAME, authority.encode("ascii"))


def public_line(mark: PublicMark) -> bytes:
    """Return the line that tells an engine what of a prompt is public."""
    return f"{PUBLIC_PREFIX_HEADER}: {mark.value}\r\n".encode("ascii")


def rank_line(rank: int) -> bytes:
    """Return the line that names one of an engine's data-parallel ranks."""
    return b"%b: %d\r\n" % (RANK_NAME, rank)


def request_head(
    method: str,
    target: str,
    lines: bytes,
    *,
    host: str,
    body_bytes: int,
    request_id: str | None,
    peer: str | None,
) -> bytes:
    """Return the head of the request to a replica; raises ClientError when it cannot be sent.

    ``lines`` are those of ``request_lines``; the router's own go around them.
    """
    own = "" if request_id is None else f"X-Request-Id: {request_id}\r\n"
    if peer is not None:
        own = f"{own}X-Forwarded-For: {peer}\r\n"
    if body_bytes or method in _WITH_BODY:
        own = f"{own}Content-Length: {body_bytes}\r\n"
    line = target.encode("utf-8", "surrogateescape")
    verb = method.encode("latin-1", "replace")
    is_token = method in _METHODS or _NAME_BYTES.fullmatch(verb) is not None
    if not is_token or not line or _BAD_LINE_BYTE.search(line) is not None:
        message = "the request line holds a control character"
        raise ClientError(message)
    return b"%b %b HTTP/1.1\r\nHost: %b\r\n%b%b\r\n" % (
        verb,
        line,
        host.encode("ascii"),
        lines,
        own.encode("latin-1", "replace"),
    )


def body_framing(
    method: str, status: int, version: str, lengths: Sequence[bytes], codings: Sequence[bytes]
) -> tuple[Framing, int | None]:
    """Return how the body of a response ends and its Content-Length, None where it has none.

    ``lengths`` and ``codings`` are the values of Content-Length and, in lower case, of
    Transfer-Encoding. Raises ReplicaProtocolError where two readers could disagree about the end
    (RFC 9112, 6.3).
    """
    if codings and (tuple(codings) != (b"chunked",) or lengths or version != "1.1"):
        message = "the response has a transfer coding that cannot be passed on"
        raise ReplicaProtocolError(message)
    length = None
    if lengths:
        length = content_length(lengths)
        if length is None:
            message = "the response has no single valid Content-Length"
            raise ReplicaProtocolError(message)
    if status == _NO_CONTENT:
        if codings or length:
            message = "the response has status 204 and a body"
            raise ReplicaProtocolError(message)
        return "none", None
    if method == "HEAD" or status == _NOT_MODIFIED:
        return "none", length
    if codings:
        return "chunked", None
    return ("close", None) if length is None else ("length", length)


def content_length(lengths: Sequence[bytes]) -> int | None:
    """Return the number in the values of Content-Length; None where it is not one plain number."""
    value = lengths[0].strip(b" \t")
    is_plain = len(lengths) == 1 and value.isdigit() and len(value) <= _DIGITS_MOST
    return int(value) if is_plain else None


def date_line(dates: Sequence[bytes], now: Callable[[], bytes]) -> bytes:
    """Return the line of the first of a replica's dates, of now where it sent none.

    Raises ReplicaProtocolError for an unsafe one.
    """
    value = dates[0] if dates else now()
    if _BAD_VALUE_BYTE.search(value) is not None:
        message = "the response has a control character in its date"
        raise ReplicaProtocolError(message)
    return b"Date: %b\r\n" % value


def added_lines(added: Sequence[tuple[str, str]]) -> bytes:
    """Return the lines of what the router itself says in a response.

    A replica's headers of these names never pass. Raises ReplicaProtocolError for unsafe ones.
    """
    if len(added) == 1 and added[0][0] == _REQUEST_ID_NAME:
        value = added[0][1]
        if value.isalnum() and value.isascii():  # as the router's own ids are
            return b"%b: %b\r\n" % (_REQUEST_ID_NAME.encode(), value.encode())
    text = "".join([f"{name}: {value}\r\n" for name, value in added])
    lines = text.encode("latin-1", "replace")
    if _LINES.fullmatch(lines) is None or lines.count(b"\n") != len(added):
        message = "a header of the router holds a control character"
        raise ReplicaProtocolError(message)
    return lines


def response_head(
    status: int,
    lines: bytes,
    *,
    framing: Framing,
    length: int | None,
    is_http10: bool,
    keep_alive: bool,
) -> bytes:
    """Return the head of a response to the client, all but ``lines`` being computed."""
    line = _STATUS_LINES.get((is_http10, status))
    if line is None:
        line = b"HTTP/1.%d %d \r\n" % (not is_http10, status)
    if framing == "chunked":
        lines += b"Transfer-Encoding: chunked\r\n"
    elif length is not None:
        lines += b"Content-Length: %d\r\n" % length
    if not keep_alive:
        lines += b"Connection: close\r\n"
    elif is_http10:
        lines += b"Connection: keep-alive\r\n"
    return b"%b%b\r\n" % (line, lines)


def header_value(headers: Iterable[tuple[bytes, bytes]], wanted: bytes) -> bytes | None:
    """Return the value of the first header called ``wanted`` (lower case)."""
    for name, value in headers:
        if name.lower() == wanted:
            return value
    return None
