"""The salt in a request's body: the one that the router derived, in place of what a client sent.

An engine shares cached pages between requests of one salt, so a client that chose its salt would
choose whom it shares with. A body without one, as nearly all are, gets it behind its opening brace.
Where a client sent one, its value is replaced where it stands. Every other byte stays.

A key is found in every spelling that JSON allows, and only at the top level: there may be others of
that name in the schema of a tool. Which of two on the top level counts is not the same for all
parsers, so two of them are refused.
"""

from __future__ import annotations

import re
import secrets
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
from msgspec import UNSET, Raw, Struct

from router.error import ClientError

if TYPE_CHECKING:
    from collections.abc import Sequence

SALT_KEY: Final = "cache_salt"
TRANSFER_KEY: Final = "kv_transfer_params"
"""Lets an engine take pages of any other one by their numbers, whoever's they are."""
MAX_KEYS: Final = 16
"""Keys of one name, nested ones included; more are refused."""
_ESCAPES: Final = (b"\\u005", b"\\u006", b"\\u007")
"""How every escaped lower-case letter and the low line begin."""
_OPENING: Final = re.compile(rb"[ \t\r\n]*\{[ \t\r\n]*")
_SPACE: Final = b" \t\r\n"
_END: Final = b"}"


class Span(NamedTuple):
    """Where a key and its value stand in a body: ``body[start:end]``, the value being ``raw``."""

    start: int
    end: int
    raw: bytes


class TopKey:
    """One key of the top level of JSON objects; ``name`` has lower-case letters and low lines.

    Every key of that name in a body gets a name of its own, which no client knows; then a decoder,
    which skips what is nested, says which of them are on the top level.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.plain = name.encode()
        self._pattern = re.compile(rb'"%b"[ \t\r\n]*:' % b"".join(map(_spellings, name)))
        nonce = secrets.token_hex(8)
        self._names = [f"{name}#{nonce}#{index}" for index in range(MAX_KEYS)]
        self._fields = [f"at_{index}" for index in range(MAX_KEYS)]
        self._decoder_of_one = self._decoder(1)
        self._decoder_of_all = self._decoder(MAX_KEYS)

    def _decoder(self, count: int) -> msgspec.json.Decoder[Struct]:
        """Return what decodes the first ``count`` names; each is compared with every key."""
        fields = self._fields[:count]
        keys = msgspec.defstruct(
            "Keys",
            [(field, Raw | msgspec.UnsetType, UNSET) for field in fields],
            rename=dict(zip(fields, self._names[:count], strict=True)),
        )
        return msgspec.json.Decoder(keys)

    def find(self, body: bytes) -> Span | None:
        """Return where the key is; raises ClientError where it is there twice, or is no JSON."""
        spans = [match.span() for match in self._pattern.finditer(body)]
        if len(spans) > MAX_KEYS:
            message = f"{self.name}: expected at most {MAX_KEYS} keys of that name in the body"
            raise ClientError(message, param=self.name)
        found = self._on_top(body, spans)
        if len(found) > 1:
            message = f"{self.name}: expected one value, the field is there twice"
            raise ClientError(message, param=self.name)
        if not found:
            return None
        index, raw = found[0]
        start, end = spans[index]
        if len(spans) > 1:  # others may be in its value
            ((_, raw),) = self._on_top(body, [spans[index]])
        while body[end] in _SPACE:
            end += 1
        return Span(start, end + len(raw), raw)

    def _on_top(self, body: bytes, spans: Sequence[tuple[int, int]]) -> list[tuple[int, bytes]]:
        """Return which of the keys at ``spans`` are on the top level, with their values."""
        pieces, position = [], 0
        for (start, end), name in zip(spans, self._names, strict=False):
            pieces.append(b'%b"%b":' % (body[position:start], name.encode()))
            position = end
        pieces.append(body[position:])
        decoder = self._decoder_of_all if len(spans) > 1 else self._decoder_of_one
        try:
            keys = decoder.decode(b"".join(pieces))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            message = "body: expected a JSON object"
            raise ClientError(message, param="body") from None
        values = [getattr(keys, field) for field in self._fields[: len(spans)]]
        return [(index, bytes(raw)) for index, raw in enumerate(values) if raw is not UNSET]


def _spellings(letter: str) -> bytes:
    digits = "".join(f"[{d}{d.upper()}]" if d.isalpha() else d for d in f"{ord(letter):04x}")
    return rf"(?:{letter}|\\u{digits})".encode()


_SALT: Final = TopKey(SALT_KEY)
_TRANSFER: Final = TopKey(TRANSFER_KEY)


def salt_field(salt: str) -> bytes:
    """Return the key and its value, as they stand in a body."""
    return b'"%b":%b' % (SALT_KEY.encode(), msgspec.json.encode(salt))


def salted(body: bytes, field: bytes) -> bytes:
    """Return ``body`` with ``field`` (see ``salt_field``) for its only salt.

    Raises ClientError for what is no JSON object, has two salts, or tells an engine which pages to
    take.
    """
    has_escapes = b"\\" in body and b"\\u00" in body and any(one in body for one in _ESCAPES)
    if has_escapes or _TRANSFER.plain in body:
        found = _TRANSFER.find(body)
        if found is not None and found.raw != b"null":
            message = f"{TRANSFER_KEY}: expected none from a client"
            raise ClientError(message, param=TRANSFER_KEY)
    if has_escapes or _SALT.plain in body:
        found = _SALT.find(body)
        if found is not None:
            return body[: found.start] + field + body[found.end :]
    opening = _OPENING.match(body)
    if opening is None:
        message = "body: expected a JSON object"
        raise ClientError(message, param="body")
    end = opening.end()
    comma = b"" if body[end : end + 1] == _END else b","
    return b"%b%b%b%b" % (body[:end], field, comma, body[end:])
