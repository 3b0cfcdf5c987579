"""JSON in which no key occurs twice: which of two counts is not the same for all readers."""

from __future__ import annotations

import json
from typing import Any, Final

_SHOWN: Final = 100
"""Characters of a key that are repeated in an answer."""


class _Object(list[tuple[str, Any]]):
    """The keys and values of one object, as they stand there."""


def key_twice(raw: bytes) -> str | None:
    """Return the dotted path of a key that occurs twice in one object; None where none does.

    ``raw`` is JSON. Raises ValueError for what is none, RecursionError for what is nested too deep.
    """
    text = raw.decode()
    return _twice(json.loads(text, object_pairs_hook=_Object, parse_int=str, parse_float=str), "")


def _twice(value: object, path: str) -> str | None:
    if isinstance(value, _Object):
        seen: set[str] = set()
        for key, inner in value:
            where = f"{path}.{key[:_SHOWN]}" if path else key[:_SHOWN]
            if key in seen:
                return where
            seen.add(key)
            found = _twice(inner, where)
            if found is not None:
                return found
    elif isinstance(value, list):
        for at, inner in enumerate(value):
            found = _twice(inner, f"{path}[{at}]")
            if found is not None:
                return found
    return None
