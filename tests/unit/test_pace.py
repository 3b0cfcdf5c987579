"""Who reads large bodies rests between two steps, and nobody else does."""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING

import pytest

from prompt.body import check_numbers
from prompt.lane import Lane, refuse_dense
from prompt.pace import LONGEST_REST_S, REST_SHARE, rest

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 1 << 20


class Clock:
    """Time that passes when it is told to, and by sleeping."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        self.rests: list[tuple[str, float]] = []
        monkeypatch.setattr(time, "perf_counter", lambda: self.now_s)
        monkeypatch.setattr(time, "sleep", self.sleep)

    def sleep(self, for_s: float) -> None:
        self.rests.append((threading.current_thread().name, for_s))
        self.now_s += for_s

    def work(self, *steps_s: float) -> None:
        for each_s in steps_s:
            self.now_s += each_s
            rest()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


async def test_the_lane_rests_as_long_as_it_worked_in_part_and_not_for_long(clock: Clock) -> None:
    lane = Lane()
    for works in ((0.002, 0.004), (1.0,)):
        clock.rests.clear()
        await lane.run(partial(clock.work, *works))
        wanted = [min(REST_SHARE * each, LONGEST_REST_S) for each in works]
        assert [for_s for _, for_s in clock.rests] == pytest.approx(wanted)
        assert {name for name, _ in clock.rests} == {"large-body_0"}
    lane.close()


async def test_time_between_two_bodies_is_no_work(clock: Clock) -> None:
    lane = Lane()
    await lane.run(lambda: clock.work(0.001))
    clock.now_s += 60.0
    clock.rests.clear()
    await lane.run(lambda: clock.work(0.001))
    assert clock.rests[0][1] == pytest.approx(REST_SHARE * 0.001)
    lane.close()


@pytest.mark.parametrize("check", [check_numbers, refuse_dense])
async def test_a_large_body_is_looked_at_with_rests_on_the_lane_alone(
    check: Callable[[bytes], None], clock: Clock
) -> None:
    body = b'{"model":"m","x":"%b"}' % (b"a," * (4 * MIB))
    check(body)
    assert not clock.rests, "the event loop never sleeps"
    lane = Lane()
    await lane.run(lambda: check(body))
    assert len(clock.rests) >= len(body) // MIB
    lane.close()
