"""Ids of requests: 128 random bits each, drawn from the system for many at once."""

from __future__ import annotations

import os
from typing import Final

_ID_CHARS: Final = 32
_AT_ONCE: Final = 128


class Mint:
    """Gives a new id with each call. A process that forks must make its own."""

    __slots__ = ("_at", "_drawn")

    def __init__(self) -> None:
        self._drawn = ""
        self._at = 0

    def __call__(self) -> str:
        """Return 32 hex digits."""
        at = self._at
        if at == len(self._drawn):
            self._drawn, at = os.urandom(_AT_ONCE * _ID_CHARS // 2).hex(), 0
        self._at = at + _ID_CHARS
        return self._drawn[at : at + _ID_CHARS]
