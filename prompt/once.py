"""Top-level keys of a JSON body that may be there once: parsers differ in which of two counts.

A key is known in every spelling that JSON allows. Nested keys of the same name are common (schemas
of tools), so whether one is on the top level is a question to the decoder, not to a pattern.
"""

from __future__ import annotations

import re
import secrets
from itertools import islice
from typing import TYPE_CHECKING, Final, cast

import msgspec
from msgspec import UNSET, Raw, Struct

from prompt.model import BadPromptError
from prompt.pace import rest

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_KEYS: Final = 4096
"""Keys of one name in a body, nested ones included; more are refused."""
LONG_VALUE_BYTES: Final = 512
"""A shorter value is searched like the rest of the body."""
_ESCAPE: Final = b"\\u00"
_BEFORE_VALUE: Final = frozenset(b": \t\r\n")


class _Keys(Struct):
    """``first``: one of the kept keys is on the top level; ``other``: one of the renamed is."""

    first: Raw | msgspec.UnsetType = UNSET
    other: Raw | msgspec.UnsetType = UNSET


class OneKey:
    """One key of the top level; ``name`` has lower-case letters and low lines."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.quoted = b'"%b"' % name.encode()
        self._pattern = re.compile(rb'"%b"[ \t\r\n]*:' % b"".join(map(_spellings, name)))
        nonce = secrets.token_hex(8)
        self._first, self._other = (b'"%b":' % f"{nonce}{end}".encode() for end in "ab")
        keys = msgspec.defstruct(
            "Keys",
            [(field, Raw | msgspec.UnsetType, UNSET) for field in _Keys.__struct_fields__],
            rename={"first": f"{nonce}a", "other": f"{nonce}b"},
        )
        self._decoder = msgspec.json.Decoder(keys)

    def refuse_second(self, body: bytes) -> None:
        """Raise BadPromptError when the key is there twice on the top level of ``body``.

        After renaming the first k keys of that name to one name and the others to another one, the
        top level has the first name when its first key is among the k, and the other name when
        another one is not. Bisection finds that k; it is 1 for nearly every client.
        """
        found = islice(self._pattern.finditer(body), MAX_KEYS + 1)
        spans = [match.span() for match in found]
        if len(spans) > MAX_KEYS:
            raise BadPromptError(self.name, f"at most {MAX_KEYS} keys of that name in the body")
        low, high, probe = 1, len(spans), 1
        while low < high:
            rest()
            if self._renamed(body, spans, probe).first is UNSET:
                low = probe + 1
            else:
                high = probe
            probe = (low + high) // 2
        if len(spans) > 1 and self._renamed(body, spans, low).other is not UNSET:
            raise BadPromptError(self.name, "one value, the field is there twice")

    def _renamed(self, body: bytes, spans: Sequence[tuple[int, int]], kept: int) -> _Keys:
        pieces, position = [], 0
        for index, (start, end) in enumerate(spans):
            pieces += [body[position:start], self._first if index < kept else self._other]
            position = end
        pieces.append(body[position:])
        return cast(_Keys, self._decoder.decode(b"".join(pieces)))


def refuse_second(body: bytes, keys: Sequence[OneKey]) -> None:
    """Raise BadPromptError where one of ``keys`` is twice on the top level of a valid body."""
    has_escapes = _ESCAPE in body
    for key in keys:
        if has_escapes or body.count(key.quoted) > 1:
            rest()
            key.refuse_second(body)


def without_value(body: bytes, key: OneKey, raw: Raw) -> bytes:
    """Return ``body`` with null for the long value ``raw`` of ``key``, where that is easily found.

    What is inside of the value is none of the top level's keys.
    """
    value_bytes = len(memoryview(raw))
    at = body.find(key.quoted) if value_bytes >= LONG_VALUE_BYTES else -1
    if at < 0:
        return body
    at += len(key.quoted)
    while body[at] in _BEFORE_VALUE:
        at += 1
    if not body.startswith(memoryview(raw), at):
        return body
    return b"%bnull%b" % (body[:at], body[at + value_bytes :])


def _spellings(letter: str) -> bytes:
    """Return a pattern of what JSON allows for a lower-case letter or a low line."""
    digits = "".join(f"[{d}{d.upper()}]" if d.isalpha() else d for d in f"{ord(letter):04x}")
    return rf"(?:{letter}|\\u{digits})".encode()
