"""The disagreements of two policies that matter most, each with how both saw both replicas."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

from msgspec import Struct

from policies.model import Candidate

if TYPE_CHECKING:
    from policies.model import Decision
    from replay.decision_file import LoggedLine


class Weighed(Struct, frozen=True, kw_only=True):
    """One policy's choice, and how it scored both: lowest wins, in that policy's unit.

    A candidate is None where the policy did not score that replica.
    """

    replica: str
    reason: str
    cached_tokens: int
    lower_tier_tokens: int
    wait_ms: float | None
    own: Candidate | None
    other: Candidate | None


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


def weighed(decision: Decision, other: str) -> Weighed:
    """Return a choice beside the replica that the other policy chose."""
    return Weighed(
        replica=decision.replica,
        reason=decision.reason.value,
        cached_tokens=decision.predicted_cached_tokens,
        lower_tier_tokens=decision.predicted_lower_tier_tokens,
        wait_ms=decision.predicted_wait_ms,
        own=scored(decision, decision.replica),
        other=scored(decision, other),
    )


def scored(decision: Decision, replica: str) -> Candidate | None:
    """Return how the policy scored ``replica``; None where it did not."""
    for candidate in decision.candidates:
        if candidate.replica == replica:
            return candidate
    return None
