"""A fleet in virtual time: routers, engines, and the news between them, as one sequence of events.

Events at the same time happen in a fixed order: engines first, in the order of their names, then
faults, then arrivals; so a run is the same every time.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import TYPE_CHECKING, Final

from policies.hold import HoldEnd, HoldQueue
from replay.engine import NEVER, Engine, Job
from replay.memory import EngineMemory
from replay.outcome import Outcome
from replay.router import VirtualRouter
from state.lease import sum_leases
from state.model import ReplicaId, ReplicaLoad, Tier
from state.residency import Residency

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from policies.model import Decision, Policy
    from replay.router import Asked, Taken
    from replay.setting import FleetSettings
    from replay.sharing import Sharing
    from replay.trace import TraceRequest
    from state.model import BlockId

_News = tuple[float, ReplicaId, list[tuple[Tier, bool, "BlockId"]] | None]
_HOLD_TICK_S: Final = 0.05


class Fleet:
    """Runs a list of requests to their ends; see ``run``."""

    def __init__(
        self,
        requests: Sequence[TraceRequest],
        block_tokens: int,
        policy: Policy,
        settings: FleetSettings,
        sharing: Sharing,
    ) -> None:
        self._requests = requests
        self._settings = settings
        self._sharing = sharing
        self._names = [ReplicaId(f"r{place:02d}") for place in range(settings.replicas)]
        speeds = [*settings.speeds, *[1.0] * settings.replicas][: settings.replicas]
        common = EngineMemory(settings, block_tokens) if settings.is_pooled else None
        self.engines = [Engine(settings, block_tokens, speed, common) for speed in speeds]
        self._residency = Residency()
        self._routers = [
            VirtualRouter(self._names, policy, settings, block_tokens, self._residency)
            for _ in range(settings.routers)
        ]
        self._places = {name: place for place, name in enumerate(self._names)}
        self._queues: list[HoldQueue[int]] = [HoldQueue(settings.hold) for _ in self._routers]
        self._due: list[tuple[float, int]] = []
        self._news: deque[_News] = deque()
        self._asked: dict[int, Asked] = {}
        self._taken: dict[int, Taken] = {}
        self._pulls: list[tuple[float, int, int, Job]] = []
        self._link_free_s = [0.0] * settings.replicas
        self._lost_events = 0
        self._next_exchange_s = 0.0
        self._next_scrape_s = 0.0
        self._next_tick_s = NEVER
        self._ups: list[tuple[float, int]] = []
        self.outcomes: list[Outcome | None] = [None] * len(requests)
        self.now_s = 0.0

    def run(self) -> None:
        """Run every request to its end."""
        arrivals = iter(enumerate(self._requests))
        faults = deque(sorted(self._settings.faults, key=lambda fault: fault.at_s))
        coming = next(arrivals, None)
        while True:
            arrival_s = coming[1].arrival_s if coming is not None else NEVER
            fault_s = faults[0].at_s if faults else NEVER
            engine_s = self._due[0][0] if self._due else NEVER
            pull_s = self._pulls[0][0] if self._pulls else NEVER
            up_s = self._ups[0][0] if self._ups else NEVER
            now_s = min(arrival_s, fault_s, engine_s, pull_s, up_s, self._next_tick_s)
            if now_s == NEVER:
                return
            self.now_s = now_s
            if engine_s == now_s:
                self._advance_engine()
            elif pull_s == now_s:
                _, place, _, job = heapq.heappop(self._pulls)
                self._submit(place, job)
            elif up_s == now_s:
                self._bring_up(heapq.heappop(self._ups)[1])
            elif fault_s == now_s:
                fault = faults.popleft()
                self._fail(fault.replica, fault.down_s)
            elif self._next_tick_s == now_s:
                self._tick()
            elif coming is not None:
                self._arrive(*coming)
                coming = next(arrivals, None)

    def _advance_engine(self) -> None:
        due_s, place = heapq.heappop(self._due)
        engine = self.engines[place]
        if engine.due_s != due_s:  # it was cut short, or began anew
            return
        is_free = False
        for job in engine.advance(due_s):
            taken = self._taken[job.index]
            router = self._routers[job.index % len(self._routers)]
            if job.first_s == due_s:
                router.first_token(taken, due_s)
                is_free = True
            if job.generated_tokens >= job.output_tokens:
                router.end(taken, due_s)
                self._finish(job, taken)
                is_free = True
        self._tell(place)
        self._watch(place)
        if is_free:
            self._give_way()

    def _watch(self, place: int) -> None:
        due_s = self.engines[place].due_s
        if due_s < NEVER:
            heapq.heappush(self._due, (due_s, place))

    def _tell(self, place: int) -> None:
        """Send what an engine stored and evicted; it arrives after the delay, unless lost."""
        memory = self.engines[place].memory
        if not memory.news:
            return
        news, memory.news = memory.news, []
        settings = self._settings
        if settings.event_loss:
            self._lost_events += 1
            draw = (self._lost_events * 0x9E3779B97F4A7C15 + settings.seed) % (1 << 64)
            if draw / (1 << 64) < settings.event_loss:
                return
        name = self._names[0 if settings.is_pooled else place]
        self._news.append((self.now_s + settings.event_delay_s, name, news))

    def _hear(self) -> None:
        """Take the news that have arrived by now."""
        news = self._news
        while news and news[0][0] <= self.now_s:
            _, replica, changes = news.popleft()
            if changes is None:
                self._residency.drop(replica)
                continue
            run: list[BlockId] = []
            last = changes[0][:2]
            for tier, is_stored, block in changes:
                if (tier, is_stored) != last:
                    self._apply(replica, last, run)
                    run, last = [], (tier, is_stored)
                run.append(block)
            self._apply(replica, last, run)

    def _apply(self, replica: ReplicaId, kind: tuple[Tier, bool], run: list[BlockId]) -> None:
        tier, is_stored = kind
        if is_stored:
            self._residency.store(replica, tier, run)
        else:
            self._residency.remove(replica, tier, run)

    def _look(self) -> None:
        """Bring the routers' view up to date: events, load reports, each other's leases."""
        self._hear()
        now_s, settings = self.now_s, self._settings
        if now_s >= self._next_scrape_s:
            self._next_scrape_s = now_s + settings.load_delay_s
            loads = {
                name: ReplicaLoad(
                    running=engine.running,
                    queued=engine.waiting,
                    kv_used_fraction=engine.memory.used_fraction,
                )
                for name, engine in zip(self._names, self.engines, strict=True)
            }
            for router in self._routers:
                router.loads = loads
        interval_s = settings.lease_interval_s
        if len(self._routers) > 1 and interval_s is not None and now_s >= self._next_exchange_s:
            self._next_exchange_s = now_s + interval_s
            totals = [router.leases.totals(now_s) for router in self._routers]
            for place, router in enumerate(self._routers):
                router.foreign = sum_leases(totals[:place] + totals[place + 1 :])

    def _arrive(self, index: int, request: TraceRequest) -> None:
        if not self.engines[0].memory.fits(request.prompt_tokens + request.output_tokens):
            self.outcomes[index] = self._outcome(index, request, "", error="never fits")
            return
        router = self._routers[index % len(self._routers)]
        session = self._sharing.session(request)
        self._route(router.arrive(index, request, session, self.now_s))

    def _route(self, asked: Asked, *, can_hold: bool = True) -> None:
        self._look()
        place = asked.ordinal % len(self._routers)
        queue, router = self._queues[place], self._routers[place]
        decision = router.decide(asked, self.now_s)
        if decision is None:
            request = asked.request
            self.outcomes[asked.ordinal] = self._outcome(
                asked.ordinal, request, "", error="no replica"
            )
            return
        self._asked[asked.ordinal] = asked
        request = asked.request
        uncached = max(1, request.prompt_tokens - decision.predicted_cached_tokens)
        is_held = can_hold and self._settings.hold.enabled and queue.takes(decision)
        if is_held and not queue.is_full:
            queue.add(
                asked.ordinal,
                decision.replica,
                work_ms=router.work_ms(request, uncached),
                uncached_tokens=uncached,
                tenant=request.tenant,
                now_s=self.now_s,
            )
            self._next_tick_s = min(self._next_tick_s, self.now_s + _HOLD_TICK_S)
            return
        queue.charge(request.tenant, uncached)
        self._dispatch(asked, decision)

    def _dispatch(self, asked: Asked, decision: Decision) -> None:
        """Send a request to its replica; pages that it pulls come before it."""
        router = self._routers[asked.ordinal % len(self._routers)]
        taken = router.take(asked, decision, self.now_s)
        self._taken[asked.ordinal] = taken
        request = asked.request
        job = Job(asked.ordinal, request.chain, request.prompt_tokens, request.output_tokens)
        place = self._places[decision.replica]
        pulled_ms = 0.0
        if decision.kv_source is not None and self._settings.pull_token_ms is not None:
            source = self.engines[self._places[decision.kv_source]].memory
            memory = self.engines[place].memory
            there, here = source.match_blocks(request.chain), memory.match_blocks(request.chain)
            if there > here:
                job.pulled_blocks = there
                tokens = (there - here) * memory.page_tokens
                pulled_ms = self._settings.pull_token_ms * tokens
        if pulled_ms:
            begun_s = max(self.now_s, self._link_free_s[place])
            self._link_free_s[place] = begun_s + 1e-3 * pulled_ms
            heapq.heappush(self._pulls, (self._link_free_s[place], place, asked.ordinal, job))
        else:
            self._submit(place, job)

    def _submit(self, place: int, job: Job) -> None:
        engine = self.engines[place]
        before_s = engine.due_s
        engine.submit(job, self.now_s)
        if engine.due_s != before_s:
            self._watch(place)

    def _give_way(self) -> None:
        """Let others go on that waited for what was given back."""
        if self._settings.is_pooled:
            for place, engine in enumerate(self.engines):
                before_s = engine.due_s
                engine.wake(self.now_s)
                if engine.due_s != before_s:
                    self._watch(place)
        if self._next_tick_s < NEVER:
            self._tick()

    def _tick(self) -> None:
        """Look at the held requests again."""
        self._look()
        for queue, router in zip(self._queues, self._routers, strict=True):
            if len(queue):
                queue.wake(self.now_s, self._peek(router), self._send)
        is_waiting = any(len(queue) for queue in self._queues)
        self._next_tick_s = self.now_s + _HOLD_TICK_S if is_waiting else NEVER

    def _peek(self, router: VirtualRouter) -> Callable[[int], Decision | None]:
        return lambda index: router.decide(self._asked[index], self.now_s)

    def _send(self, index: int, end: HoldEnd) -> None:
        del end
        self._route(self._asked[index], can_hold=False)

    def _fail(self, place: int, down_s: float) -> None:
        """Let a replica restart with an empty cache; what it had goes again."""
        name = self._names[place]
        lost = self.engines[place].drain(self.now_s)
        self._news.append((self.now_s + self._settings.event_delay_s, name, None))
        for router in self._routers:
            router.down.add(name)
        for job in lost:
            taken = self._taken.pop(job.index)
            self._routers[job.index % len(self._routers)].lose(taken)
        for router in self._routers:
            router.forget(name)
        heapq.heappush(self._ups, (self.now_s + down_s, place))
        for job in lost:
            self._route(self._asked[job.index])

    def _bring_up(self, place: int) -> None:
        for router in self._routers:
            router.down.discard(self._names[place])

    def _finish(self, job: Job, taken: Taken) -> None:
        asked = self._asked.pop(job.index)
        del self._taken[job.index]
        request, decision = asked.request, taken.decision
        first_s = job.first_s if job.first_s is not None else self.now_s
        self.outcomes[job.index] = self._outcome(
            job.index,
            request,
            decision.replica,
            reason=decision.reason.value,
            predicted_cached_tokens=decision.predicted_cached_tokens,
            cached_tokens=job.cached_tokens,
            fetched_tokens=job.fetched_tokens,
            held_s=taken.sent_s - request.arrival_s,
            ttft_s=first_s - request.arrival_s,
            duration_s=self.now_s - request.arrival_s,
            preemptions=job.preemptions,
        )

    def _outcome(self, index: int, request: TraceRequest, replica: str, **more: object) -> Outcome:
        return Outcome(
            ordinal=index,
            line=request.line,
            arrival_s=request.arrival_s,
            prompt_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens,
            replica=replica,
            session=request.session,
            tenant=request.tenant,
            prefix=self._sharing.prefix(request),
            **more,  # type: ignore[arg-type]
        )
