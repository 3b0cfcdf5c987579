"""The router's queue against the plainest model: a list, sorted anew for each turn."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from policies.hold import LOOKS, HoldEnd, HoldQueue, HoldSettings
from policies.model import Decision, Reason
from state.model import ReplicaId

REPLICAS = [ReplicaId(name) for name in "abc"]
TENANTS = ["", "x", "y", "z"]
MAX_WAIT_S = 10.0
MAX_QUEUE = 12
LIMIT_MS = 300.0


@dataclass
class Waiting:
    number: int
    key: float
    tenant: str
    tokens: int
    since_s: float


class HoldMachine(RuleBasedStateMachine):
    """What is added leaves once, in order, in time; counters are what was sent."""

    @initialize(is_fair=st.booleans(), ageing=st.sampled_from([0.0, 0.1, 2.0]))
    def begin(self, is_fair: bool, ageing: float) -> None:  # noqa: FBT001 - drawn
        self.settings = HoldSettings(
            is_fair=is_fair, ageing=ageing, max_wait_s=MAX_WAIT_S, max_queue=MAX_QUEUE
        )
        self.queue: HoldQueue[int] = HoldQueue(self.settings)
        self.waiting: dict[int, Waiting] = {}
        self.left: set[int] = set()
        self.used: dict[str, int] = {}
        self.waits_ms = dict.fromkeys(REPLICAS, 1_000.0)
        self.wants: dict[int, ReplicaId] = {}
        self.now_s = 0.0
        self.number = 0

    @precondition(lambda self: not self.queue.is_full)
    @rule(
        work_ms=st.sampled_from([1.0, 50.0, 400.0, 3_000.0]),
        tenant=st.sampled_from(TENANTS),
        tokens=st.integers(0, 5_000),
        replica=st.sampled_from(REPLICAS),
    )
    def add(self, work_ms: float, tenant: str, tokens: int, replica: ReplicaId) -> None:
        lane = tenant if self.settings.is_fair else ""
        active = {one.tenant for one in self.waiting.values()}
        if active and lane not in active:
            least = min(self.used.get(one, 0) for one in active)
            self.used[lane] = max(self.used.get(lane, 0), least)
        self.queue.add(
            self.number,
            replica,
            work_ms=work_ms,
            uncached_tokens=tokens,
            tenant=tenant,
            now_s=self.now_s,
        )
        key = work_ms / 1000 + self.settings.ageing * self.now_s
        one = Waiting(self.number, key, lane, max(1, tokens), self.now_s)
        self.waiting[self.number] = one
        self.wants[self.number] = replica
        self.number += 1

    @rule(tenant=st.sampled_from(TENANTS), tokens=st.integers(0, 5_000))
    def charge(self, tenant: str, tokens: int) -> None:
        self.queue.charge(tenant, tokens)
        if self.waiting:
            lane = tenant if self.settings.is_fair else ""
            self.used[lane] = self.used.get(lane, 0) + max(1, tokens)

    @rule(seconds=st.sampled_from([0.01, 1.0, 6.0]))
    def let_time_pass(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(replica=st.sampled_from(REPLICAS), wait_ms=st.sampled_from([-500.0, 0.0, 1_000.0]))
    def load(self, replica: ReplicaId, wait_ms: float) -> None:
        self.waits_ms[replica] = wait_ms

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), replica=st.sampled_from(REPLICAS))
    def change_mind(self, data: st.DataObject, replica: ReplicaId) -> None:
        self.wants[data.draw(st.sampled_from(sorted(self.waiting)))] = replica

    @rule(number=st.integers(0, 40))
    def leave(self, number: int) -> None:
        was_waiting = self.waiting.pop(number, None) is not None
        assert self.queue.remove(number) == was_waiting
        if was_waiting:
            self.left.add(number)
        self._forget()

    @rule()
    def wake(self) -> None:
        looked: list[int] = []
        sent: list[tuple[int, ReplicaId]] = []

        def peek(number: int) -> Decision:
            looked.append(number)
            replica = self.wants[number]
            return Decision(
                replica=replica,
                reason=Reason.PREFIX,
                predicted_cached_tokens=0,
                candidates=(),
                predicted_wait_ms=self.waits_ms[replica],
            )

        def send(number: int, end: HoldEnd) -> None:
            one, replica = self.waiting.pop(number), self.wants[number]
            self.left.add(number)
            is_due = self.now_s - one.since_s >= MAX_WAIT_S
            assert (end is HoldEnd.TIMED_OUT) == is_due
            if not is_due:
                assert end is HoldEnd.RELEASED
                assert self.waits_ms[replica] <= LIMIT_MS
                sent.append((number, replica))
            self.used[one.tenant] = self.used.get(one.tenant, 0) + one.tokens
            self.waits_ms[replica] += 400.0

        due = {n for n, one in self.waiting.items() if self.now_s - one.since_s >= MAX_WAIT_S}
        before = [] if due else self._order()  # what goes first for its age changes the turns
        self.queue.wake(self.now_s, peek, send)
        assert len(looked) <= LOOKS
        assert not due & self.waiting.keys(), "waited longer than it may"
        if before:
            for replica in REPLICAS:
                gone = [number for number, where in sent if where == replica]
                ranks = [before.index(number) for number in gone]
                assert ranks == sorted(ranks)
        self._forget()

    @rule()
    def drain(self) -> None:
        order, sent = self._order(), []
        self.queue.drain(lambda number, _: sent.append(number))
        assert sent == order
        self.left |= self.waiting.keys()
        self.waiting.clear()
        self._forget()

    @invariant()
    def counts(self) -> None:
        assert len(self.queue) == len(self.waiting) <= MAX_QUEUE
        assert self.queue.is_full == (len(self.waiting) == MAX_QUEUE)
        assert self.left.isdisjoint(self.waiting)
        assert self.left | self.waiting.keys() == set(range(self.number))
        for tenant in TENANTS:
            lane = tenant if self.settings.is_fair else ""
            assert self.queue.used_tokens(tenant) == self.used.get(lane, 0) >= 0

    @invariant()
    def is_in_order(self) -> None:
        assert list(self.queue.candidates()) == self._order()

    @invariant()
    def knows_who_is_due_next(self) -> None:
        due = [one.since_s + MAX_WAIT_S for one in self.waiting.values()]
        assert self.queue.next_due_s() == (min(due) if due else None)

    def _order(self) -> list[int]:
        """Serve all, one after the other: least used tenant, lowest key, first come."""
        used = dict(self.used)
        rest = sorted(self.waiting.values(), key=lambda one: (one.key, one.number))
        order = []
        while rest:
            turn = min(rest, key=lambda one: used.get(one.tenant, 0))
            order.append(turn.number)
            used[turn.tenant] = used.get(turn.tenant, 0) + turn.tokens
            rest.remove(turn)
        return order

    def _forget(self) -> None:
        if not self.waiting:
            self.used.clear()


TestHold = HoldMachine.TestCase
TestHold.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
