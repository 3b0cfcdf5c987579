"""The Date header's value."""

from __future__ import annotations

import time
from email.utils import formatdate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class HttpDate:
    """The time as HTTP writes it (RFC 9110, 5.6.7), made once a second."""

    __slots__ = ("_at_s", "_text", "_wall_clock_s")

    def __init__(self, wall_clock_s: Callable[[], float] = time.time) -> None:
        self._wall_clock_s = wall_clock_s
        self._at_s = -1
        self._text = b""

    def __call__(self) -> bytes:
        """Return it for now."""
        now_s = int(self._wall_clock_s())
        if now_s != self._at_s:
            self._at_s, self._text = now_s, formatdate(now_s, usegmt=True).encode("ascii")
        return self._text
