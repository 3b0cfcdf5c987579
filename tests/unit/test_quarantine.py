"""Requests that replicas died of."""

from __future__ import annotations

from router.quarantine import ONE_DEATH_S, SUSPECT_S, Quarantine, QuarantineSettings
from state.model import ReplicaId

A, B, C = (ReplicaId(name) for name in "abc")
PATH = "/v1/chat/completions"
POISON, OTHER = b'{"poison":1}', b'{"other":12}'
assert len(POISON) == len(OTHER)


class Rig:
    def __init__(self, settings: QuarantineSettings | None = None) -> None:
        self.table = Quarantine(settings or QuarantineSettings(), b"s" * 32)
        self.now_s = 100.0

    def kill(self, replica: ReplicaId, *bodies: bytes) -> None:
        for body in bodies:
            self.table.suspect(replica, self.table.key(PATH, body), self.now_s)
        self.table.died(replica, self.now_s)

    def left_s(self, body: bytes = POISON) -> float | None:
        return self.table.left_s(PATH, body, self.now_s)


def test_a_request_with_two_deaths_is_refused_for_a_while() -> None:
    """C-25."""
    rig = Rig()
    rig.kill(A, POISON)
    assert rig.left_s() is None
    rig.now_s += 10.0
    rig.kill(B, POISON)
    assert rig.left_s() == 600.0
    assert rig.left_s(OTHER) is None
    assert rig.table.left_s("/v1/completions", POISON, rig.now_s) is None
    assert rig.table.convicts == 1
    rig.now_s += 600.0
    assert rig.left_s() is None
    assert not rig.table.marked


def test_one_death_counts_once_however_often_it_is_noticed() -> None:
    rig = Rig()
    rig.kill(A, POISON)
    rig.kill(A, POISON)
    assert rig.left_s() is None
    rig.now_s += ONE_DEATH_S + 0.1  # it was started again, and died again
    rig.kill(A, POISON)
    assert rig.left_s() is not None


def test_what_shared_a_replica_with_the_culprit_is_cleared_when_it_ends_well() -> None:
    rig = Rig()
    rig.kill(A, POISON, OTHER)
    rig.table.clear(PATH, OTHER)
    rig.kill(B, POISON, OTHER)
    assert rig.left_s(POISON) is not None
    assert rig.left_s(OTHER) is None


def test_a_failure_long_before_the_death_is_not_of_it() -> None:
    rig = Rig()
    for replica in (A, B):
        rig.table.suspect(replica, rig.table.key(PATH, POISON), rig.now_s)
        rig.now_s += SUSPECT_S + 0.1
        rig.table.died(replica, rig.now_s)
    assert not rig.table.marked


def test_a_failure_without_a_death_is_nothing() -> None:
    rig = Rig()
    for replica in (A, B, C):
        rig.table.suspect(replica, rig.table.key(PATH, POISON), rig.now_s)
    assert rig.left_s() is None
    rig.now_s += SUSPECT_S + 0.1
    rig.table.tick(rig.now_s)
    rig.table.died(A, rig.now_s)
    assert not rig.table.marked


def test_deaths_far_from_each_other_do_not_add_up() -> None:
    rig = Rig()
    rig.kill(A, POISON)
    rig.now_s += 601.0
    rig.kill(B, POISON)
    assert rig.left_s() is None
    rig.kill(C, POISON)
    assert rig.left_s() is not None


def test_the_table_is_bounded_and_the_oldest_goes() -> None:
    rig = Rig(QuarantineSettings(requests=10))
    for number in range(1_000):
        rig.now_s += 1.0
        rig.kill(A, b"body %d" % number)
    assert len(rig.table.marked) == 10
    rig.now_s += 1_000.0
    rig.table.tick(rig.now_s)
    assert not rig.table.marked
    assert rig.table._lengths == {}


def test_it_can_be_turned_off() -> None:
    rig = Rig(QuarantineSettings(deaths=0))
    for replica in (A, B, C):
        rig.kill(replica, POISON)
    assert rig.left_s() is None


def test_digests_of_two_processes_have_nothing_in_common() -> None:
    first, second = Quarantine(QuarantineSettings(), b"1" * 32), Rig().table
    assert first.key(PATH, POISON).digest != second.key(PATH, POISON).digest
