"""The disagreements of two policies that matter most, each with how both saw both replicas."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from msgspec import Struct

from policies.contrast import Weighed, scored, weighed

if TYPE_CHECKING:
    from policies.model import Decision
    from replay.decision_file import LoggedLine


class Disagreement(Struct, frozen=True, kw_only=True):
    """One snapshot on which the policies chose different replicas."""

    file: str
    line: int
    id: str
    ordinal: int
    prompt_tokens: int
    logged: Weighed
    replayed: Weighed


class WorstDisagreements:
    """Keeps the ``bound`` worst: most predicted cached tokens apart, then the new policy's score.

    Scores of two policies have two units, tokens have one; of equal ones the earlier is kept.
    """

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._seen = 0
        self._heap: list[tuple[int, float, int, LoggedLine, Decision]] = []

    def add(self, line: LoggedLine, made: Decision) -> None:
        """Look at a disagreement."""
        logged = line.decision.decision
        self._seen += 1
        apart_tokens = abs(made.predicted_cached_tokens - logged.predicted_cached_tokens)
        own, other = scored(made, made.replica), scored(made, logged.replica)
        regret = other.score - own.score if own is not None and other is not None else 0.0
        entry = (apart_tokens, regret, -self._seen, line, made)
        if len(self._heap) < self._bound:
            heapq.heappush(self._heap, entry)
        elif self._heap and entry[:3] > self._heap[0][:3]:
            heapq.heapreplace(self._heap, entry)

    def kept(self) -> tuple[Disagreement, ...]:
        """Return them, the worst first."""
        entries = sorted(self._heap, key=lambda entry: entry[:3], reverse=True)
        return tuple(told(line, made) for *_, line, made in entries)


def told(line: LoggedLine, made: Decision) -> Disagreement:
    """Return one disagreement in full."""
    record = line.decision
    return Disagreement(
        file=line.place.file,
        line=line.place.line,
        id=record.id,
        ordinal=record.request.ordinal,
        prompt_tokens=record.request.prompt_tokens,
        logged=weighed(record.decision, made.replica),
        replayed=weighed(made, record.decision.replica),
    )
