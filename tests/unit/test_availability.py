"""Who is offered to the policy: ejection, panic, back-pressure and slow start on one fleet."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, cast

import pytest

from router.availability import Availability, Standing
from router.config import StaticReplica
from router.ejection import EjectionSettings
from router.error import ReplicaBusyError, ReplicaClosedError, ReplicaConnectTimeoutError
from router.fleet import FleetTable
from router.panic import Count, Panic
from state.lease import LeaseBook, Outcome
from state.memory import MemoryState
from state.model import ReplicaId, RouterId
from support.verdicts import answer

if TYPE_CHECKING:
    from collections.abc import Sequence

NAMES = [ReplicaId(f"r{number}") for number in range(4)]
R0, R1, R2, R3 = NAMES


class Checks:
    """Health as a test says it is."""

    def __init__(self) -> None:
        self.down: set[ReplicaId] = set()
        self.silent: set[ReplicaId] = set()
        self.is_late = False

    def is_up(self, replica: ReplicaId) -> bool:
        return replica not in self.down

    def is_answering(self, replica: ReplicaId) -> bool:
        return replica not in self.silent

    def served_models(self, _: ReplicaId) -> frozenset[str]:
        return frozenset({"m"})

    def why_down(self, _: ReplicaId) -> str:
        return "failed its checks"

    def was_late(self, _: float) -> bool:
        return self.is_late


class Rig:
    """Four replicas of one model."""

    def __init__(
        self, ramp_s: float = 30.0, age_s: float = 100.0, down: Sequence[ReplicaId] = ()
    ) -> None:
        self.now_s = 1_000.0
        self.checks = Checks()
        self.checks.down = set(down)
        reader = MemoryState(clock=lambda: 0.0).reader(RouterId("me"))
        configured = [StaticReplica(url=f"http://127.0.0.1:{9_000 + i}", name=name)
                      for i, name in enumerate(NAMES)]  # fmt: skip
        self.fleet = FleetTable(reader, configured)
        self.leases = LeaseBook()
        self.table = Availability(
            self.fleet,
            cast("Any", self.checks),
            self.leases,
            EjectionSettings(jitter=0.0, failures=3),
            ramp_s=ramp_s,
            clock=lambda: self.now_s,
            rng=random.Random(1),
        )
        self.table.look()
        self.wait(age_s)

    def wait(self, for_s: float) -> None:
        self.now_s += for_s
        self.table.look()

    def offered(self, *tried: ReplicaId) -> list[ReplicaId]:
        return [member.replica for member in self.table.candidates("m", tried)]

    def fail(self, *replicas: ReplicaId, times: int = 3) -> None:
        members = self.fleet.members()
        for replica in replicas:
            for _ in range(times):
                self.table.failed(members[replica], ReplicaClosedError("gone"))

    def answer(
        self, replica: ReplicaId, status: int = 200, retry_after_s: int | None = None
    ) -> None:
        self.table.answered(self.fleet.members()[replica], answer(status, retry_after_s))

    def turn(self, *down: ReplicaId, silent: Sequence[ReplicaId] = ()) -> None:
        self.checks.down, self.checks.silent = set(down), set(silent)
        self.table.look()

    def states(self) -> list[Standing]:
        return [self.table.standing(name).standing for name in NAMES]

    def load(self, replica: ReplicaId, count: int) -> None:
        for _ in range(count):
            self.leases.acquire(replica, 1, self.now_s)


def test_a_calm_fleet_is_offered_whole() -> None:
    rig = Rig()
    assert rig.table.is_calm
    assert not rig.table.records
    assert rig.offered() == NAMES
    assert rig.offered(R1) == [R0, R2, R3]
    assert rig.table.enter(R0) is None


def test_an_ejected_replica_is_offered_to_nobody_and_then_to_one() -> None:
    """A50: what it holds does not matter: it is no candidate."""
    rig = Rig(ramp_s=0.0)
    rig.fail(R0)
    assert rig.offered() == [R1, R2, R3]
    standing = rig.table.standing(R0)
    assert (standing.standing, standing.reason, standing.left_s) == (
        Standing.EJECTED, "failures", 30.0,
    )  # fmt: skip
    rig.wait(30.0)
    assert rig.states()[0] is Standing.PROBATION
    probes = [rig.table.enter(R0) for _ in range(50) if R0 in rig.offered()]
    assert len(probes) == 1
    assert probes[0] is not None
    probes[0].end()
    rig.answer(R0)
    assert rig.offered() == NAMES
    rig.wait(1.0)
    assert rig.states()[0] is Standing.UP
    rig.wait(200.0)
    assert rig.table.is_calm


def test_a_bad_request_ejects_nobody_and_ends_no_probation() -> None:
    """A55, F11: neither good nor bad, however many there are."""
    rig = Rig()
    for status in (400, 401, 404, 413, 422):
        for _ in range(20):
            rig.answer(R0, status)
    assert rig.states() == [Standing.UP] * 4
    rig.fail(R0)
    rig.wait(30.0)
    rig.answer(R0, 400)
    assert rig.states()[0] is Standing.PROBATION


def test_a_busy_replica_is_passed_over_while_others_have_room() -> None:
    rig = Rig()
    for _ in range(50):
        rig.answer(R0, 503)
    assert rig.offered() == [R1, R2, R3]
    assert rig.states()[0] is Standing.BACK_PRESSURE
    rig.wait(1.0)
    assert rig.offered() == NAMES
    rig.table.failed(rig.fleet.members()[R1], ReplicaBusyError(429, 7))
    rig.wait(6.9)
    assert rig.offered() == [R0, R2, R3]
    rig.wait(0.1)
    assert rig.table.is_calm


def test_where_all_are_busy_all_are_offered() -> None:
    rig = Rig()
    for name in NAMES:
        rig.answer(name, 429, 30)
    assert rig.offered() == NAMES


def test_a_promise_of_hours_is_not_believed() -> None:
    rig = Rig()
    rig.answer(R0, 503, 86_400)
    rig.wait(61.0)
    assert rig.offered() == NAMES


def test_below_half_all_that_answer_are_used_until_it_was_enough_for_a_while() -> None:
    """C-05: also those that fail their checks; not those that nobody reaches."""
    rig = Rig(ramp_s=0.0)
    rig.turn(R0, R1)
    assert rig.offered() == [R2, R3]
    rig.turn(R0, R1, R2, silent=[R0])
    assert rig.table.short_models
    assert rig.offered() == [R1, R2, R3]
    rig.turn(R0, R1, silent=[R0])
    rig.wait(4.9)
    assert rig.offered() == [R1, R2, R3]
    rig.wait(0.1)
    assert rig.offered() == [R2, R3]
    assert rig.table.panics == 1


def test_ejections_count_against_what_is_available() -> None:
    rig = Rig(ramp_s=0.0)
    rig.turn(R0, silent=[R0])
    rig.fail(R1, R2)
    assert rig.offered() == [R1, R2, R3]
    rig.turn()
    rig.wait(10.0)
    assert rig.offered() == [R0, R3]


def test_where_none_passes_its_checks_there_is_nobody() -> None:
    """A53."""
    rig = Rig()
    rig.turn(*NAMES)
    assert rig.offered() == []
    assert not rig.table.short_models


def test_replicas_that_never_came_are_no_reason_to_panic() -> None:
    """A54: 1 of 4 is there at the start, and enough; one that comes later warms up."""
    rig = Rig(down=[R1, R2, R3])
    assert rig.offered() == [R0]
    assert not rig.table.short_models
    rig.turn(R2, R3)
    assert rig.states()[:2] == [Standing.UP, Standing.SLOW_START]


def test_one_good_replica_of_two_is_no_panic() -> None:
    panic = Panic(0.5, 5.0)
    assert panic.look({"m": Count(2, 1, 1)}, 0.0) == []
    assert panic.look({"m": Count(3, 1, 1)}, 1.0) == [("m", True)]
    assert panic.look({"m": Count(3, 2, 2)}, 2.0) == []
    assert panic.look({"m": Count(3, 1, 1)}, 6.0) == []
    assert panic.look({"m": Count(3, 2, 2)}, 7.0) == []
    assert panic.look({"m": Count(3, 2, 2)}, 11.9) == []
    assert panic.look({"m": Count(3, 2, 2)}, 12.0) == [("m", False)]
    assert panic.look({"m": Count(3, 1, 1)}, 13.0) == [("m", True)]
    assert panic.look({}, 14.0) == [("m", False)]


def test_a_replica_that_came_back_gets_its_share_little_by_little() -> None:
    """A10, C-03: a part of what a warm one has, and one request at least."""
    rig = Rig()
    rig.turn(R0)
    for name in (R1, R2, R3):
        rig.load(name, 29)
    rig.turn()
    assert rig.states()[0] is Standing.SLOW_START
    sent = []
    for _ in range(60):
        rig.wait(0.5)
        while R0 in rig.offered():
            rig.load(R0, 1)
        sent.append(rig.leases.inflight(R0))
        if sent[-1] >= 29:
            break
    assert sent[0] == 1
    assert sent == sorted(sent)
    assert 14 <= sent[29] <= 16
    assert 52 <= len(sent) < 60
    rig.wait(5.0)
    assert rig.states()[0] is Standing.UP
    rig.wait(60.0)
    assert rig.table.is_calm


def test_another_life_of_a_replica_warms_up_too() -> None:
    rig = Rig()
    rig.load(R1, 10)
    rig.table.restarted(R0)
    rig.load(R0, 1)
    assert rig.offered() == [R1, R2, R3]
    rig.wait(31.0)
    assert rig.offered() == NAMES


def test_where_all_are_cold_all_are_offered() -> None:
    """C-04: the first to come back are not held back for those that are still down."""
    rig = Rig()
    rig.turn(*NAMES)
    rig.turn(R2, R3)
    rig.load(R0, 10)
    assert rig.offered() == [R0, R1]


def test_those_that_were_there_when_the_router_began_are_warm() -> None:
    rig = Rig(age_s=0.0)
    assert rig.states() == [Standing.UP] * 4


def test_a_slow_connection_counts_only_where_this_process_was_on_time() -> None:
    """C-18."""
    rig = Rig()
    member = rig.fleet.members()[R0]
    rig.checks.is_late = True
    for _ in range(10):
        rig.table.failed(member, ReplicaConnectTimeoutError("late"))
    assert rig.states()[0] is Standing.UP
    rig.checks.is_late = False
    for _ in range(3):
        rig.table.failed(member, ReplicaConnectTimeoutError("late"))
    assert rig.states()[0] is Standing.EJECTED


def test_a_flapping_replica_is_ejected() -> None:
    """C-08."""
    rig = Rig()
    for _ in range(2):
        rig.turn(R0)
        assert rig.states()[0] is Standing.DOWN
        rig.wait(1.0)
        rig.turn()
    standing = rig.table.standing(R0)
    assert (standing.standing, standing.reason) == (Standing.EJECTED, "flapping")


def test_an_ejection_survives_no_departure() -> None:
    rig = Rig()
    rig.fail(R0)
    rig.table.forget(R0)
    assert rig.offered() == NAMES


@pytest.mark.parametrize("outcome", Outcome)
def test_leases_end_what_slow_start_counts(outcome: Outcome) -> None:
    rig = Rig()
    rig.table.restarted(R0)
    lease = rig.leases.acquire(R0, 1, rig.now_s)
    assert R0 not in rig.offered()
    lease.finish(outcome, rig.now_s)
    assert R0 in rig.offered()
