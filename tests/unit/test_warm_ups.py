"""When a warm-up or a hand-over begins and ends: by what the registry and the drains tell."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from policies.hot import HeatMap, HotSettings
from router.config import ConfigError, decode_config
from router.endpoint import Endpoint
from router.fleet import Member
from router.warm_job import Job, JobEnd
from router.warm_setting import WarmUpSettings
from router.warm_text import PrefixTexts
from router.warm_up import START_S, WarmUps
from state.model import ReplicaId, Rung

if TYPE_CHECKING:
    from router.fleet import FleetTable
    from router.warm_work import WarmWork
    from state.store import FleetReader

ENDPOINT = Endpoint.configured("http://127.0.0.1:1")


class Begun:
    """Jobs that were begun; each goes on until it is cancelled, or let go."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.first, self.done = asyncio.Event(), asyncio.Event()

    async def run(self, job: Job, _: Member) -> None:
        self.jobs.append(job)
        self.first.set()
        await self.done.wait()
        job.end = JobEnd.DONE


class Town:
    """A registry that a test changes: lives by name, and who drains."""

    def __init__(self, **settings: Any) -> None:
        self.lives: dict[str, str] = {}
        self.draining: set[str] = set()
        self.silent: set[str] = set()
        self.configured: set[str] = set()
        self.now_s = 0.0
        self.rung = Rung.LIVE
        self.begun = Begun()
        kept = WarmUpSettings(enabled=True, **settings)
        self.ups = WarmUps(
            kept,
            PrefixTexts(kept, HeatMap(HotSettings()), float),
            cast("FleetTable", self),
            cast("FleetReader", SimpleNamespace(replicas=self.replicas, freshness=self.freshness)),
            lambda: self.now_s,
            float,
        )
        self.ups.work = cast("WarmWork", self.begun)

    def is_configured(self, member: Member) -> bool:
        return member.replica in self.configured

    def members(self) -> dict[ReplicaId, Member]:
        return {
            ReplicaId(name): Member(
                replica=ReplicaId(name),
                endpoint=ENDPOINT,
                has_events=name not in self.silent,
                is_draining=name in self.draining,
            )
            for name in self.lives
        }

    def replicas(self) -> dict[ReplicaId, Any]:
        return {
            ReplicaId(name): SimpleNamespace(
                record=SimpleNamespace(cache_life=life, generation=f"generation of {life}")
            )
            for name, life in self.lives.items()
        }

    def freshness(self) -> tuple[Rung, float]:
        return self.rung, 0.0

    async def look(self) -> list[str]:
        """Look once; return the jobs that go on."""
        self.ups.look()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return sorted(f"{row.kind} {row.replica}" for row in self.ups.view().jobs if not row.end)

    def ends(self) -> list[str]:
        return [row.end for row in self.ups.view().jobs if row.end]


async def test_what_was_there_at_the_start_is_not_warmed_and_what_comes_or_restarts_is() -> None:
    town = Town()
    assert await town.look() == []
    town.lives = {"a": "1"}
    assert await town.look() == []
    town.now_s = START_S
    town.lives = {"a": "1", "b": "1"}
    assert await town.look() == ["warm_up b"]
    assert town.ups.empty() == ["b"]
    assert town.ups.told(ReplicaId("b")) == "warm-up 0/0"
    town.lives["a"] = "2"
    assert await town.look() == ["warm_up a", "warm_up b"]
    town.lives["a"] = "3"
    assert await town.look() == ["warm_up a", "warm_up b"]
    assert town.ends() == ["obsolete"]
    town.begun.done.set()
    assert await town.look() == []
    assert town.ends() == ["done", "done", "obsolete"]
    assert town.ups.told(ReplicaId("b")) == ""


async def test_what_comes_within_the_first_seconds_was_there_and_is_warmed_in_its_next_life() -> (
    None
):
    """The first look may come before the last sidecar has told of its replica."""
    town = Town()
    town.now_s = 1_000.0
    town.lives = {"a": "1"}
    await town.look()
    town.now_s += START_S - 0.01
    town.lives = {"a": "1", "b": "1"}
    assert await town.look() == []
    town.lives = {"a": "1", "b": "2"}
    assert await town.look() == ["warm_up b"]
    town.now_s += 0.01
    town.lives = {"a": "1", "b": "2", "c": "1"}
    assert await town.look() == ["warm_up b", "warm_up c"]


async def test_a_configured_replica_does_not_join_and_is_warmed_in_its_next_life() -> None:
    town = Town()
    town.configured = {"b"}
    town.lives = {"a": "1"}
    await town.look()
    town.now_s = 60.0
    town.lives = {"a": "1", "b": "1"}
    assert await town.look() == []
    town.lives = {"a": "1", "b": "2"}
    assert await town.look() == ["warm_up b"]


async def test_a_cache_that_only_its_sidecar_left_for_a_while_is_not_warmed() -> None:
    town = Town()
    town.lives = {"a": "1", "b": "1"}
    await town.look()
    town.lives = {"b": "1"}
    await town.look()
    town.lives = {"a": "1", "b": "1"}
    assert await town.look() == []
    town.silent = {"c"}
    town.lives = {"a": "1", "b": "1", "c": "1"}
    assert await town.look() == []


async def test_without_a_live_view_nothing_begins() -> None:
    town = Town()
    town.lives = {"a": "1"}
    await town.look()
    town.rung, town.lives = Rung.STALE, {"a": "2"}
    assert await town.look() == []
    town.rung = Rung.LIVE
    assert await town.look() == ["warm_up a"]


@pytest.mark.parametrize("mode", ["asked", "always"])
async def test_a_drain_hands_over_once_where_that_is_wanted(mode: str) -> None:
    town = Town(hand_over=mode)
    town.lives = {"a": "1", "b": "1"}
    await town.look()
    town.draining = {"a"}
    assert await town.look() == (["hand_over a"] if mode == "always" else [])
    town.ups.asked = frozenset({ReplicaId("a")})
    assert await town.look() == ["hand_over a"]
    town.begun.done.set()
    assert await town.look() == []
    assert await town.look() == [], "once for each drain"
    town.begun.done.clear()
    town.draining = set()
    await town.look()
    town.draining = {"a"}
    assert await town.look() == ["hand_over a"]
    town.draining = set()
    await town.look()
    assert town.ends() == ["obsolete", "done"]


async def test_a_drain_ends_a_warm_up_and_a_hand_over_outlives_its_replica() -> None:
    town = Town(hand_over="always")
    town.lives = {"a": "1"}
    await town.look()
    town.lives = {"a": "2"}
    assert await town.look() == ["warm_up a"]
    town.draining = {"a"}
    await town.look()
    assert await town.look() == ["hand_over a"]
    town.lives = {}
    assert await town.look() == ["hand_over a"]


async def test_the_end_of_the_router_ends_all_jobs() -> None:
    town = Town()
    town.lives = {"a": "1"}
    await town.look()
    town.lives = {"a": "2"}
    task = asyncio.create_task(town.ups.run())
    await town.begun.first.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.sleep(0)
    assert town.ends() == ["stopped"]


def test_a_direct_lookup_is_refused_with_the_key() -> None:
    raw = {"warm_up": {"enabled": True}, "state": {"lookup": "direct"}}
    with pytest.raises(ConfigError, match=r"^warm_up\.enabled: expected state\.lookup mirror"):
        decode_config(raw)
