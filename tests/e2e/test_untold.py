"""What an engine loses without an event: idle resets, sleep, other weights; and the knob."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import aiohttp
import msgspec
import pytest
from aiohttp import web

from state.model import ModelIdentity, ReplicaLoad
from support.dials import Dials
from support.kv_engine import KvEngine, stored
from support.port import free_port
from support.sidecar import IDENTITY, Fleet, eventually, page, pages, settings_for
from support.sidecar import sidecar as running_sidecar

if TYPE_CHECKING:
    from sidecar.profile import SidecarSettings

RESET: Final = "/reset_prefix_cache"
CLEARED: Final = {"type": "AllBlocksCleared"}
FIRST: Final = pages(1, 2)


class MeddledEngine(KvEngine):
    """An engine whose metrics show what was done to it."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: dict[str, int] = {}
        self._states = {"awake": 1.0}
        self.weight_version: str | None = None

    def add_routes(self, app: web.Application) -> None:
        app.router.add_get("/weight_info", self._weight_info)

    async def _weight_info(self, _: web.Request) -> web.Response:
        if self.weight_version is None:
            return web.Response(status=404)
        return web.json_response({"weight_version": self.weight_version})

    def call(self, handler: str) -> None:
        """Be called at ``handler``."""
        self._calls[handler] = self._calls.get(handler, 0) + 1
        self._show()

    def sleep(self, level: int) -> None:
        """Sleep at a level."""
        states = {"awake": 0, "weights_offloaded": level == 1, "discard_all": level == 2}
        self._states = {name: float(value) for name, value in states.items()}
        self.call("/sleep")

    def wake(self) -> None:
        """Be awake again."""
        self._states = {"awake": 1.0}
        self._show()

    def _show(self) -> None:
        lines = [
            f'http_requests_total{{handler="{handler}",method="POST",status="2xx"}} {count}.0'
            for handler, count in self._calls.items()
        ]
        lines += [
            f'vllm:engine_sleep_state{{engine="0",sleep_state="{name}"}} {value}'
            for name, value in self._states.items()
        ]
        self.more_metrics = "\n".join(lines) + "\n"


def measured(engine: KvEngine, **changes: Any) -> tuple[SidecarSettings, Dials]:
    """Return settings with metrics on a known port, and what reads them."""
    port = free_port()
    return settings_for(engine, metrics=f"127.0.0.1:{port}", **changes), Dials(port)


async def hold_first(engine: KvEngine, fleet: Fleet) -> None:
    """Let the engine hold two blocks that the fleet knows of."""
    await eventually(lambda: (state := fleet.replica()) is not None and bool(state.load))
    await engine.publish(stored([1, 2], FIRST))
    await eventually(fleet.holds(FIRST, 2))


async def test_a_reset_of_an_idle_engine_is_known_before_it_tells() -> None:
    """B04: and a replay of what was before the reset does not bring it back."""
    fleet = Fleet()
    async with MeddledEngine() as engine:
        settings, dials = measured(engine)
        async with running_sidecar(settings, fleet):
            await hold_first(engine, fleet)
            generations = list(fleet.generations)
            engine.call(RESET)
            await eventually(fleet.holds(FIRST, 0))
            await dials.show(untold_drops_total=1, held_pages=0)
            assert fleet.generations == generations
            await engine.close_sockets()
            engine.open_sockets()
            await eventually(lambda: bool(engine.replay_starts))
            await dials.show(held_pages=0)
            await engine.publish(CLEARED, stored([3], page(3)))
            await eventually(fleet.holds(page(3), 1))
            await dials.show(held_pages=1)
            assert fleet.blocks(FIRST) == 0


async def test_a_reset_that_was_told_costs_nothing_that_came_after_it() -> None:
    """B04."""
    fleet = Fleet()
    async with MeddledEngine() as engine:
        settings, dials = measured(engine)
        async with running_sidecar(settings, fleet):
            await hold_first(engine, fleet)
            await engine.publish(CLEARED, stored([3], page(3)))
            await eventually(fleet.holds(page(3), 1))
            engine.call(RESET)
            engine.prompt_tokens = 1
            scrapes = (await dials.read())["event_batches_total"]
            for number in range(4):
                await engine.publish(stored([10 + number], page(10 + number)))
                await eventually(fleet.holds(page(10 + number), 1))
            await dials.show(event_batches_total=scrapes + 4, untold_drops_total=0, held_pages=5)


async def test_a_reset_that_a_busy_engine_refused_costs_nothing() -> None:
    fleet = Fleet()
    async with MeddledEngine() as engine:
        settings, dials = measured(engine)

        async def is_seen(running: int) -> None:
            def is_so() -> bool:
                state = fleet.replica()
                return state is not None and state.load == loaded

            loaded = ReplicaLoad(running=running, queued=0, kv_used_fraction=0.25)
            engine.running = running
            await eventually(is_so)

        async with running_sidecar(settings, fleet):
            await hold_first(engine, fleet)
            await is_seen(1)
            engine.call(RESET)
            for running in (2, 0):
                await is_seen(running)
            await dials.show(untold_drops_total=0, held_pages=2)
            assert fleet.blocks(FIRST) == 2


