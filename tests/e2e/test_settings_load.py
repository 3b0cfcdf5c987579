"""Settings that change under load: no request fails, and the log of decisions replays."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from replay.decision import replay_decisions
from replay.decision_file import DecisionLogReader
from support.setting_desk import SettingDesk, chat, one_more_router

if TYPE_CHECKING:
    from pathlib import Path

    from support.fleet import LocalFleet

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.mark.timeout(120)
async def test_changes_under_load_fail_no_request_and_the_log_replays_bit_for_bit(
    fleet: LocalFleet, tmp_path: Path
) -> None:
    path = tmp_path / "decisions.jsonl"
    patches: list[Any] = [
        {"policy": {"kind": "expected_ttft"}},
        {"policy": {"kind": "least_loaded"}, "hot_prefix": {"min_arrivals": 3}},
        {"policy": {"kind": "weighted", "w_queue": 0.1}, "drains": ["w0"]},
        {"policy": {"w_queue": 5.0}, "drains": None, "hold": {"enabled": True}},
        {"policy": {"kind": "session_hash"}, "hold": None, "admission": {"max_inflight": 3}},
        {"policy": None, "admission": None, "hot_prefix": None},
    ]
    async with one_more_router(fleet, decisions={"path": str(path)}) as router:
        await fleet.all_up(router)
        desk = SettingDesk(fleet, router)
        is_over = asyncio.Event()

        async def client(number: int) -> list[int]:
            statuses: list[int] = []
            while not is_over.is_set():
                text = f"topic {number % 3} " * 60 + f"{len(statuses)} of {number}"
                statuses.append(await chat(fleet, router, text, 1 + number))
            return statuses

        clients = [asyncio.create_task(client(number)) for number in range(6)]
        versions = []
        for patch in patches:
            await asyncio.sleep(0.3)
            status, told = await desk.set(patch)
            assert status == 200
            versions.append(told["version"])
        await asyncio.sleep(0.3)
        is_over.set()
        statuses = [status for each in await asyncio.gather(*clients) for status in each]
    assert set(statuses) == {200}

    logged = [(line.header, line.decision) for line in DecisionLogReader(path)]
    assert {decision.settings_version for _, decision in logged} >= set(versions)
    assert all(header.settings_version == one.settings_version for header, one in logged)
    kinds = {header.policy["kind"] for header, _ in logged}
    assert kinds == {"weighted", "expected_ttft", "least_loaded", "session_hash"}
    drained = [one.decision.replica for _, one in logged if one.settings_version == versions[2]]
    assert set(drained) == {"w1"}
    comparison = replay_decisions(path)
    assert comparison.first_difference is None
    assert comparison.is_exact
    assert comparison.requests == len(statuses)
