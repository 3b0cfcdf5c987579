"""Who is silent, for how long, and what becomes of what they have."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from router.endpoint import Endpoint
from router.health_setting import HealthSettings
from router.silence import DOUBT_TIMES, Silence
from router.watch import Watch

if TYPE_CHECKING:
    from router.watch import Watched

HERE, THERE = Endpoint("127.0.0.1", 1), Endpoint("127.0.0.1", 2)


class Waiting:
    """An exchange that waits for its replica."""

    def __init__(self, endpoint: Endpoint, heard_s: float = 0.0) -> None:
        self.endpoint = endpoint
        self.heard_s = heard_s
        self.is_lost = False

    def lose(self) -> None:
        self.is_lost = True


class Rig:
    """Two exchanges with one replica, one with another; the loop's time is real."""

    def __init__(self) -> None:
        self.now_s = asyncio.get_running_loop().time()
        self.is_late = self.is_doubtful = False
        self.here = [Waiting(HERE), Waiting(HERE)]
        self.there = Waiting(THERE)
        watch = Watch(60.0)
        for each in (*self.here, self.there):
            watch.add(cast("Watched", each))
        self.silent: dict[Endpoint, float] = {}
        health: Any = SimpleNamespace(
            silent=self.silent,
            is_late=lambda: self.is_late,
            settings=HealthSettings(silent_s=10.0),
        )
        pool: Any = SimpleNamespace(watch=watch)
        availability: Any = SimpleNamespace(is_doubtful=lambda: self.is_doubtful)
        self.silence = Silence(health, pool, availability)
        self.watch = watch

    def lost(self, silent_for_s: float) -> list[bool]:
        """Return which exchanges are lost once their replica has been silent for so long."""
        self.silent[HERE] = self.now_s - silent_for_s
        self.silence.look()
        return [each.is_lost for each in (*self.here, self.there)]


async def test_what_a_silent_replica_has_is_lost_after_the_limit_and_nothing_else() -> None:
    rig = Rig()
    assert rig.lost(9.0) == [False] * 3
    assert rig.lost(11.0) == [True, True, False]
    rig.watch.close()


async def test_a_byte_on_one_connection_is_a_sign_of_life_for_all() -> None:
    rig = Rig()
    rig.here[1].heard_s = rig.now_s - 5.0
    assert rig.lost(100.0) == [False] * 3
    rig.here[1].heard_s = rig.now_s - 11.0
    assert rig.lost(100.0) == [True, True, False]
    rig.watch.close()


async def test_where_most_are_out_it_waits_longer_and_while_late_it_judges_nobody() -> None:
    rig = Rig()
    rig.is_doubtful = True
    assert rig.lost(10.0 * DOUBT_TIMES - 2.0) == [False] * 3
    rig.is_late = True
    assert rig.lost(1_000.0) == [False] * 3
    rig.is_late = False
    assert rig.lost(10.0 * DOUBT_TIMES + 2.0) == [True, True, False]
    rig.watch.close()
