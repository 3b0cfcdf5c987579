"""Leases: counted while they live, ended once, never below zero."""

from __future__ import annotations

import math

import pytest

from state.lease import LeaseBook, Outcome, sum_leases
from state.model import LeaseTotals
from support.fleet_state import A, B


def test_a_lease_counts_from_acquire_to_finish() -> None:
    book = LeaseBook()
    lease = book.acquire(A, 500, now_s=0.0)
    assert book.totals() == {A: LeaseTotals(inflight=1, uncached_tokens=500, prefilling=1)}
    assert lease.first_byte()
    assert book.totals() == {A: LeaseTotals(inflight=1, uncached_tokens=0)}
    assert lease.finish(Outcome.DONE)
    assert (book.totals(), book.open_count, lease.outcome) == ({}, 0, Outcome.DONE)


@pytest.mark.parametrize("outcome", list(Outcome))
def test_a_lease_ends_once(outcome: Outcome) -> None:
    """F12, C06: a second finish or a late first byte changes nothing."""
    book = LeaseBook()
    other = book.acquire(A, 7, now_s=0.0)
    lease = book.acquire(A, 10, now_s=0.0)
    assert lease.finish(outcome)
    before = book.version
    assert not lease.finish(Outcome.FAILED)
    assert not lease.first_byte()
    assert (lease.outcome, book.version) == (outcome, before)
    assert book.totals() == {A: LeaseTotals(inflight=1, uncached_tokens=7, prefilling=1)}
    assert not other.first_byte() or not other.first_byte()


def test_a_replica_removed_and_added_again_starts_at_zero() -> None:
    """A25: the old life's leases end without touching the new one's counts."""
    book = LeaseBook()
    old = [book.acquire(A, 100, now_s=0.0) for _ in range(3)]
    book.forget(A)
    assert (book.inflight(A), book.open_count) == (0, 3)
    new = book.acquire(A, 5, now_s=1.0)
    for lease in old:
        lease.first_byte()
        assert lease.finish(Outcome.CANCELLED)
    assert book.totals() == {A: LeaseTotals(inflight=1, uncached_tokens=5, prefilling=1)}
    new.finish(Outcome.DONE)
    assert (book.inflight(A), book.uncached_tokens(A), book.open_count) == (0, 0, 0)


def test_a_long_request_counts_as_long_as_it_runs() -> None:
    """C08, A21: no clock ends a lease; only its owner does."""
    book = LeaseBook()
    lease = book.acquire(A, 1, now_s=0.0)
    book.acquire(B, 1, now_s=3600.0).finish(Outcome.DONE)
    assert book.inflight(A) == 1
    lease.finish(Outcome.DONE)
    assert book.inflight(A) == 0


def test_the_version_moves_with_every_change_and_only_then() -> None:
    book = LeaseBook()
    seen = [book.version]
    lease = book.acquire(A, 1, now_s=0.0)
    seen.append(book.version)
    lease.first_byte()
    seen.append(book.version)
    lease.finish(Outcome.DONE)
    seen.append(book.version)
    book.forget(A)
    seen.append(book.version)
    assert seen == sorted(set(seen))
    book.forget(A)
    book.totals()
    assert book.version == seen[-1]


def test_recent_assignments_fade_by_half_per_half_life() -> None:
    book = LeaseBook(half_life_s=10.0)
    for _ in range(4):
        book.acquire(A, 0, now_s=0.0).finish(Outcome.DONE)
    assert book.recent(A, now_s=0.0) == pytest.approx(4.0)
    assert book.recent(A, now_s=10.0) == pytest.approx(2.0)
    book.acquire(A, 0, now_s=20.0)
    assert book.recent(A, now_s=20.0) == pytest.approx(2.0)
    assert book.recent(A, now_s=-5.0) == pytest.approx(2.0)
    assert book.recent(B, now_s=0.0) == 0.0


def test_totals_of_several_routers_add_up() -> None:
    one = {A: LeaseTotals(inflight=1, uncached_tokens=10)}
    two = {A: LeaseTotals(inflight=2, uncached_tokens=5), B: LeaseTotals(inflight=1)}
    assert sum_leases([one, two]) == {
        A: LeaseTotals(inflight=3, uncached_tokens=15),
        B: LeaseTotals(inflight=1),
    }


def test_the_backlog_is_the_prefill_ahead_less_what_the_oldest_prompt_has_had() -> None:
    book = LeaseBook()
    first = book.acquire(A, 800, now_s=10.0, prefill_ms=100.0)
    book.acquire(A, 400, now_s=10.0, prefill_ms=50.0)
    assert book.load(A, 10.0).backlog_ms == 150.0
    assert book.load(A, 10.04).backlog_ms == pytest.approx(110.0)
    assert book.load(A, 10.04, speed=2.0).backlog_ms == pytest.approx(70.0)
    assert book.load(A, 11.0).backlog_ms == 50.0  # the first has not told yet
    first.first_byte(11.0)
    assert book.load(A, 11.0).backlog_ms == 50.0
    assert book.load(A, 11.02).backlog_ms == pytest.approx(30.0)


def test_a_prompt_whose_first_byte_comes_with_its_last_does_not_hold_up_the_count() -> None:
    book = LeaseBook()
    book.acquire(A, 800, now_s=0.0, prefill_ms=100.0, tells_first=False)
    book.acquire(A, 400, now_s=0.0, prefill_ms=50.0)
    assert book.load(A, 0.12).backlog_ms == pytest.approx(30.0)


def test_an_idle_replica_has_no_backlog_whatever_order_requests_end_in() -> None:
    book = LeaseBook()
    leases = [book.acquire(A, 8, now_s=0.0, prefill_ms=0.1 * n) for n in range(1, 30)]
    for lease in leases[::-1]:
        lease.finish(Outcome.CANCELLED, 1.0)
    assert book.load(A, 1.0).backlog_ms == 0.0
    assert book.totals(1.0) == {}


def test_the_time_that_requests_stay_is_learned_from_those_that_ended_well() -> None:
    book = LeaseBook()
    book.acquire(A, 8, now_s=0.0).finish(Outcome.FAILED, 50.0)
    assert book.load(A, 50.0).hold_s is None
    book.acquire(A, 8, now_s=0.0).finish(Outcome.DONE, 4.0)
    assert book.load(A, 50.0).hold_s == 4.0


def test_the_share_of_prefill_fades_over_two_minutes() -> None:
    book = LeaseBook()
    book.acquire(A, 8_000, now_s=0.0, prefill_ms=1_200.0)
    assert book.load(A, 0.0).prefill_load == pytest.approx(10.0)
    assert book.load(A, 120.0).prefill_load == pytest.approx(10.0 / math.e)
