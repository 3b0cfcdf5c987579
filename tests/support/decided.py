"""Decision records of requests that never were, and a clock that a test turns."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from policies.model import Candidate, Decision, Reason
from router.trace import Attempt, DecisionRecord
from state.model import ReplicaId, Rung


@dataclass(slots=True)
class Clock:
    """Seconds that pass when a test says so."""

    now_s: float = 1_000.0

    def __call__(self) -> float:
        return self.now_s


def decision(
    replica: str = "r0", reason: Reason = Reason.PREFIX, cached_tokens: int = 60
) -> Decision:
    """Return a decision for the first of two candidates."""
    names = (replica, "other")
    return Decision(
        replica=ReplicaId(replica),
        reason=reason,
        predicted_cached_tokens=cached_tokens,
        candidates=tuple(
            Candidate(replica=ReplicaId(name), score=1.0, terms={"wait": 1.0}, cached_tokens=0)
            for name in names
        ),
    )


def decided(
    number: int = 0, replica: str | None = "r0", reason: Reason = Reason.PREFIX, **changes: object
) -> DecisionRecord:
    """Return a request of 100 tokens, 60 predicted and 50 reported; ``None``: nothing was tried."""
    tried = Attempt(decision=decision(replica or "", reason), outcome="done")
    record = DecisionRecord(
        request_id=f"id{number}",
        client_request_id=None,
        ordinal=number,
        seed=1,
        started_unix_s=0.0,
        path="/v1/completions",
        model="m",
        policy="ExpectedTtft",
        prompt_tokens=100,
        is_exact=True,
        unroutable=None,
        rung=Rung.LIVE,
        state_age_s=0.0,
        hot_prefix_tokens=None,
        hot_holders=(),
        attempts=() if replica is None else (tried,),
        status=200,
        outcome="done",
        ttft_s=0.25,
        duration_s=1.0,
        reported_prompt_tokens=100,
        reported_cached_tokens=50,
    )
    return msgspec.structs.replace(record, **changes)
