"""One warm-up of a replica, or one hand-over: what it has to do, and how far it is."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec import Struct

from state.warm_claim import Subject

if TYPE_CHECKING:
    import asyncio

    from state.model import BlockId, ReplicaId


class JobKind(enum.StrEnum):
    """What is done for a replica; the same label goes to metric, recording, view and log."""

    WARM_UP = "warm_up"
    """It has an empty cache and gets what it should hold."""
    HAND_OVER = "hand_over"
    """It drains, and what it alone holds goes to others."""


class JobState(enum.StrEnum):
    """What a job does now."""

    WAITING = "waiting"
    """For the replica, or for the store."""
    WORKING = "working"
    ELSEWHERE = "elsewhere"
    """Another router does it."""
    ENDED = "ended"


class JobEnd(enum.StrEnum):
    """Why a job has ended."""

    DONE = "done"
    """Nothing is left that this router knows of."""
    TOKENS = "tokens"
    """The budget of tokens or prefixes is spent."""
    TIME = "time"
    FAILED = "failed"
    """What is left was refused, or failed, or nobody could be given it."""
    OBSOLETE = "obsolete"
    """The replica left, drains, is no longer drained, or began another life."""
    STOPPED = "stopped"
    """The router ends."""


class JobRow(Struct, frozen=True, kw_only=True):
    """A job for people to look at. Prefixes are parts of prompts, as traffic shares them.

    ``planned`` includes those that are done. ``spent_tokens`` are those of all routers, of
    ``budget_tokens``; ``computed_tokens`` and ``cached_tokens`` as engines counted them for this
    router's requests: what was fetched from another replica is cached. ``end`` is empty while it
    goes on.
    """

    kind: str
    replica: str
    state: str
    end: str
    planned: int
    done: int
    failed: int
    spent_tokens: int
    budget_tokens: int
    computed_tokens: int
    cached_tokens: int
    gave_way: int
    began_unix_s: float
    left_s: float


@dataclass(slots=True, eq=False)
class Job:
    """See the module. ``settled`` are places that are not planned again: done, or given up."""

    kind: JobKind
    replica: ReplicaId
    life: str
    began_unix_s: float
    until_s: float
    state: JobState = JobState.WAITING
    end: JobEnd | None = None
    planned: int = 0
    done: int = 0
    failed: int = 0
    spent_tokens: int = 0
    computed_tokens: int = 0
    cached_tokens: int = 0
    gave_way: int = 0
    is_cut: bool = False
    """The last prefix was cut where the budget ended."""
    settled: set[tuple[ReplicaId, BlockId]] = field(default_factory=set)
    renewed_s: float = 0.0
    task: asyncio.Task[None] | None = None

    @property
    def subject(self) -> Subject:
        """What routers claim."""
        return Subject(self.replica, self.kind.value, self.life)

    def row(self, now_s: float, budget_tokens: int) -> JobRow:
        """Return it for people."""
        return JobRow(
            kind=self.kind.value,
            replica=self.replica,
            state=self.state.value,
            end="" if self.end is None else self.end.value,
            planned=self.planned,
            done=self.done,
            failed=self.failed,
            spent_tokens=self.spent_tokens,
            budget_tokens=budget_tokens,
            computed_tokens=self.computed_tokens,
            cached_tokens=self.cached_tokens,
            gave_way=self.gave_way,
            began_unix_s=self.began_unix_s,
            left_s=0.0 if self.end is not None else round(max(0.0, self.until_s - now_s), 1),
        )
