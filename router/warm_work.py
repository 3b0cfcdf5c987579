"""Does one job: plan, claim, and place what is planned, a step at a time, as there is room.

A step is claimed and paid for in the store before it is sent, so that several routers neither do
the same twice nor spend more than one budget; without the store nothing is sent. What was cut off
halfway is in the engine's cache all the same, and the next try goes on from there.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from policies.warm_plan import plan_hand_over, plan_warm_up
from router.warm_call import WarmEnd, WarmResult
from router.warm_job import JobEnd, JobKind, JobState
from state.model import Rung
from state.store import StateError
from state.warm_claim import Answer

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from policies.warm_plan import WarmPlace
    from router.fleet import FleetTable, Member
    from router.kv_source import KvTransferSettings
    from router.warm_call import WarmCalls
    from router.warm_job import Job
    from router.warm_look import Seen, WarmLook
    from router.warm_room import WarmRoom
    from router.warm_setting import WarmUpSettings
    from router.warm_text import KeptPrefix
    from state.model import ReplicaId
    from state.store import FleetReader
    from state.warm_claim import WarmClaims

_log = logging.getLogger(__name__)

SETTLE_S: Final = 0.5
"""What a new cache holds has to be announced first."""
RETRY_S: Final = 0.5
ROOM_S: Final = 0.05
WATCH_S: Final = 0.02
RENEW_S: Final = 1.5
"""Well within the life of a claim."""
BUSY_S: Final = 1.0
FAILURES_MOST: Final = 3
"""In a row, of one prefix on one replica."""
UNBOUNDED: Final = 2**53
LIVE: Final = Rung.LIVE


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmWorkParts:
    """What jobs work with. ``empty`` are the replicas that are being warmed."""

    settings: WarmUpSettings
    transfer: KvTransferSettings
    fleet: FleetTable
    reader: FleetReader
    look: WarmLook
    room: WarmRoom
    calls: WarmCalls
    claims: WarmClaims
    clock: Callable[[], float]
    empty: Callable[[], Collection[ReplicaId]]
    note: Callable[[Job, WarmResult], None]


class WarmWork:
    """Does jobs; at most ``concurrency`` replicas get something at the same time."""

    def __init__(self, parts: WarmWorkParts) -> None:
        self._parts = parts
        self._turn = asyncio.Semaphore(parts.settings.concurrency)

    async def run(self, job: Job, member: Member) -> None:
        """Do ``job``, of ``member``, until its end; a cancellation is one."""
        parts = self._parts
        try:
            async with asyncio.timeout(max(0.0, job.until_s - parts.clock())):
                await asyncio.sleep(SETTLE_S)
                while job.end is None:
                    await self._pass(job, member)
        except TimeoutError:
            is_kept = job.kind is JobKind.HAND_OVER and job.state is JobState.WAITING
            job.end = JobEnd.FAILED if is_kept and not job.done else JobEnd.TIME
        finally:
            job.end = job.end or JobEnd.STOPPED
            if job.state is not JobState.ELSEWHERE:
                with suppress(StateError):
                    await asyncio.shield(parts.claims.give_back(job.subject))
            job.state = JobState.ENDED
            text = "%s of %s: %s: %d of %d prefixes, %d of %d tokens"
            planned, budget = job.planned, parts.settings.tokens
            kind = job.kind.value.replace("_", "-")
            told = (kind, job.replica, job.end.value, job.done, planned, job.spent_tokens, budget)
            _log.info(text, *told)

    async def _pass(self, job: Job, member: Member) -> None:
        """Plan once, and do what was planned; the job ends where nothing is left to do."""
        parts = self._parts
        if parts.reader.freshness()[0] is not LIVE or not self._may_begin(job):
            job.state = JobState.WAITING
            await asyncio.sleep(RETRY_S)
            return
        seen = await parts.look.seen(member, parts.clock(), job.settled)
        places = self._plan(job, member, seen)
        if not places:
            if self._is_without_heirs(job, member, seen):
                await self._await_heirs(job, member)
                return
            failed = JobEnd.FAILED if job.failed and not job.done else JobEnd.DONE
            is_spent = job.is_cut or bool(self._plan(job, member, seen, UNBOUNDED))
            job.end = JobEnd.TOKENS if is_spent else failed
            return
        if not await self._claim(job):
            await asyncio.sleep(RETRY_S)
            return
        job.state, job.planned = JobState.WORKING, job.done + len(places)
        job.is_cut = any(one.end_tokens < seen.parts[one.name].end_tokens for one in places)
        by_target: dict[ReplicaId, list[WarmPlace]] = {}
        for place in places:
            by_target.setdefault(place.replica, []).append(place)
        async with asyncio.TaskGroup() as tasks:
            for replica, rows in by_target.items():
                tasks.create_task(self._fill(job, replica, rows, seen))

    def _may_begin(self, job: Job) -> bool:
        """Return whether the replica is there to be warmed; one that leaves only has to be left."""
        return job.kind is JobKind.HAND_OVER or self._parts.room.is_open(job.replica)

    def _plan(
        self, job: Job, member: Member, seen: Seen, budget: int | None = None
    ) -> list[WarmPlace]:
        """Return what is to be placed with what is left of the budget, or with ``budget``."""
        parts, settings = self._parts, self._parts.settings
        budget_tokens = settings.tokens - job.spent_tokens if budget is None else budget
        most_places = settings.prefixes - job.done - job.failed if budget is None else budget
        able = self._able(member)
        if job.kind is JobKind.WARM_UP:
            return plan_warm_up(
                seen.parts,
                job.replica,
                able,
                empty=parts.empty(),
                budget_tokens=budget_tokens,
                most_places=most_places,
            )
        others = [replica for replica in able if replica != job.replica]
        return plan_hand_over(
            seen.parts, job.replica, others, budget_tokens=budget_tokens, most_places=most_places
        )

    def _able(self, member: Member) -> list[ReplicaId]:
        """Return who can be given what ``member`` computes, itself among them where it is open."""
        parts = self._parts
        return [
            replica
            for replica, one in parts.fleet.members().items()
            if one.has_events and one.identity == member.identity and parts.room.is_open(replica)
        ]

    def _is_without_heirs(self, job: Job, member: Member, seen: Seen) -> bool:
        """Return whether a replica leaves with something and nobody can be given it now."""
        if job.kind is not JobKind.HAND_OVER or set(self._able(member)) - {job.replica}:
            return False
        return any(job.replica in part.holders for part in seen.parts.values())

    async def _await_heirs(self, job: Job, member: Member) -> None:
        """Wait for those that take nothing now; where there are none the job has failed."""
        job.state = JobState.WAITING
        if any(
            one.identity == member.identity and not one.is_draining
            for replica, one in self._parts.fleet.members().items()
            if replica != job.replica
        ):
            await asyncio.sleep(RETRY_S)
        else:
            job.end = JobEnd.FAILED

    async def _claim(self, job: Job, tokens: int = 0) -> bool:
        """Return whether this router has the job, and the budget the tokens; both from the store.

        Without the store it has neither.
        """
        parts = self._parts
        try:
            claimed = await parts.claims.take(job.subject, tokens, parts.settings.tokens)
        except StateError:
            job.state = JobState.WAITING
            return False
        job.spent_tokens, job.renewed_s = claimed.spent_tokens, parts.clock()
        if claimed.answer is Answer.TAKEN:
            job.state = JobState.ELSEWHERE
        return claimed.answer is Answer.GRANTED

    async def _fill(
        self, job: Job, replica: ReplicaId, places: list[WarmPlace], seen: Seen
    ) -> None:
        """Place what is planned on one replica, one after another."""
        for place in places:
            if job.end is not None or job.state is not JobState.WORKING:
                return
            is_done = await self._place(job, replica, place, seen.texts[place.name])
            if is_done is None:
                return
            job.settled.add((replica, place.name))
            job.done += is_done
            job.failed += not is_done

    async def _place(
        self, job: Job, replica: ReplicaId, place: WarmPlace, text: KeptPrefix
    ) -> bool | None:
        """Return whether ``replica`` has the prefix; None where the pass is over before that."""
        parts, failures, reached = self._parts, 0, 0
        while True:
            member = parts.fleet.members().get(replica)
            # An heir that is not open gives way to another one; who is warmed is waited for.
            is_there = parts.room.is_open(replica) and job.state is JobState.WORKING
            if member is None or not is_there or not parts.look.is_kept(text):
                return None if parts.look.is_kept(text) else False
            if parts.reader.freshness()[0] is not LIVE or not parts.room.has_room(member):
                await self._pause(job, ROOM_S)
                continue
            held = max(reached, parts.look.held_tokens(text, replica, parts.clock()))
            if held >= place.end_tokens:
                return True
            async with self._turn:
                if not parts.room.has_room(member):
                    continue
                end_tokens = await self._paid(job, text, held, place.end_tokens)
                if end_tokens is None:
                    return None
                result = await self._sent(job, member, text, end_tokens, held)
            parts.note(job, result)
            if result.end is WarmEnd.DONE:
                failures, reached = 0, end_tokens
                await self._settle(job, result, end_tokens - held)
            elif result.end is WarmEnd.GAVE_WAY:
                job.gave_way += 1
            elif result.end is WarmEnd.REFUSED or failures + 1 >= FAILURES_MOST:
                return False
            else:
                failures += 1
                await self._pause(job, BUSY_S)

    async def _paid(self, job: Job, text: KeptPrefix, held: int, end_tokens: int) -> int | None:
        """Return up to where the next step goes, once it is paid for; None where it is not."""
        parts = self._parts
        block, most = text.block_tokens, parts.settings.step_tokens
        step = min(end_tokens - held, max(block, most // block * block))
        for _ in range(2):
            if await self._claim(job, step):
                return held + step
            step = min(step, (parts.settings.tokens - job.spent_tokens) // block * block)
            if job.state is not JobState.WORKING:
                return None
            if step <= 0:
                job.end = JobEnd.TOKENS
                return None
        return None

    async def _settle(self, job: Job, result: WarmResult, paid_tokens: int) -> None:
        """Count what the engine did; what it had lost meanwhile is paid for, too."""
        if result.prompt_tokens is None:
            return
        cached = result.cached_tokens or 0
        job.cached_tokens += cached
        computed = max(0, result.prompt_tokens - cached)
        job.computed_tokens += computed
        more = computed - paid_tokens
        if more > 1:  # the last token of a prompt is always computed
            with suppress(StateError):
                claimed = await self._parts.claims.take(job.subject, more, UNBOUNDED)
                job.spent_tokens = claimed.spent_tokens

    async def _sent(
        self, job: Job, member: Member, text: KeptPrefix, end_tokens: int, held: int
    ) -> WarmResult:
        """Send one step, and take it back as soon as it is in the way."""
        parts, replica = self._parts, member.replica
        source = None
        if parts.transfer.enabled:
            source = parts.look.source(text, member, held, parts.transfer.min_tokens)
        before = parts.room.clients(replica)
        call = asyncio.create_task(
            parts.calls.send(job.kind.value, member, text, end_tokens, held, source)
        )
        # The store may be slow to renew the claim, and clients are not to wait for that.
        renewals: list[asyncio.Task[bool]] = []
        try:
            while not call.done():
                await asyncio.wait((call,), timeout=WATCH_S)
                if parts.room.must_yield(replica, before) or job.state is not JobState.WORKING:
                    break
                before = min(before, parts.room.clients(replica))
                is_due = parts.clock() - job.renewed_s > RENEW_S
                if is_due and not call.done() and all(one.done() for one in renewals):
                    renewals = [asyncio.create_task(self._claim(job))]
        finally:
            call.cancel()
            await asyncio.gather(call, *renewals, return_exceptions=True)
        return WarmResult(WarmEnd.GAVE_WAY) if call.cancelled() else call.result()

    async def _pause(self, job: Job, pause_s: float) -> None:
        """Wait, and keep the claim meanwhile."""
        await asyncio.sleep(pause_s)
        if self._parts.clock() - job.renewed_s > RENEW_S:
            await self._claim(job)
