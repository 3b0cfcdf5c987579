"""A case of the corpus: bytes of one side, and what the whole router makes of them for the other.

A case's id is the row of RELIABILITY.md, section 2, that its name begins with, and a letter.
"""

from __future__ import annotations

import re
import string
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable

    from support.corpus.row import Row

Step = bytes | Literal["close", "reset", "wait", "read", "silence"]
"""What the replica does: it says bytes, closes, resets, waits a moment, waits until the client has
all that was said, or says nothing more until the router leaves."""
AfterRequest = Literal["goes on", "ends", "waits"]
"""The client's connection after the last answer; ``waits``: no answer is due."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCase:
    """What a client sends. ``then`` follows after the first answer.

    ``statuses`` are those of the answers, in order. ``seen`` are target and body of each request
    that the replica got; the first has a header line like each of ``carries`` (expressions; the
    name in lower case) and none of the names in ``lacks``.
    """

    name: str
    data: bytes
    then: bytes = b""
    statuses: tuple[int, ...] = (200,)
    after: AfterRequest = "goes on"
    seen: tuple[tuple[str, bytes], ...] = ()
    carries: tuple[bytes, ...] = ()
    lacks: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseCase:
    """What a replica does. ``status`` and ``body`` are what the client gets.

    ``body`` None is an error of the router's own. ``is_whole``: the client sees the end of the
    body; else its connection ends there. ``is_told``: an error event follows ``body``. ``keeps``:
    the router keeps the replica's connection.
    """

    name: str
    steps: tuple[Step, ...]
    status: int = 200
    body: bytes | None = b""
    is_whole: bool = True
    is_told: bool = False
    keeps: bool = True
    carries: tuple[bytes, ...] = ()
    lacks: tuple[bytes, ...] = ()


Case = TypeVar("Case", RequestCase, ResponseCase)


def of_row(row: Row) -> RequestCase:
    """Return what a router makes of a row that passes ``POST /x`` on, and has no ``GET /x``."""
    statuses: list[int] = []
    seen: list[tuple[str, bytes]] = []
    for outcome in row.outcomes:
        if isinstance(outcome, int):
            statuses.append(outcome)
        elif outcome[0] == "POST":
            statuses.append(200)
            seen.append(outcome[1:])
        else:
            statuses.append(405)
    after: AfterRequest = "ends"
    if not row.outcomes:
        after = "waits"
    elif len(row.outcomes) > 1 and not isinstance(row.outcomes[-1], int):
        after = "goes on"
    return RequestCase(
        name=row.name, data=row.data, statuses=tuple(statuses), after=after, seen=tuple(seen)
    )


def row_of(name: str) -> str:
    """Return the row that a name begins with."""
    found = re.match(r"[A-Z]-\d\d\b", name)
    assert found is not None, name
    return found[0]


def lettered(cases: Iterable[Case]) -> dict[str, Case]:
    """Return the cases by id: H-04a, H-04b, ..."""
    counts: dict[str, int] = {}
    found: dict[str, Case] = {}
    for case in cases:
        row = row_of(case.name)
        number = counts.get(row, 0)
        counts[row] = number + 1
        high, low = divmod(number, 26)
        letters = (string.ascii_lowercase[high - 1] if high else "") + string.ascii_lowercase[low]
        found[row + letters] = case
    return found
