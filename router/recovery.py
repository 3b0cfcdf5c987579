"""What follows a failed attempt: the books are kept, and another try is granted or not."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from router.error import (
    NoReplicaError,
    QuarantinedError,
    ReplicaClosedError,
    ReplicaConnectTimeoutError,
    ReplicaDiedError,
    ReplicaTimeoutError,
    ReplicaUnreachableError,
)
from router.fleet import dialled
from router.rank import mates
from router.retry import LOST, Denial, RetryReason, denial_of, is_repeatable, reason_of
from router.tally import Tally
from router.verdict import Verdict

if TYPE_CHECKING:
    from collections.abc import Callable

    from router.account import Call
    from router.autopsy import Autopsy
    from router.availability import Availability
    from router.error import ReplicaError
    from router.fleet import FleetTable, Member
    from router.health import Health
    from router.quarantine import Quarantine
    from router.retry_budget import Claim, RetryBudget
    from router.retry_setting import RetrySettings
    from state.model import ReplicaId

TURN_S: Final = 0.02
"""How often a request that waits for its second try looks again, where few wait."""
TURNS_PER_S: Final = 1_000.0
"""How often all that wait look again together, a percent of a core: a large replica leaves many."""
NONE_LEFT: Final = "no replica can take the request now"
CUT_SHORT: Final = frozenset({"truncated", "first_byte_timeout", "chunk_idle"})
"""Ends of answers that had begun, of which a replica may have died."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryParts:
    """What it works with; built by the composition root."""

    settings: RetrySettings
    fleet: FleetTable
    health: Health
    availability: Availability
    budget: RetryBudget
    quarantine: Quarantine
    autopsy: Autopsy
    clock: Callable[[], float]
    standing: Callable[[], tuple[int, int]] = lambda: (0, 1)
    """How many live routers come before this one, and how many there are."""


