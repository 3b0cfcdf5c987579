"""What a sidecar calls the life of its engine's cache, on an engine's real sockets."""

from __future__ import annotations

import math

from sidecar.life import CacheLife
from sidecar.metrics import RenewalReason
from sidecar.profile import EngineProfile
from state.model import ModelIdentity
from support.kv_engine import KvEngine, stored
from support.sidecar import Fleet, eventually, page, settings_for, sidecar


def life_of(fleet: Fleet) -> str:
    state = fleet.replica()
    return "" if state is None else state.record.cache_life


async def test_a_life_is_the_engines_and_not_the_sidecars() -> None:
    """A sidecar that starts again says the same of it; an engine that starts again does not."""
    fleet, lives = Fleet(), []
    async with KvEngine() as engine:
        for started_at_s in (1000.0, 1000.0, 1001.0):
            engine.started_at_s = started_at_s
            async with sidecar(settings_for(engine), fleet):
                await eventually(fleet.is_registered)
                lives.append(life_of(fleet))
        first, second, third = lives
        assert first == second
        assert first != third
        engine.started_at_s = math.nan  # it does not tell
        for _ in range(2):
            async with sidecar(settings_for(engine), fleet):
                await eventually(fleet.is_registered)
                lives.append(life_of(fleet))
        assert len(set(lives)) == 4  # nothing tells them apart but the sidecar


async def test_an_engine_that_restarts_beside_its_sidecar_has_one_new_name() -> None:
    """The next sidecar will say it, too; routers may hear of it after the new generation."""
    fleet = Fleet()
    async with KvEngine() as engine:
        async with sidecar(settings_for(engine), fleet):
            await eventually(fleet.is_registered)
            await engine.publish(stored([1], page(1)))
            await eventually(fleet.holds(page(1), 1))
            before = life_of(fleet)
            await engine.restart()
            engine.lose(stored([2], page(2)))
            await eventually(fleet.holds(page(2), 1))
            assert life_of(fleet) != before
            assert fleet.lives.count(before) == 1
            identity = ModelIdentity(model="tiny", block_tokens=4)
            profile = EngineProfile(
                identity=identity, page_tokens=4, started_at_s=engine.started_at_s
            )
            known = CacheLife()
            known.begin(profile, RenewalReason.START, is_known=True)
            await eventually(lambda: life_of(fleet) == known.name)
            # Its start and its events both tell of the restart. Where the start is seen first, what
            # was known is void twice; in whichever order, there are two names, and none comes back.
            named = [life for life in fleet.lives if life]
            assert named[: named.index(known.name)] == [before]
            assert set(named) == {before, known.name}
            assert len(fleet.generations) in (2, 3)
        async with sidecar(settings_for(engine), fleet):
            await eventually(fleet.is_registered)
            await eventually(lambda: life_of(fleet) == known.name)
