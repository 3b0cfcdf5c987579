"""What each part of a router makes of settings that change: put in force whole, nothing lost."""

from __future__ import annotations

import asyncio
import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from policies.expected_ttft import ExpectedTtft
from policies.hot import HeatMap, HotSettings
from policies.least_loaded import LeastLoaded
from policies.weighted import Weighted
from router.app import App
from router.config import StaticReplica, decode_config
from router.fleet import FleetTable
from router.ramp import Ramp
from router.setting_file import KeptSettings, SettingFile, SettingFileError
from router.setting_life import SettingLife
from router.state_reader import build_mirror
from state.memory import MemoryState
from state.model import ReplicaId, RouterId
from state.setting_store import Encoded, MemorySettingStore
from state.store import StateError
from support.choosing import chain_for
from support.logged import Logging

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from state.setting_book import SettingDocument


@asynccontextmanager
async def router(store: MemorySettingStore, **config: Any) -> AsyncIterator[tuple[App, Any]]:
    """Run the settings of a router that has no sockets."""
    app = App(decode_config(config), {}, build_mirror("redis://127.0.0.1:1"))
    try:
        async with SettingLife(app, "redis://127.0.0.1:1", store) as life:
            yield app, life
    finally:
        await app.tokens.close()
        app.prompts.close()
        await app.pool.close()


async def write(life: SettingLife, **settings: Any) -> SettingDocument:
    return await life.book.write(
        settings, author="a", reason="r", unix_s=1.0, expected_version=life.book.version
    )


def _decided_by(app: App) -> tuple[object, int]:
    return app.chooser.decided_by


async def test_every_section_reaches_the_part_that_goes_by_it() -> None:
    async with router(MemorySettingStore(), replicas=[{"url": "http://h:1", "name": "w0"}]) as (
        app,
        life,
    ):
        await write(
            life,
            policy={"kind": "weighted", "w_queue": 0.5},
            hot_prefix={"share": 0.25},
            hold={"enabled": True, "release_ms": 70},
            admission={
                "max_inflight": 7,
                "max_inflight_per_replica": 5,
                "pending": 3,
                "queue_timeout_s": 2,
                "overload": {"recover_s": 9},
            },
            health={"fall": 9, "slow_start_s": 3},
            ejection={"failures": 2, "panic_fraction": 0.1},
            drains=["w0"],
        )

        assert app.chooser.decided_by == (Weighted(w_queue=0.5), 1)
        assert app.view.router().policy == "weighted"
        assert app.view.router().settings_version == 1
        assert app.know.heat._settings.share == 0.25
        assert app.hold is not None
        assert app.hold.is_always_asked
        assert app.hold._queue._settings.release_ms == 70
        assert app.hold._queue._place_wait_s == 2
        admission = app.entrance.admission
        assert (admission.cap, admission.most_open, admission.pending) == (5, 8, 3)
        assert admission.limit(ReplicaId("w0")) == 5
        assert app.entrance.overload._ladder._settings.recover_s == 9
        assert app.health.settings.fall == 9
        availability = app.resilience.availability
        assert availability._ejection.settings.failures == 2
        assert (availability._panic._fraction, availability._ramp._ramp_s) == (0.1, 3)
        assert app.fleet.members()[ReplicaId("w0")].is_draining

        await write(life)

        assert _decided_by(app) == (ExpectedTtft(), 2)
        assert not app.hold.is_always_asked
        assert admission.limit(ReplicaId("w0")) is None
        assert not app.fleet.members()[ReplicaId("w0")].is_draining


async def test_what_the_store_has_at_the_start_is_in_force_before_the_first_request() -> None:
    store = MemorySettingStore()
    async with router(store) as (_, life):
        await write(life, policy={"kind": "least_loaded"})

    async with router(store) as (app, _):
        assert app.chooser.decided_by == (LeastLoaded(), 1)


