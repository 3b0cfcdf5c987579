"""One key on the top level of a body, wherever it stands and however it is spelled.

A key is found in every spelling that JSON allows, and only at the top level: there may be others of
that name in the schema of a tool. Which of two on the top level counts is not the same for all
parsers, so two of them are refused.
"""

from __future__ import annotations

import re
import secrets
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
from msgspec import UNSET, Raw

from router.error import ClientError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAX_KEYS: Final = 4096
"""Keys of one name, nested ones included; more are refused. Conversations have many: a tool that
takes a ``session_id`` was called with it each time."""
_SPACE: Final = b" \t\r\n"
_ESCAPES: Final = (b"\\u005", b"\\u006", b"\\u007")
"""How every escaped lower-case letter and the low line begin."""


class Span(NamedTuple):
    """Where a key and its value stand in a body: ``body[start:end]``, the value being ``raw``."""

    start: int
    end: int
    raw: bytes


class TopKey:
    """One key of the top level of JSON objects; ``name`` has lower-case letters and low lines.

    Before each key of that name in a body comes its number, under a name that no client knows; then
    a decoder, which skips what is nested, says which of them is on the top level.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.plain = name.encode()
        self._pattern = re.compile(rb'"%b"[ \t\r\n]*:' % b"".join(map(spellings, name)))
        nonce = f"{name}#{secrets.token_hex(8)}"
        self._renamed = b'"%b":' % nonce.encode()
        self._last = _decoder({"number": nonce}, int)
        self._values = _decoder({"found": nonce, "second": name}, Raw)

    def find(self, body: bytes) -> Span | None:
        """Return where the key is; raises ClientError where it is there twice, or is no JSON."""
        found_first = islice(self._pattern.finditer(body), MAX_KEYS + 1)
        spans = [match.span() for match in found_first]
        if len(spans) > MAX_KEYS:
            message = f"{self.name}: expected at most {MAX_KEYS} keys of that name in the body"
            raise ClientError(message, param=self.name)
        index = 0 if len(spans) < 2 else self._last_on_top(body, spans)  # noqa: PLR2004
        if index is None:
            return None
        start, end = spans[index] if spans else (0, 0)
        renamed = b"%b%b%b" % (body[:start], self._renamed, body[end:]) if spans else body
        values = _decoded(self._values, renamed)
        if values.found is UNSET:
            return None
        if values.second is not UNSET:
            message = f"{self.name}: expected one value, the field is there twice"
            raise ClientError(message, param=self.name)
        raw = bytes(values.found)
        while body[end] in _SPACE:
            end += 1
        return Span(start, end + len(raw), raw)

    def _last_on_top(self, body: bytes, spans: Sequence[tuple[int, int]]) -> int | None:
        """Return which of the keys at ``spans`` is the last one on the top level."""
        pieces, position = [], 0
        for index, (start, _) in enumerate(spans):
            pieces += [body[position:start], b"%b%d," % (self._renamed, index)]
            position = start
        pieces.append(body[position:])
        number = _decoded(self._last, b"".join(pieces)).number
        return None if number is UNSET else number


def _decoder(names: Mapping[str, str], kind: Any) -> msgspec.json.Decoder[Any]:
    """Return what decodes the keys that ``names`` has for fields; each is compared with all."""
    fields = [(field, kind | msgspec.UnsetType, UNSET) for field in names]
    return msgspec.json.Decoder(msgspec.defstruct("Keys", fields, rename=dict(names)))


def _decoded(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        message = "body: expected a JSON object"
        raise ClientError(message, param="body") from None


def may_escape(body: bytes) -> bool:
    """Return whether letters of keys may be escaped in ``body``."""
    return b"\\" in body and b"\\u00" in body and any(one in body for one in _ESCAPES)


def spellings(letter: str) -> bytes:
    """Return a pattern of what JSON allows for a lower-case letter or a low line."""
    digits = "".join(f"[{d}{d.upper()}]" if d.isalpha() else d for d in f"{ord(letter):04x}")
    return rf"(?:{letter}|\\u{digits})".encode()
