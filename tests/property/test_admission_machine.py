"""Admission under any sequence of arrivals, ends and departures: nothing leaks.

The real rules, queue and leases, on a loop whose time is virtual.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from policies.hold import HoldEnd, HoldQueue, HoldSettings
from router.admission_setting import Priority
from router.hold import REST_S
from router.shed import ShedError
from state.model import ReplicaId
from support.admitting import Desk, VirtualLoop

if TYPE_CHECKING:
    from support.admitting import Placed

REPLICAS = ["a", "b", "c"]
MODELS = {"x": ["a", "b"], "y": ["b", "c"], "": REPLICAS}


class AdmissionMachine(RuleBasedStateMachine):
    """I-6: what is in flight is what was admitted and has not ended; each is released once."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop()
        self.tasks: list[asyncio.Task[Placed]] = []
        self.number = 0

    @initialize(cap=st.integers(1, 6), per_replica=st.integers(1, 3), pending=st.integers(0, 5))
    def begin(self, cap: int, per_replica: int, pending: int) -> None:
        async def build() -> Desk:
            return Desk(
                REPLICAS,
                models=MODELS,
                max_inflight=cap,
                max_inflight_per_replica=per_replica,
                pending=pending,
                queue_timeout_s=60.0,
            )

        self.desk = self.loop.run_until_complete(build())

    def settle(self) -> None:
        """Let everybody go who can: a wake-up rests, and looks at a few at a time."""

        async def turn() -> None:
            for _ in range(3):
                self.desk.hold.wake()
                await asyncio.sleep(5 * REST_S)

        self.loop.run_until_complete(turn())

    @rule(
        model=st.sampled_from(sorted(MODELS)),
        tenant=st.sampled_from(["", "t", "u"]),
        tokens=st.integers(0, 5_000),
        priority=st.sampled_from(list(Priority)),
    )
    def arrive(self, model: str, tenant: str, tokens: int, priority: Priority) -> None:
        ask = self.desk.ask(
            str(self.number), model=model, tenant=tenant, tokens=tokens, priority=priority
        )
        self.number += 1
        self.tasks.append(self.loop.create_task(ask))
        self.settle()

    @precondition(lambda self: self.running())
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.loop.call_soon(self.desk.free, data.draw(st.sampled_from(self.running())))
        self.settle()

    @precondition(lambda self: self.asking())
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.asking())).cancel()
        self.settle()

    @rule(name=st.sampled_from(REPLICAS))
    def fall_or_rise(self, name: str) -> None:
        replica = ReplicaId(name)
        if replica not in self.desk.up:
            self.desk.up.append(replica)
        elif len(self.desk.up) > 2:
            self.desk.up.remove(replica)
        self.settle()

    def asking(self) -> list[asyncio.Task[Placed]]:
        return [task for task in self.tasks if not task.done()]

    def running(self) -> list[Placed]:
        ended = [task for task in self.tasks if task.done() and not task.cancelled()]
        placed = [task.result() for task in ended if task.exception() is None]
        return [one for one in placed if one.lease.outcome is None]

    @invariant()
    def counts_are_what_runs(self) -> None:
        if not hasattr(self, "desk"):
            return
        leases, admission = self.desk.leases, self.desk.admission
        running = self.running()
        assert leases.open_count == len(running) <= admission.cap
        by_replica = Counter(one.lease.replica for one in running)
        for name in map(ReplicaId, REPLICAS):
            assert 0 <= leases.inflight(name) == by_replica[name] <= (admission.limit(name) or 0)

    @invariant()
    def whoever_neither_runs_nor_ended_waits(self) -> None:
        if hasattr(self, "desk"):
            assert len(self.desk.hold) == len(self.asking()) <= self.desk.settings.pending
            for task in self.tasks:
                if task.done() and not task.cancelled() and task.exception() is not None:
                    assert isinstance(task.exception(), ShedError)

    @invariant()
    def nobody_waits_for_a_place_that_is_there(self) -> None:
        if hasattr(self, "desk"):
            desk = self.desk
            for held in desk.hold._queue.candidates():
                assert desk.admission.blocked(held.routed) is not None

    def teardown(self) -> None:
        if hasattr(self, "desk"):
            while self.running() or self.asking():
                for placed in self.running():
                    self.loop.call_soon(self.desk.free, placed)
                self.settle()
            assert self.desk.leases.open_count == 0
            assert len(self.desk.hold) == 0
            assert len(set(self.desk.sent)) == len(self.desk.sent), "each was sent once"
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()


TestAdmission = AdmissionMachine.TestCase
TestAdmission.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 4_000)), min_size=30, max_size=200)
)
def test_tenants_that_wait_all_the_time_get_equal_shares_of_tokens(
    asked: list[tuple[str, int]],
) -> None:
    """Within the largest request of each other, as long as all of them have something waiting."""
    queue: HoldQueue[int] = HoldQueue(HoldSettings())
    left = Counter(tenant for tenant, _ in asked)
    for number, (tenant, tokens) in enumerate(asked):
        queue.add(
            number, "*", work_ms=1.0, uncached_tokens=tokens, tenant=tenant, now_s=float(number)
        )
    most, got = max(tokens for _, tokens in asked), Counter[str]()
    tenants = set(left)
    while all(left[tenant] for tenant in tenants):
        number = next(iter(queue.candidates()))
        tenant, tokens = asked[number]
        sent: list[int] = []

        def send(item: int, _: HoldEnd, sent: list[int] = sent) -> None:
            sent.append(item)

        queue.drain(send, lambda item, number=number: item != number)  # type: ignore[misc]
        assert sent == [number]
        left[tenant] -= 1
        got[tenant] += tokens
        shares = [got[each] for each in tenants]
        assert max(shares) - min(shares) <= most
