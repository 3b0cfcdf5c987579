"""What a fault of the schedule is: a name, what it does to the rig, and what is expected of it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from chaos.evidence import ClientLine, End

if TYPE_CHECKING:
    import random
    from collections.abc import Awaitable, Callable, Iterable

    from chaos.rig import Rig
    from chaos.watch import Look

BAD_ENDS: Final = frozenset({End.HTTP_ERROR, End.ERROR_EVENT, End.CLOSED, End.HUNG})
LONGEST_S: Final = 60.0
"""Longer than any client waits."""
PATIENCE: Final = 20.0
"""By so much may a busy machine be later than what is expected of an idle one."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One expectation: whether it was met, and what was seen."""

    text: str
    is_met: bool
    seen: str


@dataclass(frozen=True, slots=True)
class Fault:
    """``strike`` returns once the fault is over; the schedule waits for the fleet afterwards."""

    name: str
    title: str
    strike: Callable[[Rig, random.Random], Awaitable[list[Finding]]]
    in_slice: bool = False


def within(
    text: str, took_s: float | None, wanted_s: float, patience_s: float = PATIENCE
) -> Finding:
    """Return a finding on a time; a busy machine gets more of it, the figure is told."""
    seen = "never" if took_s is None else f"{took_s:.2f} s"
    met = took_s is not None and took_s <= wanted_s + patience_s
    return Finding(f"{text} (on an idle machine within {wanted_s:g} s)", met, seen)


def told(text: str, seen: str) -> Finding:
    """Return a finding that is told and not judged."""
    return Finding(text, is_met=True, seen=seen)


def since(rig: Rig, from_s: float) -> list[ClientLine]:
    """Return the requests that were open after ``from_s``, have ended and are judged."""
    found = []
    for line in reversed(rig.crowd.ledger):  # in the order in which they began
        if line.began_s < from_s - LONGEST_S:
            break
        is_judged = line.ended_s != float("inf") and not line.prompt
        if is_judged and line.ended_s >= from_s and line.end is not End.LEFT:
            found.append(line)
    return found[::-1]


def bad(lines: Iterable[ClientLine]) -> list[ClientLine]:
    """Return those that did not end well."""
    return [line for line in lines if line.end in BAD_ENDS]


def no_errors(rig: Rig, from_s: float, router: int | None = None) -> Finding:
    """Expect that every request since then ended well."""
    lines = [one for one in since(rig, from_s) if router is None or one.router == router]
    wrong = bad(lines)
    whose = "requests" if router is None else f"requests by router {router}"
    shown = ", ".join(sorted({f"{one.end} {one.status} {one.error_code}" for one in wrong}))
    seen = f"{len(wrong)} of {len(lines)} failed{': ' if wrong else ''}{shown}"
    return Finding(f"no {whose} fail", not wrong, seen)


def only_begun_fail(rig: Rig, from_s: float) -> Finding:
    """Expect that only answers which had begun end badly, and those by a word."""
    lines = since(rig, from_s)
    wrong, untold = bad(lines), unexplained(lines)
    shown = ", ".join(sorted({f"{one.end} {one.status} {one.error_code}" for one in untold}))
    seen = f"{len(lines)} requests, {len(wrong)} ended so, {len(untold)} others {shown}"
    text = "only answers that had begun fail, with an error event, and what may not be repeated"
    return Finding(text, not untold, seen)


def unexplained(lines: Iterable[ClientLine]) -> list[ClientLine]:
    """Return what failed though its answer had not begun and it may be sent to another replica."""
    return [
        line
        for line in bad(lines)
        if line.is_repeatable
        and line.end is not End.ERROR_EVENT
        and (line.is_stream or line.status != 200)
    ]


def down(name: str) -> Callable[[list[Look]], bool]:
    """Return whether no router offers requests to that replica."""

    def is_down(look: Look) -> bool:
        seen = look.replicas.get(name)
        return seen is None or not seen.is_up or seen.standing in ("ejected", "down")

    return lambda looks: all(map(is_down, looks))


def now() -> float:
    """Return the clock of all evidence."""
    return time.monotonic()