@pytest.mark.parametrize(("level", "held_pages"), [(0, 2), (1, 0), (2, 0)])
async def test_a_sleeping_engine_is_off_and_comes_back_with_what_it_kept(
    level: int, held_pages: int
) -> None:
    """Requests would wait until it wakes; vLLM drops its cache at levels 1 and 2, not at 0."""
    fleet = Fleet()
    async with MeddledEngine() as engine:
        settings, dials = measured(engine)
        async with running_sidecar(settings, fleet):
            await hold_first(engine, fleet)
            engine.sleep(level)
            await eventually(lambda: not fleet.is_registered())
            await dials.show(engine_asleep=1, engine_up=1)
            engine.wake()
            await eventually(fleet.is_registered)
            await dials.show(engine_asleep=0, held_pages=held_pages)
            await eventually(fleet.holds(FIRST, held_pages))


async def test_other_weights_in_place_begin_a_generation_without_the_past() -> None:
    """The engine can still replay what it computed before; that is of other weights."""
    fleet = Fleet()
    async with MeddledEngine() as engine:
        settings, dials = measured(engine)
        async with running_sidecar(settings, fleet):
            await hold_first(engine, fleet)
            replays = len(engine.replay_starts)
            engine.call("/collective_rpc")
            await eventually(lambda: len(fleet.generations) == 2)
            await dials.show(**{"generations_total:weights": 1, "held_pages": 0})
            await engine.publish(stored([3], page(3)))
            await eventually(fleet.holds(page(3), 1))
            assert fleet.blocks(FIRST) == 0
            assert len(engine.replay_starts) == replays
            engine.weight_version = "v2"
            engine.call("/update_weight_version")
            await eventually(lambda: len(fleet.generations) == 3)
            state = fleet.replica()
            assert state is not None
            assert state.record.identity.weights_revision == "v2"
            await engine.publish(stored([4], page(4)))
            second = msgspec.structs.replace(IDENTITY, weights_revision="v2")
            await eventually(fleet.holds(page(4), 1, identity=second))
            assert fleet.blocks(page(4)) == 0


async def test_the_first_weights_of_an_engine_have_no_name() -> None:
    """Else replicas of engines that tell and of those that do not would share nothing."""
    for told, revision in (("default", ""), ("v1", "v1")):
        fleet = Fleet()
        async with MeddledEngine() as engine:
            engine.weight_version = told
            async with running_sidecar(settings_for(engine), fleet):
                await eventually(fleet.is_registered)
                state = fleet.replica()
                assert state is not None
                assert state.record.identity == ModelIdentity(
                    model="tiny", block_tokens=4, weights_revision=revision
                )


@pytest.mark.parametrize("is_told", [True, False])
async def test_another_model_at_the_same_address_gets_nothing_of_the_old_one(
    *, is_told: bool
) -> None:
    """A58: a new engine took the place of one that was never seen to go."""
    fleet = Fleet()
    async with MeddledEngine() as engine, running_sidecar(settings_for(engine), fleet):
        await hold_first(engine, fleet)
        engine.model = "other"
        await engine.restart(is_told=is_told)
        await engine.publish(stored([1, 2], FIRST))
        other = msgspec.structs.replace(IDENTITY, model="other")
        await eventually(fleet.holds(FIRST, 2, identity=other))
        state = fleet.replica()
        assert state is not None
        assert state.record.identity == other
        assert fleet.blocks(FIRST) == 0


async def test_an_operator_can_begin_a_generation_and_name_the_weights() -> None:
    fleet = Fleet()
    async with MeddledEngine() as engine:
        settings, dials = measured(engine)
        url = dials.url.replace("/metrics", "/renew")
        async with running_sidecar(settings, fleet), aiohttp.ClientSession() as http:
            await hold_first(engine, fleet)
            async with http.post(url, headers={"Origin": "http://example.com"}) as answer:
                assert answer.status == 403
            for wrong in ("a\n", "", "a" * 257):
                async with http.post(url, params={"weights_revision": wrong}) as answer:
                    assert answer.status == 400
                    assert (await answer.text()).startswith("weights_revision: expected")
            async with http.get(url) as answer:
                assert answer.status == 405
            assert len(fleet.generations) == 1
            assert fleet.blocks(FIRST) == 2
            async with http.post(url) as answer:
                assert (answer.status, await answer.text()) == (200, "renewed\n")
            await eventually(lambda: len(fleet.generations) == 2)
            await dials.show(**{"generations_total:asked": 1, "held_pages": 0})
            await eventually(fleet.holds(FIRST, 0))
            async with http.post(url, params={"weights_revision": "v9"}) as answer:
                assert answer.status == 200
            await eventually(lambda: len(fleet.generations) == 3)
            await engine.publish(stored([4], page(4)))
            named = msgspec.structs.replace(IDENTITY, weights_revision="v9")
            await eventually(fleet.holds(page(4), 1, identity=named))
            await engine.restart()
            await engine.publish(stored([5], page(5)))
            await eventually(fleet.holds(page(5), 1, identity=named))
