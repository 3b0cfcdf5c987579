"""Processes die at seeded points while clients keep asking; nobody may notice more than they must.

``WARMROUTE_CHAOS_SEED`` replays the blows of another seed.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, Final

import pytest
from msgspec import Struct

from chaos.evidence import End
from support.chaos import (
    Chaos,
    FixedFleet,
    Target,
    complaints,
    group_members,
    line_counts,
    plan_blows,
    unexplained,
)
from support.chaos_load import Load, Script, tally
from support.chaos_rest import (
    assert_at_rest,
    assert_nothing_is_shown,
    assert_serving_well,
    assert_told_truly,
    assert_warmth_is_known,
)
from support.fleet import MODEL, FleetPlan, until
from support.tokenizer import write_tokenizer
from support.valkey import ValkeyProcess

if TYPE_CHECKING:
    from pathlib import Path

    from support.chaos import Blow
    from support.chaos_load import Entry

SEED: Final = int(os.environ.get("WARMROUTE_CHAOS_SEED", "20"))
ENOUGH_S: Final = 300.0
LINES_AT_START: Final = 60
LINES_PER_POINT: Final = 5
LIMITS: Final = {
    "upstream": {
        "connect_timeout_s": 1.0,
        "first_byte_timeout_s": 6.0,
        "chunk_idle_timeout_s": 6.0,
    },
    "drain": {"grace_s": 4.0},
    "receipts": True,
}


class Trial(Struct, frozen=True, kw_only=True):
    """How much to strike, at what."""

    points: int
    requests: int
    replicas: int
    routers: int
    sessions: int

    def plan(self, tokenizer: Path, state_url: str) -> FleetPlan:
        """Return the fleet: pools that hold a few dozen prompts, on a real engine's clock."""
        return FleetPlan(
            state_url=state_url,
            tokenizer=tokenizer,
            replicas=self.replicas,
            routers=self.routers,
            pages=1_024,
            preset="llama-8b-h100",
            worker_flags=("--shutdown-grace-s", "2"),
            config=LIMITS,
        )


def tell(text: str) -> None:
    """Print for whoever watches, or for the report of a failure."""
    print(text, flush=True)  # noqa: T201


async def strike_all(fleet: FixedFleet, valkey: ValkeyProcess, load: Load, trial: Trial) -> Chaos:
    """Strike every point under load, then bring everything back and let the load end."""
    async with asyncio.TaskGroup() as tasks:
        chaos = Chaos(fleet, valkey, load, tasks)
        sessions = [tasks.create_task(load.session(index)) for index in range(trial.sessions)]
        try:
            for blow in plan_blows(SEED, trial.points):
                tell(f"{blow.number}: {blow.kind} {blow.down_s:.2f} s, {len(load.ledger)} requests")
                await chaos.strike(blow)
            await chaos.all_back()
            await until(lambda: load.has_asked(trial.requests), "enough requests", ENOUGH_S)
        finally:
            load.stop()
            chaos.thaw_all()
        await asyncio.wait(sessions)
    return chaos


async def endure(directory: Path, trial: Trial) -> list[Entry]:
    """Run a trial and check what must hold during it and after it; return the ledger."""
    tokenizer = write_tokenizer(directory / "tokenizer")
    logs = directory / "logs"
    logs.mkdir()
    script = Script(MODEL, tokenizer, SEED)
    before = group_members()
    with ValkeyProcess() as valkey:
        async with FixedFleet(logs, trial.plan(tokenizer, valkey.url)) as fleet:
            load = Load(script, [router.url for router in fleet.routers], SEED)
            began_s = time.monotonic()
            chaos = await strike_all(fleet, valkey, load, trial)
            tell(f"{trial.points} points in {time.monotonic() - began_s:.0f} s, seed {SEED}")
            tell(f"{tally(load.ledger, lambda entry: f'{entry.end} {entry.status}')}")
            bad = unexplained(load.ledger, chaos.outages)
            assert not bad, "\n".join(str(entry) for entry in bad)
            live_s = max((outage.until_s for outage in chaos.outages), default=0.0)
            await assert_at_rest(fleet)
            await assert_warmth_is_known(fleet, load, SEED)
            await assert_serving_well(fleet, load, 5)
            assert await assert_told_truly(fleet, load.ledger, live_s) >= 5 * trial.routers
            await assert_nothing_is_shown(fleet)
            await assert_at_rest(fleet)
    left = {command for pid, command in group_members() - before}
    assert not left, left
    assert not complaints(logs), "\n".join(complaints(logs))
    logged = line_counts(logs)
    assert sum(logged.values()) <= LINES_AT_START + LINES_PER_POINT * trial.points, logged
    return load.ledger


def kinds(blows: list[Blow]) -> dict[str, int]:
    """Return how often each kind of blow comes."""
    counts: dict[str, int] = {}
    for blow in blows:
        counts[blow.kind] = counts.get(blow.kind, 0) + 1
    return dict(sorted(counts.items()))


def test_the_plan_follows_from_its_seed_and_strikes_every_target_equally() -> None:
    assert plan_blows(1, 200) == plan_blows(1, 200) != plan_blows(2, 200)
    for seed in range(5):
        blows = plan_blows(seed, 200)
        for target in Target:
            assert sum(blow.target is target for blow in blows) == 40
        assert len(kinds(blows)) == 16


async def test_a_worker_that_died_and_is_back_at_once_is_known_to_be_empty(tmp_path: Path) -> None:
    """R-18, C-03: no health check fails, and yet what the last life held is never predicted."""
    tokenizer = write_tokenizer(tmp_path / "tokenizer")
    script = Script(MODEL, tokenizer, SEED)
    plan = FleetPlan(tokenizer=tokenizer, replicas=1, config=LIMITS)
    async with FixedFleet(tmp_path, plan) as fleet:
        load = Load(script, [fleet.router.url], SEED)
        await assert_serving_well(fleet, load, 3)
        [replica] = fleet.replicas
        replica.worker.process.kill()
        replica.worker.process.wait()
        replica.worker = await fleet.start_worker(replica.name).ready()

        async def is_known_to_be_empty() -> bool:
            seen = (await fleet.seen()).get(replica.name)
            return seen is not None and seen["up"] and not seen["resident_blocks"]

        await until(is_known_to_be_empty, "an empty replica")
        await assert_serving_well(fleet, load, 3)

        async def is_known_again() -> bool:
            return bool((await fleet.seen())[replica.name]["resident_blocks"] > 40)

        await until(is_known_again, "the blocks of the new life")


@pytest.mark.timeout(100)
async def test_ten_kill_points_leave_no_trace(tmp_path: Path) -> None:
    trial = Trial(points=10, requests=60, replicas=2, routers=1, sessions=4)
    ledger = await endure(tmp_path, trial)
    assert sum(entry.end is End.COMPLETE for entry in ledger) >= 10


@pytest.mark.heavy
@pytest.mark.timeout(12 * 60)
async def test_two_hundred_kill_points_leave_no_trace(tmp_path: Path) -> None:
    """No hung request, no leaked lease or page, no stack trace, over all five kinds of process."""
    trial = Trial(points=200, requests=1_000, replicas=3, routers=2, sessions=6)
    tell(f"{kinds(plan_blows(SEED, trial.points))}")
    ledger = await endure(tmp_path, trial)
    assert sum(entry.end is End.COMPLETE for entry in ledger) >= 500