class Recovery:
    """Judges attempts, and grants second tries."""

    def __init__(self, parts: RecoveryParts) -> None:
        self._parts = parts
        self._suspects: Counter[ReplicaId] = Counter()
        """How many requests each replica has that were on another one when that died."""
        self._waiting = 0
        """Requests that wait for leave to be tried again."""
        self._examinations: set[asyncio.Task[None]] = set()
        self.retries = Tally(
            "warmroute_retries", "Requests sent to another replica after a failure.", ["reason"]
        )
        self.denied = Tally(
            "warmroute_retries_denied", "Failures that were not tried again, by why.", ["reason"]
        )
        for reason in RetryReason:
            self.retries.add(0.0, (reason.value,))
        for denial in Denial:
            self.denied.add(0.0, (denial.value,))

    def admit(self, call: Call, body: bytes, choices: int) -> None:
        """Look at a request before its first attempt; raises QuarantinedError."""
        parts = self._parts
        parts.budget.deposit()
        call.is_repeatable = is_repeatable(call.path, body, choices)
        if parts.quarantine.marked:
            self._check(call, body)

    def may_replay(self) -> bool:
        """Return whether a request may go out again that a pooled connection took and lost."""
        if self._parts.budget.replay():
            return True
        self.denied.add(1.0, (Denial.BUDGET.value,))
        return False

    def _check(self, call: Call, body: bytes) -> None:
        quarantine = self._parts.quarantine
        left_s = quarantine.left_s(call.path, body, self._parts.clock())
        if left_s is not None:
            quarantine.refused += 1
            raise QuarantinedError(max(1, math.ceil(left_s)))

    def answered(self, call: Call, body: bytes, member: Member) -> None:
        """Note how an attempt ended whose answer, or a part of it, was passed on.

        Called where that may matter: something is held against a replica or a request, or the
        answer is no plain success.
        """
        parts, relayed = self._parts, call.relayed
        if relayed is None:
            return
        verdict = parts.availability.answered(member, relayed)
        if verdict is Verdict.SUCCESS:
            parts.quarantine.clear(call.path, body, call.key)
        elif verdict is Verdict.FAILURE:
            key = call.key or parts.quarantine.key(call.path, body)
            parts.quarantine.suspect(member.replica, key, parts.clock())
            if relayed.reason in CUT_SHORT:
                self._examine_soon(member)

    def _examine_soon(self, member: Member) -> None:
        """Find out whether a replica that broke an answer off is dead; nobody waits for it."""

        async def examine() -> None:
            if await self._parts.autopsy.is_dead(member):
                self._bury(member)

        task = asyncio.create_task(examine(), name="examine")
        self._examinations.add(task)
        task.add_done_callback(self._examinations.discard)

    async def close(self) -> None:
        """End the examinations."""
        await self._parts.autopsy.close()
        await asyncio.gather(*self._examinations, return_exceptions=True)

    def _bury(self, member: Member) -> None:
        """Take out a replica that refuses connections, with all that is the same process."""
        parts = self._parts
        parts.health.refused(member.replica)
        now_s = parts.clock()
        for replica in mates(parts.fleet.members().values(), member):
            parts.quarantine.died(replica, now_s)

    async def settle(
        self,
        error: ReplicaError,
        call: Call,
        body: bytes,
        member: Member,
        tried: set[ReplicaId],
        open_requests: int,
    ) -> None:
        """Grant another try after ``error``, and add to ``tried`` who is not to get it; else raise.

        What is raised is the error, or QuarantinedError where replicas died of the request.
        """
        parts = self._parts
        self.ended(call)
        parts.availability.failed(member, error)
        error = await self._examined(error, call, body, member)
        if parts.quarantine.marked:
            self._check(call, body)
        reason = reason_of(error, parts.settings.after_send)
        if reason is None:
            raise error
        denial = denial_of(
            reason, len(call.attempts), was_sent=call.was_sent, is_repeatable=call.is_repeatable
        )
        if denial is None and self._left_s(call) <= 0:
            denial = Denial.DEADLINE
        is_lost = reason in LOST
        tried.update(mates(parts.fleet.members().values(), member) if is_lost else ())
        tried.add(member.replica)
        if denial is None:
            self._need_replica(error, call, tried)
            call.retry = await self._claim(reason, call, open_requests)
            denial = Denial.BUDGET if call.retry is None else None
        if denial is not None:
            self.denied.add(1.0, (denial.value,))
            raise error
        call.was_sent = call.was_sent or reason is not RetryReason.UNREACHABLE
        call.retry_reason = reason
        if reason is RetryReason.DIED:
            call.is_suspect = True
        if call.is_suspect:
            self._spread(call, tried)

    async def lost(self, error: ReplicaError, call: Call, member: Member) -> None:
        """Note how an attempt ended beside which another one still runs."""
        self._parts.availability.failed(member, error)
        await self._examined(error, call, call.body, member)

    def _need_replica(self, error: ReplicaError, call: Call, tried: set[ReplicaId]) -> None:
        """Raise where nobody is left for another try: what befell the request, if that was late.

        A replica that did not answer in time is no reason to say that there is none.
        """
        model = call.routed.prompt.model if call.routed is not None else ""
        if self._parts.availability.candidates(model or None, tried):
            return
        self.denied.add(1.0, (Denial.NO_REPLICA.value,))
        if isinstance(error, ReplicaTimeoutError):
            raise error
        raise NoReplicaError(NONE_LEFT) from error

    def _spread(self, call: Call, tried: set[ReplicaId]) -> None:
        """Keep a suspect away from other suspects, as long as there are replicas without one.

        Where they share a replica that dies, too, it cannot be told who did it. What suspects other
        routers have this one does not know: each gives its own to its part of the fleet.
        """
        model = call.routed.prompt.model if call.routed is not None else ""
        busy, others = set(self._suspects), self._others()
        for avoided in (busy | others, busy, others):
            if avoided and self._parts.availability.candidates(model or None, tried | avoided):
                tried.update(avoided)
                return

    def _others(self) -> set[ReplicaId]:
        """Return the replicas to which other routers send their suspects; one process is one."""
        rank, routers = self._parts.standing()
        at = {
            replica: dialled(member.endpoint).authority
            for replica, member in self._parts.fleet.members().items()
        }
        own = set(sorted(set(at.values()))[rank::routers])
        return {replica for replica, authority in at.items() if authority not in own}

    def began(self, call: Call, replica: ReplicaId) -> None:
        """Count another try as it goes out, and note where a suspect goes."""
        if call.retry_reason is not None:
            self.retries.add(1.0, (call.retry_reason.value,))
            call.retry_reason = None
        if call.is_suspect:
            call.suspect_on = replica
            self._suspects[replica] += 1

    def ended(self, call: Call) -> None:
        """Give back what a second try took, all of it where it found no replica any more."""
        if call.retry is not None and call.retry_reason is not None:
            call.retry.give_back()
            call.retry_reason = None
            if call.outcome == "failed":  # else the client left
                self.denied.add(1.0, (Denial.NO_REPLICA.value,))
        if call.retry is not None:
            call.retry.end()
            call.retry = None
        if call.suspect_on is not None:
            self._suspects[call.suspect_on] -= 1
            if not self._suspects[call.suspect_on]:
                del self._suspects[call.suspect_on]
            call.suspect_on = None

    async def _examined(
        self, error: ReplicaError, call: Call, body: bytes, member: Member
    ) -> ReplicaError:
        """Return the error, or what it turns out to be, once the replica was looked at."""
        parts = self._parts
        if isinstance(error, ReplicaConnectTimeoutError):
            parts.health.doubt(member.replica)
        elif type(error) is ReplicaUnreachableError:
            self._bury(member)
        elif isinstance(error, ReplicaUnreachableError):  # somebody listens there
            parts.health.refused(member.replica)
        elif isinstance(error, ReplicaClosedError):
            key = parts.quarantine.key(call.path, body)
            parts.quarantine.suspect(member.replica, key, parts.clock())
            if isinstance(error, ReplicaDiedError) or await parts.autopsy.is_dead(member):
                self._bury(member)
                return error if isinstance(error, ReplicaDiedError) else _died(error)
        return error

    def _left_s(self, call: Call) -> float:
        return call.started_s + self._parts.settings.deadline_s - self._parts.clock()

    def first_byte_timeout_s(self, call: Call, usual_s: float) -> float | None:
        """Return how long a second try may take to answer; None where the usual limit counts."""
        if not call.attempts:
            return None
        left_s = max(0.001, self._left_s(call))
        return left_s if left_s < usual_s else None

    async def _claim(self, reason: RetryReason, call: Call, open_requests: int) -> Claim | None:
        """Return the leave for a second try, for which a request of a lost replica may wait."""
        parts = self._parts
        is_lost = reason in LOST
        until_s = parts.clock() + min(parts.settings.patience_s, self._left_s(call))
        while True:
            now_s = parts.clock()
            claim = parts.budget.take(open_requests, now_s, is_lost=is_lost)
            if claim is not None or not is_lost or now_s >= until_s:
                return claim
            self._waiting += 1
            try:
                pause_s = max(TURN_S, self._waiting / TURNS_PER_S)
                await asyncio.sleep(min(pause_s, until_s - now_s))
            finally:
                self._waiting -= 1


def _died(error: ReplicaClosedError) -> ReplicaDiedError:
    died = ReplicaDiedError(error.message)
    died.__cause__ = error
    return died
