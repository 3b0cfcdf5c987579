"""Recording and shadow of a real router: what was sent becomes a trace that replays and tunes."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import pytest_asyncio
import zstandard

from replay.decision import replay_decisions
from replay.decision_trace import LoggedTrace
from replay.format.file import open_trace
from support.conversation import at_once
from support.fleet import MODEL, FleetPlan, LocalFleet, Router, until
from support.tokenizer import write_tokenizer
from warmroute.cli import main

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.asyncio(loop_scope="module")

CANARY = "canary words of a client"
REQUESTS = 60


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalFleet]:
    folder = tmp_path_factory.mktemp("fleet")
    plan = FleetPlan(replicas=2, routers=0, tokenizer=write_tokenizer(folder / "tokenizer"))
    async with LocalFleet(folder, plan) as running:
        yield running


def turn(number: int) -> dict[str, Any]:
    """Return a turn of one of seven conversations that grow, and share their beginnings.

    An odd number, as turns of one conversation come to be even and odd requests of a round robin.
    """
    talk, turns = number % 7, number // 7
    system = f"{CANARY} {talk % 2} " * 60
    messages = [{"role": "system", "content": system}]
    messages += [{"role": "user", "content": f"talk {talk} turn {at} " * 40} for at in range(turns)]
    messages.append({"role": "user", "content": f"talk {talk} now " * 20})
    return {"model": MODEL, "max_tokens": 1 + number % 4, "messages": messages}


async def send_turns(fleet: LocalFleet, router: Router) -> None:
    async def send(number: int) -> int:
        headers = {"x-request-id": "canary-id"}
        url = f"{router.url}/v1/chat/completions"
        async with fleet.http.post(url, json=turn(number), headers=headers) as answer:
            await answer.read()
            return answer.status

    assert set(await at_once(range(REQUESTS), 4, send)) == {200}


async def command(*words: str) -> int:
    return await asyncio.to_thread(main, list(words))


async def test_a_recording_is_the_trace_of_what_was_sent_and_replays_and_tunes(
    fleet: LocalFleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """S-13."""
    log, path = tmp_path / "decisions.jsonl", tmp_path / "trace.jsonl.zst"
    router = await fleet.start_router(decisions={"path": str(log), "chains": True})
    await fleet.all_up(router, 2)
    await send_turns(fleet, router)
    admin = ("--admin", router.admin_url)
    assert await command("record", *admin, "--last", "--output", str(path)) == 0
    assert f"{REQUESTS} requests" in capsys.readouterr().out
    last = tmp_path / "last.jsonl"
    assert await command("record", *admin, "--last", "7", "--output", str(last)) == 0
    minutes = tmp_path / "minutes.jsonl"
    assert await command("record", *admin, "--minutes", "30", "--output", str(minutes)) == 0
    assert await asyncio.to_thread(fleet.processes.stop, router.child) == 0

    plain = zstandard.ZstdDecompressor().decompressobj().decompress(path.read_bytes())
    assert b"canary" not in plain.lower()
    assert minutes.read_bytes() == plain
    rows = [msgspec.json.decode(line) for line in plain.splitlines()[1:]]
    assert last.read_bytes().count(b"\n") == 8
    recorded, logged = list(open_trace(path)), list(LoggedTrace(log))
    assert [(one.prompt_tokens, one.output_tokens, one.chain) for one in recorded] == [
        (one.prompt_tokens, one.output_tokens, one.chain) for one in logged
    ]
    for ours, theirs in zip(recorded, logged, strict=True):
        assert ours.arrival_s == pytest.approx(theirs.arrival_s, abs=1e-5)
    decided = replay_decisions(log).logged
    assert Counter(row["replica"] for row in rows) == decided.requests_by_replica
    assert sum(row["predicted_cached_tokens"] for row in rows) == decided.cached_tokens
    assert {row["outcome"] for row in rows} == {"done"}

    out = tmp_path / "replay.json"
    words = ("replay", str(path), "--policy", "round_robin", "--policy", "expected_ttft")
    assert await command(*words, "--json", str(out)) == 0
    assert out.stat().st_size > 0
    tuned = ("tune", str(path), "--budget", "1", "--seeds", "2", "--check-seeds", "3")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "warmroute", *tuned, "--loads", "0.5"), cwd=tmp_path, stdout=PIPE
    )
    out_text, _ = await process.communicate()
    assert process.returncode == 0
    assert b"expected_ttft" in out_text


async def test_without_room_there_is_no_recording_and_nothing_to_fetch(
    fleet: LocalFleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    router = await fleet.start_router(recording={"max_bytes": 0})
    trace = tmp_path / "trace"
    output = ("--output", str(trace))
    assert await command("record", "--admin", router.admin_url, *output) == 2
    assert "recording.max_bytes" in capsys.readouterr().err
    assert await command("shadow", "--admin", router.admin_url) == 2
    assert "shadow.policy" in capsys.readouterr().err
    assert not trace.exists()
    assert await asyncio.to_thread(fleet.processes.stop, router.child) == 0


async def test_a_shadow_policy_is_asked_of_each_request_and_says_what_the_log_says(
    fleet: LocalFleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "decisions.jsonl"
    router = await fleet.start_router(
        policy={"kind": "expected_ttft"},
        shadow={"policy": {"kind": "round_robin"}, "cpu_fraction": 0.5},
        decisions={"path": str(log)},
    )
    await fleet.all_up(router, 2)
    await send_turns(fleet, router)

    async def is_asked() -> bool:
        report = await fleet.get(f"{router.admin_url}/admin/shadow")
        return bool(report["overall"]["decisions"] + report["skipped"] == REQUESTS)

    await until(is_asked, "the shadow policy was asked of every request")
    report = await fleet.get(f"{router.admin_url}/admin/shadow")
    assert await command("shadow", "--admin", router.admin_url) == 0
    assert "round_robin beside expected_ttft" in capsys.readouterr().out
    gauges = await fleet.gauges(router.admin_url)
    assert await asyncio.to_thread(fleet.processes.stop, router.child) == 0

    again = replay_decisions(log)
    assert again.is_exact, "the decisions are those of the active policy alone"
    assert report["skipped"] == 0
    other = {one["request_id"]: one for one in report["worst"]}
    assert 0 < report["overall"]["same_replica"] < REQUESTS
    assert len(other) == min(10, REQUESTS - report["overall"]["same_replica"])
    assert report["overall"]["hit_change_ratio"]["mean"] < 0
    assert gauges["warmroute_shadow_decisions_total"] == REQUESTS
