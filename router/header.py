"""Which headers pass the router, in each direction, and the bytes of both message heads.

Pure functions on raw ``(name, value)`` pairs; order, case and duplicates stay as received.
Hop-by-hop headers and whatever ``Connection`` nominates end here (RFC 9110, 7.6.1), except headers
that a sender must not be able to remove by nominating them. Framing is always computed, never
copied. Nothing is written before all bytes of the head were found free of control characters.
"""

from __future__ import annotations

import re
from http import HTTPStatus
from typing import TYPE_CHECKING, Literal

from router.error import ClientError, ReplicaProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

RawHeaders = tuple[tuple[bytes, bytes], ...]
"""Header names and values as received."""

Framing = Literal["none", "length", "chunked", "close"]
"""How a body ends: there is none, after Content-Length bytes, with the last chunk, at the end."""

OWN_PREFIX = b"x-warmroute-"
"""Headers of the router itself: dropped from both sides, set by the router only."""

_DROPPED_PREFIXES = (OWN_PREFIX, b"proxy-")
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_NAME_BYTES = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_BAD_VALUE_BYTE = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_BAD_LINE_BYTE = re.compile(rb"[\x00-\x20\x7f]")
_DIGITS = re.compile(rb"[0-9]{1,18}")

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
}
_NOT_DOWNSTREAM = _HOP_BY_HOP | {b"content-length", b"server", b"set-cookie", b"x-request-id"}
_NOMINATION_PROOF = frozenset({b"authorization", b"content-type", b"content-encoding", b"date"})
_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})
_PHRASES = {int(status): status.phrase for status in HTTPStatus}


def accepted_request_id(headers: Iterable[tuple[bytes, bytes]], mint: Callable[[], str]) -> str:
    """Return the client's X-Request-Id where it sent one plain one, else a minted one."""
    found = [value for name, value in headers if name.lower() == b"x-request-id"]
    if len(found) == 1 and _REQUEST_ID.fullmatch(found[0]):
        return found[0].decode("ascii")
    return mint()


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
    return (
        all(flat[::2])
        and _NAME_BYTES.fullmatch(b"".join(flat[::2])) is not None
        and _BAD_VALUE_BYTE.search(b"".join(flat[1::2])) is None
    )


def _lines(flat: Sequence[bytes]) -> bytes:
    """Return the header lines and the empty line after them."""
    return (b"%b: %b\r\n" * (len(flat) // 2) + b"\r\n") % tuple(flat)


def request_head(
    method: str,
    target: str,
    headers: Iterable[tuple[bytes, bytes]],
    *,
    host: str,
    body_bytes: int,
    request_id: str | None,
    peer: str | None,
) -> bytes:
    """Return the head of the request to a replica; raises ClientError when it cannot be sent."""
    flat = [b"Host", host.encode("ascii")]
    flat += _passing(headers, _NOT_UPSTREAM)
    if request_id is not None:
        flat += (b"X-Request-Id", request_id.encode("latin-1", "replace"))
    if peer is not None:
        flat += (b"X-Forwarded-For", peer.encode("latin-1", "replace"))
    if body_bytes or method in _WITH_BODY:
        flat += (b"Content-Length", b"%d" % body_bytes)
    line = target.encode("utf-8", "surrogateescape")
    verb = method.encode("latin-1", "replace")
    is_plain = _BAD_LINE_BYTE.search(line) is None and _NAME_BYTES.fullmatch(verb) is not None
    if not is_plain or not line or not _is_clean(flat):
        message = "the request line or a header holds a control character"
        raise ClientError(message)
    return b"%b %b HTTP/1.1\r\n%b" % (verb, line, _lines(flat))


def body_framing(
    method: str, status: int, version: str, headers: Iterable[tuple[bytes, bytes]]
) -> tuple[Framing, int | None]:
    """Return how the body of a response ends and its Content-Length, None where it has none.

    Raises ReplicaProtocolError where two readers could disagree about the end (RFC 9112, 6.3).
    """
    lengths: list[bytes] = []
    codings: list[bytes] = []
    for name, value in headers:
        lower = name.lower()
        if lower == b"content-length":
            lengths.append(value.strip(b" \t"))
        elif lower == b"transfer-encoding":
            codings.append(value.strip(b" \t").lower())
    if codings and (codings != [b"chunked"] or lengths or version != "1.1"):
        message = "the response has a transfer coding that cannot be passed on"
        raise ReplicaProtocolError(message)
    if lengths and (len(lengths) > 1 or not _DIGITS.fullmatch(lengths[0])):
        message = "the response has no single valid Content-Length"
        raise ReplicaProtocolError(message)
    length = int(lengths[0]) if lengths else None
    if status == HTTPStatus.NO_CONTENT:
        if codings or length:
            message = "the response has status 204 and a body"
            raise ReplicaProtocolError(message)
        return "none", None
    if method == "HEAD" or status == HTTPStatus.NOT_MODIFIED:
        return "none", length
    if codings:
        return "chunked", None
    return ("close", None) if length is None else ("length", length)


def response_head(  # noqa: PLR0913 - the parts of one message head
    status: int,
    headers: Iterable[tuple[bytes, bytes]],
    *,
    framing: Framing,
    length: int | None,
    is_http10: bool,
    keep_alive: bool,
    added: Sequence[tuple[bytes, bytes]],
    date: Callable[[], str],
) -> bytes:
    """Return the head of the response to the client; raises ReplicaProtocolError if unsafe.

    ``added`` replace headers of the same name. ``date`` is asked where the replica sent no Date.
    """
    flat = _passing(headers, _NOT_DOWNSTREAM)
    replaced = {name.lower() for name, _ in added}
    names = [name.lower() for name in flat[::2]]
    dates = names.count(b"date")
    if dates > 1 or not replaced.isdisjoint(names):
        flat = _unique(flat, replaced)
    if not dates:
        flat += (b"Date", date().encode("ascii"))
    for pair in added:
        flat += pair
    if framing == "chunked":
        flat += (b"Transfer-Encoding", b"chunked")
    elif length is not None:
        flat += (b"Content-Length", b"%d" % length)
    if not keep_alive:
        flat += (b"Connection", b"close")
    elif is_http10:
        flat += (b"Connection", b"keep-alive")
    if not _is_clean(flat):
        message = "the response has a control character in a header"
        raise ReplicaProtocolError(message)
    version = b"HTTP/1.0" if is_http10 else b"HTTP/1.1"
    phrase = _PHRASES.get(status, "").encode("ascii")
    return b"%b %d %b\r\n%b" % (version, status, phrase, _lines(flat))


def _unique(flat: list[bytes], replaced: set[bytes]) -> list[bytes]:
    """Return the headers without those that are replaced and with the first Date only."""
    gone = set(replaced)
    kept: list[bytes] = []
    for name, value in zip(flat[::2], flat[1::2], strict=True):
        lower = name.lower()
        if lower not in gone:
            kept += (name, value)
        if lower == b"date":
            gone.add(lower)
    return kept


def header_value(headers: Iterable[tuple[bytes, bytes]], wanted: bytes) -> bytes | None:
    """Return the value of the first header called ``wanted`` (lower case)."""
    for name, value in headers:
        if name.lower() == wanted:
            return value
    return None
