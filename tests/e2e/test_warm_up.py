"""Replicas that begin with an empty cache are warm before clients ask, within a budget."""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from support.fleet import START_S, FleetPlan, Replica, until
from support.port import free_ports
from support.warm import BLOCK_TOKENS, CONFIG, WARM, WarmFleet, tokens_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from support.valkey import ValkeyProcess

PREFIX = 1_024
LONG = 4_096
SLOW = ("--preset", "llama-8b-h100", "--speed-up", "0.2")
"""A step of 512 tokens takes a third of a second."""


@asynccontextmanager
async def warm_fleet(
    folder: Path,
    valkey: ValkeyProcess,
    *flags: str,
    workers: int = 1,
    routers: int = 1,
    **config: Any,
) -> AsyncIterator[WarmFleet]:
    await valkey.flush()  # other tests' drains are in the settings document there
    plan = FleetPlan(state_url=valkey.url, replicas=0, routers=0)
    async with WarmFleet(folder, plan) as fleet:
        await fleet.start_engines(workers, *flags)
        for _ in range(routers):
            await fleet.add_router(**config)
        yield fleet


async def test_two_routers_fill_a_restarted_worker_once_and_up_to_the_budget(
    tmp_path: Path, valkey: ValkeyProcess
) -> None:
    """The hottest prefix first; of the next one as many blocks as are left of the budget."""
    part = 4 * BLOCK_TOKENS
    warm_up = {**WARM, "tokens": PREFIX + part + BLOCK_TOKENS - 1}
    async with warm_fleet(tmp_path, valkey, routers=2, warm_up=warm_up) as fleet:
        hottest, next_one = tokens_of("hottest", PREFIX), tokens_of("next one", PREFIX)
        for router in fleet.routers:
            await fleet.make_hot(next_one, router)
            await fleet.make_hot(hottest, router, times=12)
            await fleet.kept(2, router)

        await fleet.restart(0)

        jobs = [await fleet.job("warm_up", "w0", router) for router in fleet.routers]
        assert [job["spent_tokens"] for job in jobs] == [PREFIX + part] * 2
        assert sum(job["computed_tokens"] for job in jobs) == PREFIX + part
        assert await fleet.computed(0) == PREFIX + part
        assert await fleet.inflight() == 0
        first = await fleet.ask(hottest + tokens_of("first", 70))
        assert (first.cached_tokens, first.predicted_tokens) == (PREFIX, PREFIX)
        second = await fleet.ask(next_one + tokens_of("second", 70), fleet.routers[1])
        assert (second.cached_tokens, second.predicted_tokens) == (part, part)


async def test_a_configured_worker_whose_sidecar_comes_later_is_warmed_when_it_restarts_only(
    tmp_path: Path, valkey: ValkeyProcess
) -> None:
    await valkey.flush()
    async with WarmFleet(tmp_path, FleetPlan(state_url=valkey.url, replicas=0, routers=0)) as fleet:
        await fleet.start_engines(1)
        fleet.ports += free_ports(1)
        worker = await fleet.worker_at(1).ready(START_S)
        own = [{"url": worker.words[0], "name": "configured"}]
        router = await fleet.start_router(**CONFIG, replicas=own, attend_sidecars=False)
        fleet.routers.append(router)
        await fleet.all_up(router, 2)
        sidecar = await fleet.start_sidecar("w1", worker.words[0]).ready(START_S)
        fleet.replicas.append(Replica("w1", worker, sidecar))

        async def tells() -> bool:
            seen = (await fleet.seen()).get("w1")
            return bool(seen and seen["up"] and seen["has_events"])

        await until(tells, "its sidecar")
        worker.process.kill()
        await asyncio.to_thread(worker.process.wait, 20)
        jobs: list[dict[str, Any]] = []
        began_unix_s = time.time()
        await fleet.restart(1)

        async def is_over() -> bool:
            jobs[:] = (await fleet.warm_ups())["jobs"]
            return any(
                job["end"] not in {"", "obsolete"} and job["began_unix_s"] > began_unix_s
                for job in jobs
            )

        await until(is_over, "the warm-up of its second life")
        assert [(job["kind"], job["replica"]) for job in jobs] == [("warm_up", "w1")]


