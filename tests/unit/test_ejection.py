"""Who is ejected, for how long, and how they come back: a state machine with a clock of its own."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from router.ejection import Cause, Ejection, EjectionSettings, Turn
from state.model import ReplicaId

if TYPE_CHECKING:
    from collections.abc import Sequence

FLEET = [ReplicaId(f"r{number}") for number in range(4)]
R, OTHER = FLEET[0], FLEET[1]


@dataclass
class Rig:
    """An ejection table, and what it told."""

    settings: EjectionSettings = field(default_factory=lambda: EjectionSettings(jitter=0.0))
    peers: Sequence[ReplicaId] = tuple(FLEET)
    now_s: float = 1_000.0
    told: list[tuple[ReplicaId, Turn, Cause | None, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.table = Ejection(self.settings, random.Random(1), self.tell)

    def tell(self, *turn: Any) -> None:
        self.told.append(turn)

    def fail(self, replica: ReplicaId = R, times: int = 5) -> None:
        for _ in range(times):
            self.table.failed(replica, self.peers, self.now_s)

    def wait(self, for_s: float, down: Sequence[ReplicaId] = ()) -> None:
        self.now_s += for_s
        self.table.tick(self.now_s, self.peers, down)

    def pass_probation(self, replica: ReplicaId = R) -> None:
        self.table.succeeded(replica, self.now_s)

    @property
    def ejections_s(self) -> list[float]:
        return [for_s for _, turn, _, for_s in self.told if turn is Turn.EJECTED]


def test_five_failures_in_a_row_eject_for_thirty_seconds() -> None:
    rig = Rig()
    rig.fail(times=4)
    assert rig.table.may_take(R)
    rig.fail(times=1)
    assert not rig.table.may_take(R)
    assert rig.told == [(R, Turn.EJECTED, Cause.FAILURES, 30.0)]
    rig.wait(29.9)
    assert not rig.table.may_take(R)
    rig.wait(0.1)
    assert rig.table.may_take(R)
    assert rig.told[-1][1] is Turn.PROBATION


def test_a_success_between_begins_the_count_anew() -> None:
    rig = Rig()
    rig.fail(times=4)
    rig.table.succeeded(R, rig.now_s)
    rig.fail(times=4)
    assert rig.table.may_take(R)


def test_failures_far_from_each_other_are_no_run() -> None:
    rig = Rig()
    for _ in range(10):
        rig.fail(times=1)
        rig.wait(61.0)
    assert rig.told == []


def test_probation_admits_one_request_at_a_time() -> None:
    """A50: of 50 that come together one is let through."""
    rig = Rig()
    rig.fail()
    rig.wait(30.0)
    admitted = [rig.table.enter(R) for _ in range(50) if rig.table.may_take(R)]
    assert len(admitted) == 1
    assert admitted[0] is not None
    admitted[0].end()
    admitted[0].end()
    assert rig.table.may_take(R)
    assert rig.table.enter(R) is not None
    assert not rig.table.may_take(R)


def test_a_success_ends_probation_and_a_failure_ejects_for_longer() -> None:
    rig = Rig()
    rig.fail()
    rig.wait(30.0)
    rig.fail(times=1)
    assert rig.told[-1] == (R, Turn.EJECTED, Cause.PROBATION, 60.0)
    rig.wait(60.0)
    rig.pass_probation()
    assert [turn for _, turn, _, _ in rig.told][-1] is Turn.BACK
    assert rig.table.enter(R) is None
    assert rig.table.may_take(R)


def test_a_late_success_does_not_end_an_ejection() -> None:
    rig = Rig()
    rig.fail()
    rig.table.succeeded(R, rig.now_s)
    assert not rig.table.may_take(R)


def test_ejections_grow_to_five_minutes_and_no_further() -> None:
    rig = Rig()
    rig.fail()
    for _ in range(12):
        rig.wait(300.0)
        rig.fail(times=1)
    assert rig.ejections_s[:4] == [30.0, 60.0, 90.0, 120.0]
    assert rig.ejections_s[-1] == max(rig.ejections_s) == 300.0


def test_jitter_only_shortens() -> None:
    rig = Rig(EjectionSettings(jitter=0.1))
    for replica in FLEET[:2]:
        rig.fail(replica)
    first_s, second_s = rig.ejections_s
    assert first_s != second_s
    assert all(27.0 <= each <= 30.0 for each in rig.ejections_s)


def test_time_in_good_health_forgets_one_ejection_at_a_time() -> None:
    rig = Rig()
    rig.fail()
    rig.wait(30.0)
    rig.fail(times=1)
    rig.wait(60.0)
    rig.pass_probation()
    rig.wait(60.0)
    rig.fail()
    assert rig.ejections_s == [30.0, 60.0, 60.0]
    rig.wait(60.0)
    rig.pass_probation()
    rig.wait(300.0)
    assert rig.table.records == {}


def test_time_in_bad_health_forgets_nothing() -> None:
    rig = Rig()
    rig.fail()
    rig.wait(30.0)
    rig.pass_probation()
    for _ in range(10):
        rig.wait(60.0, down=[R])
    rig.fail()
    assert rig.ejections_s == [30.0, 60.0]


def test_a_replica_that_falls_again_and_again_is_out_for_longer_and_longer() -> None:
    """The first fall is free: the checks bring a replica back that was restarted."""
    rig = Rig()
    rig.table.fell(R, rig.peers, rig.now_s)
    assert rig.told == []
    for _ in range(12):
        rig.wait(2.0)
        rig.table.fell(R, rig.peers, rig.now_s)
        until_s = rig.table.until_s(R)
        assert until_s is not None
        rig.wait(until_s - rig.now_s)
        rig.pass_probation()
    assert rig.ejections_s[:4] == [30.0, 60.0, 90.0, 120.0]
    assert rig.ejections_s[-1] == 300.0
    assert {cause for _, turn, cause, _ in rig.told if turn is Turn.EJECTED} == {Cause.FLAPPING}


def test_falls_far_from_each_other_are_no_flapping() -> None:
    rig = Rig()
    for _ in range(5):
        rig.table.fell(R, rig.peers, rig.now_s)
        rig.wait(61.0)
    assert rig.told == []


def test_no_more_than_half_of_the_fleet_is_held() -> None:
    rig = Rig()
    for replica in FLEET:
        rig.fail(replica, times=20)
    assert sum(map(rig.table.is_held, FLEET)) == 2


@pytest.mark.parametrize("count", [1])
def test_the_only_replica_is_never_ejected(count: int) -> None:
    rig = Rig(peers=FLEET[:count])
    rig.fail(times=50)
    assert rig.told == []


def test_when_others_leave_those_come_back_first_whose_time_is_over_first() -> None:
    rig = Rig()
    rig.fail(R)
    rig.wait(1.0)
    rig.fail(OTHER)
    rig.peers = [R, OTHER]
    rig.wait(1.0)
    assert rig.table.may_take(R)
    assert not rig.table.may_take(OTHER)


def test_another_process_begins_without_failures() -> None:
    rig = Rig()
    rig.fail(times=4)
    rig.table.restarted(R)
    rig.fail(times=4)
    assert rig.table.may_take(R)


def test_a_replica_that_left_is_forgotten() -> None:
    rig = Rig()
    rig.fail()
    probe = rig.table.enter(R)
    rig.table.forget(R)
    assert probe is not None
    probe.end()
    assert rig.table.may_take(R)
    assert rig.table.records == {}
