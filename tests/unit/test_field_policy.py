"""One decision at a time: affinity against load, and what may never count."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from policies.expected_ttft import ExpectedTtft
from policies.model import Decision, Reason, ReplicaView, RoutingRequest
from router.fleet import FleetTable
from state.lease import Outcome
from state.memory import MemoryState
from state.model import ChangeBatch, Generation, ReplicaId, ReplicaLoad, ReplicaRecord, RouterId
from state.prefix import namespace_of
from support.choosing import IDENTITY, Choosing, chain_for, prompt_for
from support.field_trace import OURS

if TYPE_CHECKING:
    from policies.union import AnyPolicy
    from router.chooser import Choice
    from router.fleet import Member
    from state.lease import Lease

NAMES = [ReplicaId(name) for name in "abcd"]
A, B, C, D = NAMES
LIFE = Generation("g")
PROMPT = range(2_000)
NEW = range(50_000, 54_000)

both = pytest.mark.parametrize("policy", OURS)


class Rig:
    """A router's chooser on a fleet in memory; all replicas are up but those in ``down``."""

    def __init__(self, policy: AnyPolicy) -> None:
        self.now_s = 100.0
        self.state = MemoryState(clock=lambda: 0.0)
        self.choosing = Choosing(self.state.reader(RouterId("me")), policy)
        self.table = FleetTable(self.state.reader(RouterId("me")), ())
        self.down: set[ReplicaId] = set()
        self.told: Counter[ReplicaId] = Counter()

    def is_up(self, replica: ReplicaId) -> bool:
        """Return whether health checks pass."""
        return replica not in self.down

    def served_models(self, replica: ReplicaId) -> frozenset[str]:
        """Return what the replica itself says: its record says it."""
        del replica
        return frozenset()

    async def register(self, *names: ReplicaId, load: ReplicaLoad | None = None) -> None:
        for name in names:
            record = ReplicaRecord(
                replica=name,
                endpoint=f"http://127.0.0.1:{1 + NAMES.index(name)}",
                generation=LIFE,
                identity=IDENTITY,
                page_tokens=16,
                sidecar=name,
            )
            await self.state.register(record)
            await self.state.heartbeat(record, load)

    async def tell(
        self, name: ReplicaId, *, stored: range | None = None, removed: range | None = None
    ) -> None:
        """Let the engine's events arrive."""
        self.told[name] += 1
        change = ChangeBatch(
            replica=name,
            generation=LIFE,
            namespace=namespace_of(IDENTITY),
            sequence=self.told[name],
            stored=chain_for(stored) if stored else (),
            removed=chain_for(removed) if removed else (),
        )
        await self.state.apply([change])

    def decode(self, name: ReplicaId, count: int) -> list[Lease]:
        """Let ``count`` requests have their first byte there, and go on."""
        leases = [
            self.choosing.know.leases.acquire(name, 1, self.choosing.now_s) for _ in range(count)
        ]
        for lease in leases:
            lease.first_byte(self.choosing.now_s)
        return leases

    def members(self) -> list[Member]:
        return self.table.candidates("m", self)

    def choose(self, tokens: range) -> Choice:
        return self.choosing.choose(prompt_for(tokens), self.members())

    def peek(self, tokens: range) -> Decision:
        routed = self.choosing.chooser.route(prompt_for(tokens))
        decision = self.choosing.chooser.peek(routed, self.members())
        assert decision is not None
        return decision


async def rig_of(policy: AnyPolicy, *names: ReplicaId) -> Rig:
    rig = Rig(policy)
    await rig.register(*(names or NAMES))
    return rig


def served(rig: Rig, tokens: range, seconds: float = 0.2) -> ReplicaId:
    """Let one request be answered; nobody else's time passes."""
    choice = rig.choose(tokens)
    choice.first_byte(rig.choosing.now_s)
    choice.finish(Outcome.DONE, had_first_byte=True, now_s=rig.choosing.now_s + seconds)
    return choice.member.replica


@both
async def test_a_saturated_holder_is_left_and_found_again_at_the_mean(policy: AnyPolicy) -> None:
    """A05: 40 in flight there and nothing elsewhere; then one more than elsewhere."""
    rig = await rig_of(policy)
    await rig.tell(A, stored=PROMPT)
    leases = rig.decode(A, 40)
    away = rig.peek(PROMPT)
    assert (away.replica != A, away.reason) == (True, Reason.SPILL)
    for lease in leases[11:]:
        lease.finish(Outcome.DONE, rig.choosing.now_s)
    for name in (B, C, D):
        rig.decode(name, 10)
    back = rig.peek(PROMPT)
    assert (back.replica, back.reason) == (A, Reason.PREFIX)


