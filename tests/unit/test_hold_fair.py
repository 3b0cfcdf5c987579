"""Tenants take turns in the router's queue by the tokens that they had computed."""

from __future__ import annotations

import pytest

from policies.fair import IDLE_KEPT, FairQueue
from policies.hold import HoldEnd, HoldQueue, HoldSettings
from policies.model import Decision, Reason
from policies.ordered import OrderedHeap
from state.model import ReplicaId

A = ReplicaId("a")


def order(queue: FairQueue[str]) -> list[str]:
    return list(queue)


def test_tenants_alternate_however_many_requests_one_of_them_has() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(4):
        queue.add(f"flood{number}", float(number), "flood", 100)
    for number in range(2):
        queue.add(f"victim{number}", 10.0 + number, "victim", 100)
    assert order(queue) == ["flood0", "victim0", "flood1", "victim1", "flood2", "flood3"]


def test_the_order_read_is_the_order_of_going() -> None:
    queue: FairQueue[str] = FairQueue()
    sizes = {"x": (300, 10, 70), "y": (100, 100, 1), "z": (50, 400)}
    for tenant, all_tokens in sizes.items():
        for number, tokens in enumerate(all_tokens):
            queue.add(f"{tenant}{number}", float(tokens), tenant, tokens)
    read = order(queue)
    gone = []
    while len(queue):
        gone.append(next(iter(queue)))
        queue.send(gone[-1])
    assert gone == read


def test_counters_weigh_tokens_not_requests() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.add("big0", 0.0, "big", 1_000)
    queue.add("big1", 0.0, "big", 1_000)
    for number in range(12):
        queue.add(f"small{number}", 1.0 + number, "small", 100)
    assert order(queue).index("big1") == 11


def test_within_a_tenant_and_among_equals_the_lowest_key_goes_first() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.add("x-late", 3.0, "x", 100)
    queue.add("y", 2.0, "y", 100)
    queue.add("x-early", 1.0, "x", 100)
    assert order(queue) == ["x-early", "y", "x-late"]


def test_a_tenant_that_comes_back_starts_at_the_least_of_those_that_wait() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(4):
        queue.add(f"x{number}", 0.0, "x", 100)
    for number in range(3):
        queue.send(f"x{number}")
    queue.add("y", 0.0, "y", 100)
    assert (queue.used_tokens("x"), queue.used_tokens("y")) == (300, 300)


def test_what_a_tenant_used_stays_a_debt_while_anybody_waits() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.add("x0", 0.0, "x", 500)
    queue.add("y0", 0.0, "y", 100)
    queue.send("x0")
    queue.add("x1", 0.0, "x", 500)
    assert queue.used_tokens("x") == 500
    assert order(queue) == ["y0", "x1"]
    queue.discard("x1")
    queue.discard("y0")
    assert queue.used_tokens("x") == 0


def test_requests_that_did_not_wait_count_while_others_do() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.charge("x", 900)
    assert queue.used_tokens("x") == 0
    queue.add("y", 0.0, "y", 100)
    queue.charge("x", 900)
    queue.charge("y", 50)
    assert (queue.used_tokens("x"), queue.used_tokens("y")) == (900, 50)


def test_who_leaves_pays_nothing() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.add("x", 0.0, "x", 500)
    queue.add("y", 0.0, "y", 500)
    queue.discard("x")
    queue.discard("never there")
    assert (queue.used_tokens("x"), len(queue)) == (0, 1)


def test_the_debts_of_idle_tenants_are_bounded() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.add("stays", 0.0, "y", 1)
    for number in range(IDLE_KEPT + 1):
        queue.charge(f"t{number}", 7)
    assert (queue.used_tokens("t0"), queue.used_tokens("t1")) == (0, 7)


@pytest.mark.parametrize(("is_fair", "most_wait_s"), [(True, 0.3), (False, 3.0)])
def test_a_flooding_tenant_does_not_make_the_others_wait(
    is_fair: bool,  # noqa: FBT001 - a case
    most_wait_s: float,
) -> None:
    """One replica, 100 ms a request: 100 short ones of one tenant, then 3 of another."""
    settings = HoldSettings(is_fair=is_fair, max_wait_s=100, ageing=0.0)
    queue: HoldQueue[str] = HoldQueue(settings)
    for number in range(100):
        queue.add(f"f{number}", A, work_ms=90, uncached_tokens=800, tenant="flood", now_s=0.0)
    for number in range(3):
        queue.add(f"v{number}", A, work_ms=100, uncached_tokens=800, tenant="victim", now_s=0.0)
    sent: list[str] = []
    is_free = False

    def peek(_: str) -> Decision:
        return Decision(
            replica=A,
            reason=Reason.PREFIX,
            predicted_cached_tokens=0,
            candidates=(),
            predicted_wait_ms=0.0 if is_free else 1_000.0,
        )

    def send(item: str, _: HoldEnd) -> None:
        nonlocal is_free
        is_free = False
        sent.append(item)

    for step in range(103):
        is_free = True
        queue.wake(step * 0.1, peek, send)
    assert len(sent) == 103
    first_wait_s = 0.1 * min(sent.index(f"v{number}") for number in range(3))
    last_wait_s = 0.1 * max(sent.index(f"v{number}") for number in range(3))
    if is_fair:
        assert last_wait_s <= 2 * most_wait_s
    else:
        assert first_wait_s > most_wait_s


def test_a_heap_that_lost_most_of_its_items_still_reads_in_order() -> None:
    heap: OrderedHeap[int] = OrderedHeap()
    for number in range(200):
        heap.put(number, (float(number * 7919 % 200),))
    for number in range(0, 200, 2):
        heap.discard(number)
    for number in range(1, 200, 4):
        heap.put(number, (-float(number),))
    keys = [heap.key_of(number) for number in heap]
    assert len(keys) == len(heap) == 100
    assert keys == sorted(keys)