async def test_clients_go_first_and_what_was_cut_off_goes_on_afterwards(
    tmp_path: Path, valkey: ValkeyProcess
) -> None:
    async with warm_fleet(tmp_path, valkey, *SLOW, routers=2) as fleet:
        prefix = tokens_of("system", LONG)
        await fleet.make_hot(prefix)
        await fleet.kept(1)
        await fleet.restart(0)

        async def is_computing() -> bool:
            return await fleet.in_engine(fleet.replicas[0]) > 0

        job, clients = {"gave_way": 0}, [0, 0]
        while job["gave_way"] < 2:
            for at, asked in enumerate(fleet.routers):
                await until(is_computing, "a warm-up on the worker")
                clients[at] += 1
                await fleet.ask(tokens_of(f"client {clients} of {asked.url}", 256), asked)
                job = await fleet.job("warm_up", "w0", ended=False)
                assert not job["end"]
        done = await fleet.job("warm_up", "w0")
        assert (done["end"], done["done"]) == ("done", 1)
        first = await fleet.ask(prefix + tokens_of("first", 70))
        assert first.cached_tokens == LONG
        metrics = await fleet.gauges(fleet.router.url)
        assert metrics["warmroute_requests_total"] == 7 + clients[0]
        assert metrics["warmroute_warm_up_requests_total"] >= LONG / 512


async def test_another_router_goes_on_where_one_died_within_the_same_budget(
    tmp_path: Path, valkey: ValkeyProcess
) -> None:
    warm_up = {**WARM, "tokens": LONG}
    async with warm_fleet(tmp_path, valkey, *SLOW, routers=2, warm_up=warm_up) as fleet:
        prefix = tokens_of("system", LONG)
        for router in fleet.routers:
            await fleet.make_hot(prefix, router)
            await fleet.kept(1, router)
        await fleet.restart(0)
        doing: list[int] = []

        async def has_begun() -> bool:
            rows = [await fleet.job("warm_up", "w0", one, ended=False) for one in fleet.routers]
            doing[:] = [at for at, row in enumerate(rows) if row["state"] == "working"]
            assert len(doing) < 2
            return bool(doing) and rows[doing[0]]["computed_tokens"] > 0

        await until(has_begun, "a router warms the worker")
        fleet.routers[doing[0]].child.process.send_signal(signal.SIGKILL)
        left = fleet.routers[1 - doing[0]]

        job = await fleet.job("warm_up", "w0", left)

        assert job["end"] in {"done", "tokens"}
        assert job["spent_tokens"] <= LONG
        assert await fleet.computed(0) <= LONG + 512
        first = await fleet.ask(prefix + tokens_of("first", 70), left)
        assert first.cached_tokens >= LONG - 512


async def test_a_worker_that_dies_is_warmed_in_its_next_life_and_no_store_means_no_warm_up(
    tmp_path: Path, valkey: ValkeyProcess
) -> None:
    async with warm_fleet(tmp_path, valkey, *SLOW) as fleet:
        prefix = tokens_of("system", LONG)
        await fleet.make_hot(prefix)
        await fleet.kept(1)
        await fleet.restart(0)

        async def has_begun() -> bool:
            row = await fleet.job("warm_up", "w0", ended=False)
            return bool(row["state"] == "working" and row["computed_tokens"])

        await until(has_begun, "a warm-up")
        await fleet.restart(0)

        async def has_begun_again() -> bool:
            ends = [row["end"] for row in (await fleet.warm_ups())["jobs"]]
            return ends == ["", "obsolete"]

        await until(has_begun_again, "another warm-up in place of the first")
        await until(has_begun, "its first tokens")

        valkey.freeze()
        try:

            async def is_at_rest() -> bool:
                return await fleet.in_engine(fleet.replicas[0]) == 0

            await until(is_at_rest, "the end of what was under way")
            before = await fleet.computed(0)
            got = await fleet.ask(tokens_of("a client", 256))
            assert got.prompt_tokens == 256
            await asyncio.sleep(1.5)
            assert await fleet.computed(0) == before + 256
            row = await fleet.job("warm_up", "w0", ended=False)
            assert (row["state"], row["end"]) == ("waiting", "")
        finally:
            valkey.thaw()
        job = await fleet.job("warm_up", "w0")
        assert (job["end"], job["done"]) == ("done", 1)
        assert (await fleet.ask(prefix + tokens_of("first", 70))).cached_tokens == LONG
