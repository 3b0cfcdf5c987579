"""The learned limit against simulated replicas: where it settles, and what does not mislead it."""

from __future__ import annotations

import heapq
import itertools
from random import Random
from typing import TYPE_CHECKING

import pytest

from policies.limit import GROUP, IdleTimes, LearnedLimit

if TYPE_CHECKING:
    from collections.abc import Callable

SLOTS = 16
DECODE_MS = 1_000.0
OVERHEAD_MS = 20.0


class SlottedReplica:
    """Runs ``SLOTS`` requests at a time, first come first served; prefill, then a second's decode.

    As many requests are in flight as the limit lets in: there is always one more.
    """

    def __init__(self, limit: LearnedLimit, works_ms: Callable[[], float]) -> None:
        self.limit = limit
        self.works_ms = works_ms
        self.now_s = 0.0
        self.slowness = 1.0
        self.offered = 10_000
        self._events: list[tuple[float, int, str, tuple[float, float, int]]] = []
        self._ordinal = itertools.count()
        self._waiting: list[tuple[float, float, int]] = []
        self.inflight = self.running = 0
        self.rng = Random(1)

    def play(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        self._fill()
        while self._events and self._events[0][0] <= until_s:
            self.now_s, _, kind, sent = heapq.heappop(self._events)
            if kind == "token":
                work_ms, sent_s, inflight = sent
                ttft_ms = 1e3 * (self.now_s - sent_s)
                self.limit.succeed(work_ms, ttft_ms, inflight, self.now_s)
                self._later(DECODE_MS * self.slowness, "end", sent)
            else:
                self.running -= 1
                self.inflight -= 1
            self._fill()
        self.now_s = until_s

    def _fill(self) -> None:
        while self.inflight < min(self.limit.requests, self.offered):
            self.inflight += 1
            self._waiting.append((self.works_ms(), self.now_s, self.inflight))
        while self._waiting and self.running < SLOTS:
            self.running += 1
            sent = self._waiting.pop(0)
            self._later((OVERHEAD_MS + sent[0]) * self.slowness, "token", sent)

    def _later(self, delay_ms: float, kind: str, sent: tuple[float, float, int]) -> None:
        jittered_s = 1e-3 * delay_ms * self.rng.uniform(0.9, 1.3)
        heapq.heappush(self._events, (self.now_s + jittered_s, next(self._ordinal), kind, sent))


def learned(initial: int = 32, maximum: int | None = None) -> LearnedLimit:
    return LearnedLimit(initial=initial, minimum=4, maximum=maximum, tolerance=2.0)


def like(work_ms: float) -> Callable[[], float]:
    return lambda: work_ms


def warmed_up(works_ms: Callable[[], float], initial: int = 8) -> SlottedReplica:
    """Return a replica whose idle times were seen before there was too much to do."""
    replica = SlottedReplica(learned(initial), works_ms)
    replica.offered = 4
    replica.play(60.0)
    replica.offered = 10_000
    return replica


@pytest.mark.parametrize("initial", [4, 8, 64, 400])
def test_the_limit_settles_near_the_knee_from_both_sides(initial: int) -> None:
    """Row C-04: a bounded number in flight; the sixteen slots are used, few requests wait there."""
    replica = warmed_up(like(200.0), initial)
    replica.play(300.0)
    seen = []
    for _ in range(20):
        replica.play(5.0)
        seen.append(replica.limit.requests)
    assert min(seen) >= SLOTS
    assert max(seen) <= 2 * SLOTS


def test_a_slow_spell_lowers_the_limit_and_its_end_brings_it_back() -> None:
    replica = warmed_up(like(200.0))
    replica.play(300.0)
    before = replica.limit.requests
    replica.slowness = 4.0
    replica.play(120.0)
    during = replica.limit.requests
    replica.slowness = 1.0
    replica.play(200.0)
    assert during < before
    assert replica.limit.requests >= SLOTS


def test_a_replica_that_stays_slow_is_believed_to_be_a_slow_one() -> None:
    replica = warmed_up(like(200.0))
    replica.play(300.0)
    replica.slowness = 4.0
    replica.play(3_000.0)
    assert SLOTS <= replica.limit.requests <= 2 * SLOTS


def test_a_burst_of_other_prompts_does_not_collapse_the_limit() -> None:
    lengths = {"ms": 50.0}
    replica = warmed_up(lambda: lengths["ms"])
    replica.play(120.0)
    for work_ms in (3_000.0, 5.0, 20_000.0, 50.0, 1.0):
        lengths["ms"] = work_ms
        for _ in range(10):
            replica.play(10.0)
            assert replica.limit.requests >= SLOTS, work_ms


def test_a_mix_of_short_and_long_prompts_uses_all_slots() -> None:
    rng = Random(3)
    replica = warmed_up(lambda: rng.choice([2.0, 10.0, 100.0, 4_000.0]))
    replica.play(400.0)
    assert SLOTS <= replica.limit.requests <= 4 * SLOTS


def test_prompts_that_were_cached_against_all_prediction_do_not_mislead() -> None:
    """A fifth of the first tokens comes at once: that is no idle time of the others."""
    limit = learned(32)
    rng = Random(5)
    for number in range(2_000):
        ttft_ms = 20.0 if rng.random() < 0.2 else 520.0
        limit.succeed(500.0, ttft_ms, 32, 0.1 * number)
    assert limit.requests > 32


def test_what_is_not_used_does_not_change() -> None:
    limit = learned(40)
    for number in range(500):
        limit.succeed(100.0, 120.0 + 10 * number, 5, 0.1 * number)
    assert limit.requests == 40


def test_the_limit_stays_within_its_bounds() -> None:
    high, low = learned(32, maximum=48), learned(32)
    for number in range(GROUP):
        low.succeed(100.0, 100.0, 32, 0.1 * number)
    for number in range(2_000):
        high.succeed(100.0, 100.0, 48, 0.1 * number)
        low.succeed(100.0, 100.0 * (number + 2) ** 2, 32, 10.0 + 0.1 * number)
        assert low.requests >= 4
    assert high.requests == 48
    assert learned(initial=9, maximum=2).requests == 4, "the cap is no lower than the minimum"


def test_a_busy_replica_lowers_its_limit_but_once_for_all_that_it_refuses_together() -> None:
    limit = learned(100)
    for _ in range(50):
        limit.drop(1.0)
    assert limit.requests == 90
    limit.drop(2.0)
    assert limit.requests == 81


def test_an_octave_that_was_never_seen_is_bounded_by_the_others() -> None:
    idle = IdleTimes()
    assert idle.expected_ms(100.0) is None
    for _ in range(GROUP):
        idle.add(100.0, 150.0)
    assert idle.expected_ms(100.0) == 150.0
    assert idle.expected_ms(10.0) == 150.0, "less work takes no longer"
    assert idle.expected_ms(400.0) == 600.0, "more work, no more than in proportion"
    for _ in range(GROUP):
        idle.add(400.0, 5_000.0)  # under load
    assert idle.expected_ms(400.0) == 600.0
    for _ in range(GROUP):
        idle.add(400.0, 450.0)
    assert idle.expected_ms(400.0) == 450.0