async def test_a_refused_document_is_one_line_and_a_gauge(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.setting_life.POLL_S", 0.001)
    store = MemorySettingStore()
    async with router(store) as (app, life):
        await write(life, policy={"kind": "least_loaded"})
        read = await store.read()
        assert read is not None
        await store.put(read, Encoded(2, read.replace(b"least_loaded", b"of next year")), [])
        with caplog.at_level(logging.WARNING):
            for _ in range(20):
                await asyncio.sleep(0.002)
        refused = [line for line in caplog.messages if "refused" in line]
        assert len(refused) == 1
        assert "policy.kind" in refused[0]
        assert b"warmroute_settings_refused 1.0" in app.metrics.render()
        assert b"warmroute_settings_version 1.0" in app.metrics.render()
        assert app.chooser.decided_by == (LeastLoaded(), 1)


async def test_a_store_that_is_away_is_one_line_and_stops_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.setting_life.POLL_S", 0.001)

    class Away(MemorySettingStore):
        async def read(self) -> bytes | None:
            message = "no route"
            raise StateError(message)

    with caplog.at_level(logging.WARNING):
        async with router(Away()) as (app, _):
            for _ in range(20):
                await asyncio.sleep(0.002)
            assert app.chooser.decided_by == (ExpectedTtft(), 0)
    assert len([line for line in caplog.messages if "cannot be asked" in line]) == 1


async def test_a_broken_file_is_left_aside_and_a_good_one_is_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "settings.json"
    path.write_text('{"warmroute": "epochs"}')
    with pytest.raises(SettingFileError, match="expected 'settings'"):
        SettingFile(path).read()
    with caplog.at_level(logging.WARNING):
        async with router(MemorySettingStore(), settings_file=str(path)) as (_, life):
            assert any("it is left aside" in line for line in caplog.messages)
            document = await write(life, drains=["a"])
            await life._keep()
    assert SettingFile(path).read() == KeptSettings(in_force=1, versions=(document,))

    async with router(MemorySettingStore(), settings_file=str(path)) as (_, life):
        assert life.live.drains == ("a",)


def test_a_decision_that_was_peeked_at_is_made_anew_after_a_change() -> None:
    logging_ = Logging(LeastLoaded())
    choosing, members = logging_.choosing, logging_.members()
    choices, routed = logging_.decide(range(500))
    peeked = choosing.chooser.peek(routed, members)

    choosing.chooser.adopt(Weighted(), 3)
    choice = choosing.chooser.choose(routed, members, peeked)

    assert choice is not None
    assert choice.decision is not peeked
    assert choice.decided_by == (Weighted(), 3)
    assert choices[0].decided_by == (LeastLoaded(), 0)


def test_heat_that_was_counted_stays_when_its_thresholds_change() -> None:
    heat = HeatMap(HotSettings(min_arrivals=1_000.0))
    chain, replicas = chain_for(range(2_000)), [ReplicaId(name) for name in "abcd"]
    for number in range(60):
        assert heat.observe(chain, 2_000, replicas, number * 0.01).heat is None

    heat.adopt(HotSettings(min_arrivals=8.0))

    assert heat.observe(chain, 2_000, replicas, 0.6).heat is not None


def test_a_drained_replica_stays_a_member_and_is_no_candidate() -> None:
    class Up:
        def is_up(self, _: ReplicaId) -> bool:
            return True

        def served_models(self, _: ReplicaId) -> frozenset[str]:
            return frozenset({"m"})

    configured = [StaticReplica(url=f"http://h:{port}", name=f"w{port}") for port in (1, 2)]
    fleet = FleetTable(MemoryState(clock=float).reader(RouterId("me")), configured)

    fleet.drain(frozenset({ReplicaId("w1"), ReplicaId("nobody")}))

    assert [one.replica for one in fleet.candidates("m", Up())] == ["w2"]
    assert fleet.members()[ReplicaId("w1")].is_draining
    fleet.drain(frozenset())
    assert [one.replica for one in fleet.candidates("m", Up())] == ["w1", "w2"]


def test_a_slow_start_that_is_turned_off_ends_at_once() -> None:
    ramp = Ramp(30.0)
    ramp.begin(ReplicaId("a"), 0.0)

    ramp.adopt(10.0)
    assert ramp.end_s(ReplicaId("a")) == 10.0
    ramp.adopt(0.0)

    assert not ramp.since_s
