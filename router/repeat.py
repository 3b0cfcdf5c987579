"""Heads of requests that differ from the one before in the length of the body alone.

A client repeats its head byte by byte on a connection, but for the number in Content-Length. What
was accepted once need not be parsed again: the same bytes mean the same.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from router.request import RequestHead

_LENGTH: Final = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: ([1-9][0-9]{0,17})\r\n")
_DIGITS_MOST: Final = 18


class RepeatedHead:
    """A head as it was received, in two parts around the digits of its length."""

    __slots__ = ("_after", "_after_bytes", "_before", "_before_bytes", "head")

    def __init__(self, head: RequestHead, before: bytes, after: bytes) -> None:
        self.head = head
        self._before = before
        self._after = after
        self._before_bytes = len(before)
        self._after_bytes = len(after)

    @classmethod
    def of(cls, received: bytes, head: RequestHead, body_bytes: int) -> RepeatedHead | None:
        """Return that of a parsed head whose body has ``body_bytes``.

        None where the next one is to be parsed, too: its length is not plainly there, or the
        connection ends with it.
        """
        found = _LENGTH.search(received)
        if found is None or int(found[1]) != body_bytes or not head.keep_alive:
            return None
        return cls(head, received[: found.start(1)], received[found.end(1) :])

    def match(self, data: bytes, at: int, end: int) -> int:
        """Return the body's length in a head from ``at`` to ``end``; 0 for another head."""
        first, last = at + self._before_bytes, end - self._after_bytes
        if not 0 < last - first <= _DIGITS_MOST or not data.startswith(self._before, at):
            return 0
        digits = data[first:last]
        if not digits.isdigit() or data[last:end] != self._after:
            return 0
        return int(digits)
