"""When a second attempt may begin, and how a race is decided."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from router.availability import Standing
from router.config import ConfigError, decode_config
from router.hedge import LEAST_SAMPLES, Delays, Hedging
from router.hedge_setting import HedgeSettings
from router.race import Race
from state.model import ReplicaId

SETTINGS = HedgeSettings(enabled=True)


def test_the_delay_is_a_percentile_of_what_was_seen_once_enough_was() -> None:
    delays = Delays(SETTINGS)
    for number in range(LEAST_SAMPLES - 1):
        delays.note("streams", number / 10.0)
    assert delays.delay_s("streams") is None
    for number in range(LEAST_SAMPLES - 1, 100):
        delays.note("streams", number / 10.0)
    assert delays.delay_s("streams") == 9.5
    assert delays.delay_s("/v1/embeddings") is None


def test_a_fixed_delay_needs_no_samples_and_short_times_have_a_least_delay() -> None:
    assert Delays(HedgeSettings(delay_s=0.7)).delay_s("streams") == 0.7
    delays = Delays(HedgeSettings(least_s=0.25))
    for _ in range(LEAST_SAMPLES):
        delays.note("streams", 0.001)
    assert delays.delay_s("streams") == 0.25


@pytest.mark.parametrize(
    "wrong",
    [{"share": 0.0}, {"share": 0.5}, {"percentile": 100}, {"delay_s": 0}, {"least_s": 0}, {"x": 1}],
)
def test_a_wrong_setting_is_refused_by_its_key(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="hedge"):
        decode_config({"hedge": wrong})
    assert not decode_config({}).hedge.enabled


async def test_a_race_has_one_winner_and_ends_the_others_once() -> None:
    race = Race()
    lanes = [race.enter(is_hedge=False), race.enter(is_hedge=True)]
    for lane in lanes:
        lane.task = asyncio.create_task(asyncio.sleep(60, object()))
    await asyncio.sleep(0)
    first, second = lanes
    assert first.has_rival()
    assert not first.is_lost
    assert second.win()
    assert not first.win()
    assert second.win()
    assert (first.is_lost, second.is_lost) == (True, False)
    tasks = [cast("asyncio.Task[object]", lane.task) for lane in lanes]
    await asyncio.wait(tasks[:1])
    assert (tasks[0].cancelled(), tasks[1].cancelling()) == (True, 0)
    assert not second.has_rival()
    tasks[1].cancel()


class Fleet:
    """A fleet of three: who has how many, and who is what."""

    def __init__(self) -> None:
        self.inflight = {"a": 3, "b": 1, "c": 5}
        self.standing = dict.fromkeys("abc", Standing.UP)
        self.short_models: tuple[str, ...] = ()
        self.held: list[int] = []
        self.is_pressed = False

    def hedging(self) -> Hedging:
        def candidates(_: str | None, tried: set[str]) -> list[Any]:
            return [SimpleNamespace(replica=name) for name in self.inflight if name not in tried]

        availability = SimpleNamespace(
            candidates=candidates,
            standing=lambda name: SimpleNamespace(standing=self.standing[name]),
            short_models=self.short_models,
        )
        parts = SimpleNamespace(
            config=SimpleNamespace(hedge=SETTINGS),
            availability=availability,
            admission=None,
            hold=self.held,
        )
        return Hedging(
            cast("Any", parts),
            cast("Any", None),
            lambda name: self.inflight[name],
            lambda: self.is_pressed,
        )

    def chosen(self) -> list[str]:
        """Return who may have the second attempt of a request that is on ``a``."""
        first = SimpleNamespace(member=SimpleNamespace(replica="a"))
        found = self.hedging()._candidates(None, {ReplicaId("a")}, cast("Any", first))
        return [str(member.replica) for member in found]

    def denial(self) -> str | None:
        """Return why there is none."""
        candidates = cast("Any", self.chosen())
        return self.hedging()._denial(candidates)


def test_only_a_healthy_replica_that_has_less_to_do_gets_a_second_attempt() -> None:
    fleet = Fleet()
    assert fleet.chosen() == ["b"]
    fleet.inflight["b"] = 3
    assert fleet.chosen() == []
    fleet.inflight["b"] = 0
    for standing in (Standing.SLOW_START, Standing.PROBATION, Standing.BACK_PRESSURE):
        fleet.standing["b"] = standing
        assert fleet.chosen() == []


def test_there_is_none_while_the_router_or_the_fleet_is_short_of_anything() -> None:
    fleet = Fleet()
    assert fleet.denial() is None
    fleet.is_pressed = True
    assert fleet.denial() == "overload"
    fleet.is_pressed, fleet.held = False, [1]
    assert fleet.denial() == "overload"
    fleet.held, fleet.short_models = [], ("m",)
    assert fleet.denial() == "overload"
    fleet.short_models, fleet.inflight["b"] = (), 9
    assert fleet.denial() == "no_replica"
