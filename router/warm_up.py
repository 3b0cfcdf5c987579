"""Warm-up and hand-over beside the requests: which replicas begin cold, which ones leave.

A replica that joins, or begins another life of its cache, is warmed; one that drains hands over
where the drain asked for it, or each does. What is done for it is a job (``router.warm_work``).
What was there when this router began is neither: nothing is known of how cold it is. Nor is it of
the first life of a configured replica, and of what tells of itself while the registry fills.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, Final

from msgspec import Struct
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from router.reply import json_response
from router.tally import Tally
from router.warm_call import WarmEnd
from router.warm_job import Job, JobEnd, JobKind, JobRow, JobState
from state.model import Rung

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

    from prometheus_client import Metric

    from router.account import Call
    from router.client import Handler
    from router.fleet import FleetTable, Member
    from router.reply import Response
    from router.request import Request
    from router.warm_call import WarmResult
    from router.warm_setting import WarmUpSettings
    from router.warm_text import PrefixTexts
    from router.warm_work import WarmWork
    from state.model import ReplicaId
    from state.store import FleetReader

_log = logging.getLogger(__name__)

WARM_UP_PATH: Final = "/admin/warmup"
TICK_S: Final = 0.25
START_S: Final = 5.0
"""Replicas that are first seen within so long of the first look were there before."""
JOBS_KEPT: Final = 64
LIVES_KEPT: Final = 4_096


class WarmUpView(Struct, frozen=True, kw_only=True):
    """What is kept, as counts, and the jobs: those that go on, then the last ones."""

    enabled: bool
    kept_prefixes: int
    kept_bytes: int
    jobs: tuple[JobRow, ...]


def whole_warm_ups(told: Sequence[WarmUpView]) -> WarmUpView:
    """Return what the processes of one router tell together: their jobs, those that go on first."""
    jobs = [job for view in told for job in view.jobs]
    return WarmUpView(
        enabled=any(view.enabled for view in told),
        kept_prefixes=sum(view.kept_prefixes for view in told),
        kept_bytes=sum(view.kept_bytes for view in told),
        jobs=tuple(sorted(jobs, key=lambda job: (bool(job.end), -job.began_unix_s))),
    )


class WarmUps(Collector):
    """Looks every ``TICK_S`` whether there is something to begin, or to end."""

    def __init__(
        self,
        settings: WarmUpSettings,
        texts: PrefixTexts,
        fleet: FleetTable,
        reader: FleetReader,
        clock: Callable[[], float],
        unix_clock: Callable[[], float],
    ) -> None:
        self.settings = settings
        self.texts = texts
        self.work: WarmWork | None = None
        self.asked: frozenset[ReplicaId] = frozenset()
        """Whose drain is to hand over."""
        self._fleet = fleet
        self._reader = reader
        self._clock = clock
        self._unix_clock = unix_clock
        self._lives: dict[ReplicaId, str] | None = None
        """The last life of each replica's cache, also of those that left; None before a look."""
        self._filled_s = 0.0
        """From when on a replica that is new here is one that joins."""
        self._jobs: dict[tuple[ReplicaId, JobKind], Job] = {}
        self._past: deque[Job] = deque(maxlen=JOBS_KEPT)
        self._handed: set[ReplicaId] = set()
        """Those whose present drain has a hand-over, or had one."""
        self._ends = Tally(
            "warmroute_warm_ups", "Warm-ups and hand-overs that ended.", ["kind", "end"]
        )
        self._requests = Tally(
            "warmroute_warm_up_requests", "Requests of warm-ups and hand-overs.", ["kind", "end"]
        )
        self._tokens = Tally(
            "warmroute_warm_up_tokens", "Their tokens, as engines counted them.", ["kind", "how"]
        )
        for kind in JobKind:
            for end in JobEnd:
                self._ends.add(0.0, (kind.value, end.value))
            for result in WarmEnd:
                self._requests.add(0.0, (kind.value, result.value))
            for how in ("computed", "cached"):
                self._tokens.add(0.0, (kind.value, how))

    def empty(self) -> Collection[ReplicaId]:
        """Return the replicas that are being warmed."""
        return [replica for replica, kind in self._jobs if kind is JobKind.WARM_UP]

    def note(self, call: Call) -> None:
        """Keep what is hot in the prompt of a request that was served."""
        if call.routed is None or call.outcome != "done" or call.status != 200:  # noqa: PLR2004
            return
        if call.tenant is None or call.tenant.may_keep:
            self.texts.note(call.routed)

    def counted(self, job: Job, result: WarmResult) -> None:
        """Count one request of a job."""
        kind = job.kind.value
        self._requests.add(1.0, (kind, result.end.value))
        if result.prompt_tokens is not None:
            cached = result.cached_tokens or 0
            self._tokens.add(float(cached), (kind, "cached"))
            self._tokens.add(float(max(0, result.prompt_tokens - cached)), (kind, "computed"))

    # With time.

    async def run(self) -> None:
        """Look until cancelled; then end all jobs."""
        try:
            while True:
                self.look()
                await asyncio.sleep(TICK_S)
        finally:
            tasks = [job.task for job in self._jobs.values() if job.task is not None]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def look(self) -> None:
        """Begin and end what is due; nothing here waits."""
        self.texts.tick()
        if self._reader.freshness()[0] is not Rung.LIVE:
            return
        members = self._fleet.members()
        lives = {
            replica: state.record.cache_life or state.record.generation
            for replica, state in self._reader.replicas().items()
            if replica in members
        }
        known = self._lives
        if known is None and not lives:
            return  # the registry was not read yet, or nobody is there
        self._remember(lives)
        for (replica, kind), job in list(self._jobs.items()):
            if self._is_obsolete(kind, members.get(replica), lives.get(replica), job):
                self._end(job)
        for replica, member in members.items():
            life = lives.get(replica)
            if life is None or not member.has_events:
                continue
            if member.is_draining:
                self._look_at_drain(member, life)
                continue
            self._handed.discard(replica)
            if known is not None and self._is_cold(member, known.get(replica), life):
                self._begin(JobKind.WARM_UP, member, life)

    def _remember(self, lives: Mapping[ReplicaId, str]) -> None:
        if self._lives is None:
            self._filled_s = self._clock() + START_S
        self._lives = {**(self._lives or {}), **lives}
        for old in list(self._lives)[: len(self._lives) - LIVES_KEPT]:
            del self._lives[old]

    def _is_cold(self, member: Member, before: str | None, life: str) -> bool:
        """Return whether a cache began to live in this router's time; None: it is new here."""
        if before is not None:
            return before != life
        return self._clock() >= self._filled_s and not self._fleet.is_configured(member)

    def _look_at_drain(self, member: Member, life: str) -> None:
        is_wanted = self.settings.hand_over == "always" or member.replica in self.asked
        if is_wanted and member.replica not in self._handed:
            self._handed.add(member.replica)
            self._begin(JobKind.HAND_OVER, member, life)

    @staticmethod
    def _is_obsolete(kind: JobKind, member: Member | None, life: str | None, job: Job) -> bool:
        """Return whether a job has no object any more; a hand-over may outlive its replica."""
        if member is None or life is None:
            return kind is JobKind.WARM_UP
        if member.is_draining is not (kind is JobKind.HAND_OVER):
            return True
        return life != job.life

    def _begin(self, kind: JobKind, member: Member, life: str) -> None:
        work = self.work
        if work is None:
            return
        now_s = self._clock()
        job = Job(kind, member.replica, life, self._unix_clock(), now_s + self.settings.seconds)
        key = (member.replica, kind)
        before = self._jobs.get(key)
        if before is not None:
            self._end(before)
        self._jobs[key] = job
        job.task = asyncio.create_task(work.run(job, member), name=f"{kind.value} {job.replica}")
        job.task.add_done_callback(lambda task: self._ended(key, job, task))

    @staticmethod
    def _end(job: Job) -> None:
        if job.task is not None and not job.task.done():
            job.end = job.end or JobEnd.OBSOLETE
            job.task.cancel()

    def _ended(self, key: tuple[ReplicaId, JobKind], job: Job, task: asyncio.Task[None]) -> None:
        if self._jobs.get(key) is job:
            del self._jobs[key]
        self._past.append(job)
        job.state, job.end = JobState.ENDED, job.end or JobEnd.STOPPED
        self._ends.add(1.0, (job.kind.value, job.end.value))
        if not task.cancelled() and task.exception() is not None:
            _log.error("%s of %s failed", job.kind.value, job.replica, exc_info=task.exception())

    # Looking.

    def told(self, replica: ReplicaId) -> str:
        """Return what is done for ``replica`` in a few words; empty where nothing is."""
        for kind in JobKind:
            job = self._jobs.get((replica, kind))
            if job is not None:
                return f"{kind.value.replace('_', '-')} {job.done}/{job.planned}"
        return ""

    def view(self) -> WarmUpView:
        """Return all for people."""
        jobs = [*self._jobs.values(), *reversed(self._past)]
        now_s, budget = self._clock(), self.settings.tokens
        return WarmUpView(
            enabled=True,
            kept_prefixes=len(self.texts),
            kept_bytes=self.texts.kept_bytes,
            jobs=tuple(job.row(now_s, budget) for job in jobs),
        )

    def collect(self) -> Iterable[Metric]:
        """Yield what is kept, what goes on, and what was done."""
        for name, text, value in (
            ("kept_prefixes", "Prefixes whose tokens are kept for warm-ups.", len(self.texts)),
            ("kept_bytes", "Memory that they take.", self.texts.kept_bytes),
        ):
            yield GaugeMetricFamily(f"warmroute_warm_up_{name}", text, value=float(value))
        active = GaugeMetricFamily(
            "warmroute_warm_ups_active", "Warm-ups and hand-overs that go on.", labels=["kind"]
        )
        for kind in JobKind:
            active.add_metric([kind.value], float(sum(one is kind for _, one in self._jobs)))
        yield active
        for tally in (self._ends, self._requests, self._tokens):
            yield tally.metric()


class WarmUpDesk:
    """Answers operators, also that nothing is warmed."""

    def __init__(self, warm_ups: WarmUps | None) -> None:
        self._warm_ups = warm_ups

    def routes(self) -> Mapping[str, Mapping[str, Handler]]:
        """Return the path."""
        return {WARM_UP_PATH: {"GET": self.answer}}

    async def answer(self, _: Request) -> Response:
        """Answer what is kept and what is done, as counts."""
        if self._warm_ups is None:
            view = WarmUpView(enabled=False, kept_prefixes=0, kept_bytes=0, jobs=())
            return json_response(view)
        return json_response(self._warm_ups.view())
