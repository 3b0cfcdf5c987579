"""One key on the top level of a body, wherever it stands and however it is spelled.

A key is found in every spelling that JSON allows, and only at the top level: there may be others of
that name in the schema of a tool. Which of two on the top level counts is not the same for all
parsers, so two of them are refused.
"""

from __future__ import annotations

import re
import secrets
from itertools import islice
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
from msgspec import UNSET, Raw, Struct

from router.error import ClientError

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_KEYS: Final = 16
"""Keys of one name, nested ones included; more are refused."""
_SPACE: Final = b" \t\r\n"


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
        self._pattern = re.compile(rb'"%b"[ \t\r\n]*:' % b"".join(map(spellings, name)))
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
        found_first = islice(self._pattern.finditer(body), MAX_KEYS + 1)
        spans = [match.span() for match in found_first]
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


def spellings(letter: str) -> bytes:
    """Return a pattern of what JSON allows for a lower-case letter or a low line."""
    digits = "".join(f"[{d}{d.upper()}]" if d.isalpha() else d for d in f"{ord(letter):04x}")
    return rf"(?:{letter}|\\u{digits})".encode()
