"""The salt in a request's body: the one that the router derived, in place of what a client sent.

An engine shares cached pages between requests of one salt, so a client that chose its salt would
choose whom it shares with. A body without one, as nearly all are, gets it behind its opening brace.
Where a client sent one, its value is replaced where it stands. Every other byte stays.

What no salt keeps apart is refused (``router.borrowed``).
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from router.borrowed import refuse_borrowed
from router.error import ClientError
from router.top_key import TopKey, may_escape

SALT_KEY: Final = "cache_salt"
_OPENING: Final = re.compile(rb"[ \t\r\n]*\{[ \t\r\n]*")
_END: Final = b"}"
_SALT: Final = TopKey(SALT_KEY)


def salt_field(salt: str) -> bytes:
    """Return the key and its value, as they stand in a body."""
    return b'"%b":%b' % (SALT_KEY.encode(), msgspec.json.encode(salt))


def salted(body: bytes, field: bytes) -> bytes:
    """Return ``body`` with ``field`` (see ``salt_field``) for its only salt.

    Raises ClientError for what is no JSON object, has two salts, or borrows what others made.
    """
    has_escapes = may_escape(body)
    refuse_borrowed(body, has_escapes=has_escapes)
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