@both
async def test_a_session_returns_to_its_drained_replica_without_flapping(
    policy: AnyPolicy,
) -> None:
    """A05: the holder drains by one a second, and the session asks as often, for 80 s."""
    rig = await rig_of(policy)
    await rig.tell(A, stored=PROMPT)
    leases = rig.decode(A, 40)
    places, reasons, holders = [], [], {A}
    for _ in range(80):
        choice = rig.choose(PROMPT)
        places.append(choice.member.replica)
        reasons.append(choice.decision.reason)
        choice.first_byte(rig.choosing.now_s)
        if choice.member.replica not in holders:
            await rig.tell(choice.member.replica, stored=PROMPT)
            holders.add(choice.member.replica)
        rig.choosing.now_s += 1.0
        choice.finish(Outcome.DONE, had_first_byte=True, now_s=rig.choosing.now_s)
        if leases:
            leases.pop().finish(Outcome.DONE, rig.choosing.now_s)
    assert reasons[0] is Reason.SPILL
    assert A not in places[:20]
    assert A in places[40:]
    assert len(holders) <= 2, "the prefix is not scattered"
    turns = [second for second, (was, now) in enumerate(pairwise(reasons)) if was != now]
    assert all(sum(start <= at < start + 30 for at in turns) <= 2 for start in turns)


@both
async def test_a_replica_that_is_down_says_nothing_about_the_load_of_others(
    policy: AnyPolicy,
) -> None:
    """A11: one down with nothing in flight, three up with 20: they are even."""
    rig = await rig_of(policy)
    for name in (B, C, D):
        rig.decode(name, 20)
    await rig.tell(C, stored=PROMPT)
    rig.down.add(A)
    decision = rig.peek(PROMPT)
    assert (decision.replica, decision.reason) == (C, Reason.PREFIX)
    alone = await rig_of(policy, B, C, D)
    for name in (B, C, D):
        alone.decode(name, 20)
    await alone.tell(C, stored=PROMPT)
    assert alone.peek(PROMPT) == decision
    rig.down.clear()
    assert rig.peek(NEW).replica == A, "up again, it is the least loaded one"


@both
async def test_on_a_miss_what_runs_counts_and_not_how_often_one_was_chosen(
    policy: AnyPolicy,
) -> None:
    """B36, C36: few long streams on B and many short ones on A: A is free sooner."""
    rig = await rig_of(policy, A, B)
    rig.decode(B, 20)
    for number in range(40):
        tokens = range(100_000 + 1_000 * number, 100_000 + 1_000 * number + 500)
        assert served(rig, tokens) == A
    rig.decode(A, 3)
    decision = rig.peek(NEW)
    assert (decision.replica, decision.reason) == (A, Reason.LOAD)


@both
async def test_a_miss_goes_to_the_idle_replica_however_much_it_holds_of_others(
    policy: AnyPolicy,
) -> None:
    """C37: A is busy and holds nothing, B is idle and holds a lot."""
    rig = await rig_of(policy, A, B)
    await rig.tell(B, stored=range(100_000, 164_000))
    for number in range(5):
        tokens = range(200_000 + 4_000 * number, 204_000 + 4_000 * number)
        rig.choosing.choose(prompt_for(tokens), [rig.table.members()[A]])
    chosen = {rig.peek(range(1_000_000 + n, 1_004_000 + n)).replica for n in range(20)}
    assert chosen == {B}


@both
async def test_the_holder_wins_although_one_is_less_loaded_and_one_more(
    policy: AnyPolicy,
) -> None:
    """B38: 10, 2 and 3 in flight, the prefix on the third."""
    rig = await rig_of(policy, A, B, C)
    for name, count in ((A, 10), (B, 2), (C, 3)):
        rig.decode(name, count)
    await rig.tell(C, stored=PROMPT)
    decision = rig.peek(range(2_100))
    assert (decision.replica, decision.reason) == (C, Reason.PREFIX)


@both
async def test_one_outlier_does_not_end_the_affinity_of_the_others(policy: AnyPolicy) -> None:
    """C38: 400 in flight on one, and each of the others keeps its own session."""
    rig = await rig_of(policy)
    rig.decode(A, 400)
    for number, name in enumerate((B, C, D)):
        rig.decode(name, number + 1)
        await rig.tell(name, stored=range(10_000 * number, 10_000 * number + 1_100))
    for number, name in enumerate((B, C, D)):
        decision = rig.peek(range(10_000 * number, 10_000 * number + 1_200))
        assert (decision.replica, decision.reason) == (name, Reason.PREFIX)


