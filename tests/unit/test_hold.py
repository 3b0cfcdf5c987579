"""The router-side queue: who waits, who goes first, who goes when."""

from __future__ import annotations

import pytest

from policies.hold import LOOKS, HoldEnd, HoldQueue, HoldSettings
from policies.model import Decision, Reason
from state.model import ReplicaId

A, B = ReplicaId("a"), ReplicaId("b")


def decided(replica: ReplicaId = A, wait_ms: float | None = 0.0) -> Decision:
    return Decision(
        replica=replica,
        reason=Reason.PREFIX,
        predicted_cached_tokens=0,
        candidates=(),
        predicted_wait_ms=wait_ms,
    )


class Rig:
    """A queue of named requests; ``waits_ms`` is each replica's backlog, ``picks`` who wants whom.

    Each request that goes adds ``work_ms`` to the backlog of its replica.
    """

    def __init__(self, settings: HoldSettings | None = None, work_ms: float = 1_000.0) -> None:
        self.queue: HoldQueue[str] = HoldQueue(settings or HoldSettings(enabled=True))
        self.work_ms = work_ms
        self.waits_ms = {A: 1_000.0, B: 1_000.0}
        self.picks: dict[str, ReplicaId] = {}
        self.sent: list[str] = []
        self.ends: list[HoldEnd] = []
        self.looked: list[str] = []

    def add(
        self,
        item: str,
        work_ms: float = 100.0,
        *,
        replica: ReplicaId = A,
        tenant: str = "",
        tokens: int = 800,
        now_s: float = 0.0,
    ) -> None:
        self.picks[item] = replica
        self.queue.add(
            item, replica, work_ms=work_ms, uncached_tokens=tokens, tenant=tenant, now_s=now_s
        )

    def wake(self, now_s: float = 0.0) -> list[str]:
        """Return what this wake-up sends."""
        before = len(self.sent)
        self.queue.wake(now_s, self.peek, self.send)
        return self.sent[before:]

    def peek(self, item: str) -> Decision | None:
        self.looked.append(item)
        replica = self.picks[item]
        return decided(replica, self.waits_ms[replica])

    def send(self, item: str, end: HoldEnd) -> None:
        self.sent.append(item)
        self.ends.append(end)
        self.waits_ms[self.picks[item]] += self.work_ms


def test_who_would_wait_longer_than_the_limit_is_to_wait() -> None:
    queue = Rig(HoldSettings(release_ms=300)).queue
    assert not queue.takes(decided(wait_ms=300.0))
    assert queue.takes(decided(wait_ms=300.1))


def test_who_arrives_at_a_replica_that_others_wait_for_waits_for_its_turn() -> None:
    rig = Rig()
    rig.add("first")
    assert rig.queue.takes(decided(A, wait_ms=0.0))
    assert not rig.queue.takes(decided(B, wait_ms=0.0))
    rig.waits_ms[A] = 0.0
    rig.wake()
    assert not rig.queue.takes(decided(A, wait_ms=0.0))


def test_a_policy_that_tells_no_wait_holds_nobody() -> None:
    rig = Rig()
    rig.add("first")
    assert not rig.queue.takes(decided(A, wait_ms=None))


def test_the_shortest_prefill_goes_first_and_one_place_is_given_once() -> None:
    rig = Rig()
    for item, work_ms in (("long", 900.0), ("short", 100.0), ("middle", 500.0)):
        rig.add(item, work_ms)
    assert rig.wake() == []
    rig.waits_ms[A] = 200.0
    assert rig.wake() == ["short"]
    rig.waits_ms[A] = -2_000.0
    assert rig.wake() == ["middle", "long"]
    assert rig.ends == [HoldEnd.RELEASED] * 3
    assert len(rig.queue) == 0


@pytest.mark.parametrize(("later_s", "order"), [(4.9, ["young", "old"]), (5.1, ["old", "young"])])
def test_a_waiting_second_is_worth_a_tenth_of_a_second_of_prefill(
    later_s: float, order: list[str]
) -> None:
    rig = Rig(HoldSettings(ageing=0.1), work_ms=0.0)
    rig.add("old", 1_000.0, now_s=0.0)
    rig.add("young", 500.0, now_s=later_s)
    assert list(rig.queue.candidates()) == order
    rig.waits_ms[A] = 0.0
    assert rig.wake(later_s) == order


def test_after_the_longest_wait_a_request_goes_whatever_the_backlog() -> None:
    rig = Rig(HoldSettings(max_wait_s=10))
    rig.add("old", now_s=0.0)
    rig.add("young", now_s=1.0)
    assert rig.queue.next_due_s() == 10.0
    assert rig.wake(9.99) == []
    assert rig.wake(10.0) == ["old"]
    assert rig.ends == [HoldEnd.TIMED_OUT]
    assert rig.queue.next_due_s() == 11.0


def test_a_request_goes_elsewhere_as_soon_as_another_replica_is_the_better_one() -> None:
    rig = Rig()
    rig.add("first")
    rig.picks["first"] = B
    rig.waits_ms[B] = 0.0
    assert rig.wake() == ["first"]


def test_a_request_that_changed_its_mind_waits_for_the_other_replica() -> None:
    rig = Rig()
    rig.add("first")
    rig.picks["first"] = B
    rig.wake()
    assert rig.queue.takes(decided(B, wait_ms=0.0))
    assert not rig.queue.takes(decided(A, wait_ms=0.0))


def test_a_request_without_a_choice_goes_to_learn_why() -> None:
    rig = Rig()
    rig.add("first")
    rig.queue.wake(0.0, lambda _: None, rig.send)
    assert rig.sent == ["first"]


def test_many_that_wait_for_one_replica_do_not_hide_the_one_whose_replica_is_free() -> None:
    rig = Rig()
    for number in range(100):
        rig.add(f"a{number}", 1.0)
    rig.add("b", 9_000.0, replica=B)
    rig.waits_ms[B] = 0.0
    assert rig.wake() == ["b"]


def test_a_wake_up_looks_at_a_bounded_number_of_requests() -> None:
    rig = Rig(HoldSettings(max_queue=1_000))
    for number in range(1_000):
        rig.add(str(number))
    rig.wake()
    assert len(rig.looked) == LOOKS
    rig.looked.clear()
    rig.waits_ms[A], rig.work_ms = 0.0, 0.0
    rig.wake()
    assert len(rig.sent) == LOOKS


def test_the_queue_is_full_at_its_bound() -> None:
    rig = Rig(HoldSettings(max_queue=2))
    rig.add("one")
    assert not rig.queue.is_full
    rig.add("two")
    assert rig.queue.is_full
    rig.queue.remove("one")
    assert not rig.queue.is_full


def test_who_leaves_is_gone_once_and_for_free() -> None:
    rig = Rig()
    rig.add("one", tenant="x")
    rig.add("two", tenant="x")
    assert rig.queue.remove("one")
    assert not rig.queue.remove("one")
    assert rig.queue.used_tokens("x") == 0
    rig.waits_ms[A] = -5_000.0
    assert rig.wake() == ["two"]


def test_an_item_waits_once() -> None:
    rig = Rig()
    rig.add("one")
    with pytest.raises(ValueError, match="waits already"):
        rig.add("one")


def test_a_drain_sends_everything_in_order() -> None:
    rig = Rig()
    rig.add("long", 900.0)
    rig.add("short", 100.0)
    rig.queue.drain(rig.send)
    assert rig.sent == ["short", "long"]
    assert set(rig.ends) == {HoldEnd.DRAINED}
    assert (len(rig.queue), rig.queue.next_due_s()) == (0, None)