@both
def test_equal_replicas_are_drawn_uniformly_in_any_order(policy: AnyPolicy) -> None:
    """B39: 1,000 decisions over 4 stay within 3 sigma, also where the fleet is told reversed."""
    fleet = tuple(ReplicaView(replica=name) for name in NAMES)
    got: Counter[ReplicaId] = Counter()
    for ordinal in range(1_000):
        asked = RoutingRequest(ordinal=ordinal, seed=7, prompt_tokens=4_000)
        decision, reversed_one = policy.pick(asked, fleet), policy.pick(asked, fleet[::-1])
        assert decision is not None
        assert reversed_one is not None
        assert decision.replica == reversed_one.replica
        got[decision.replica] += 1
    assert len(got) == 4
    assert all(abs(count - 250) <= 3 * (1_000 * 0.25 * 0.75) ** 0.5 for count in got.values())


async def test_a_long_prompt_counts_by_its_work_before_it_is_answered() -> None:
    """A03: 32,000 tokens are being computed on one of four, as was done on the others before."""
    rig = await rig_of(ExpectedTtft())
    for number in range(3):
        served(rig, range(1_000_000 * number, 1_000_000 * number + 32_000))
    busy = rig.choose(range(9_000_000, 9_032_000)).member.replica
    got: Counter[ReplicaId] = Counter()
    for number in range(12):
        tokens = range(100_000 + 1_000 * number, 100_000 + 1_000 * number + 500)
        got[rig.choose(tokens).member.replica] += 1
    assert busy not in got
    assert set(got.values()) == {4}


@both
async def test_a_fleet_that_reports_to_be_full_is_still_used_and_evenly(
    policy: AnyPolicy,
) -> None:
    """B35: the same stale report from everybody is no news about anybody."""
    rig = await rig_of(policy)
    await rig.register(*NAMES, load=ReplicaLoad(running=256, queued=500, kv_used_fraction=1.0))
    got: Counter[ReplicaId] = Counter()
    for number in range(100):
        tokens = range(100_000 + 1_000 * number, 100_000 + 1_000 * number + 500)
        got[rig.choose(tokens).member.replica] += 1
    assert all(22 <= got[name] <= 28 for name in NAMES)


@both
async def test_an_old_report_of_one_idle_replica_draws_no_herd(policy: AnyPolicy) -> None:
    """A09, B35: 200 requests between two polls; A reported nothing waiting, the others 4."""
    rig = await rig_of(policy)
    await rig.register(*NAMES, load=ReplicaLoad(running=0, queued=4))
    await rig.register(A, load=ReplicaLoad(running=0, queued=0))
    assert rig.peek(NEW).replica == A
    got: Counter[ReplicaId] = Counter()
    for number in range(200):
        tokens = range(100_000 + 1_000 * number, 100_000 + 1_000 * number + 500)
        got[rig.choose(tokens).member.replica] += 1
    assert max(got.values()) <= 1.3 * 50
    assert got[A] == max(got.values())


@both
async def test_what_events_tell_is_what_the_next_decision_sees(policy: AnyPolicy) -> None:
    """C33: stored, evicted and cleared, with nothing kept beside it; by two routers alike."""
    rig = await rig_of(policy)
    other = Choosing(rig.state.reader(RouterId("other")), policy)

    def seen() -> set[tuple[ReplicaId, int]]:
        routed = other.chooser.route(prompt_for(PROMPT))
        twin = other.chooser.peek(routed, rig.members())
        assert twin is not None
        decisions = (rig.peek(PROMPT), twin)
        return {(one.replica, one.predicted_cached_tokens) for one in decisions}

    await rig.tell(C, stored=PROMPT)
    assert seen() == {(C, 1_984)}
    await rig.tell(C, removed=range(1_024))
    assert {tokens for _, tokens in seen()} == {0}, "what follows a hole is no prefix"
    await rig.tell(C, stored=range(1_024))
    assert seen() == {(C, 1_984)}
    await rig.state.apply(
        [
            ChangeBatch(
                replica=C,
                generation=LIFE,
                namespace=namespace_of(IDENTITY),
                sequence=9,
                is_clear=True,
            )
        ]
    )
    assert {tokens for _, tokens in seen()} == {0}
