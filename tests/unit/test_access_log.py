"""Which requests are logged, and what is written of them; a sink that hangs holds up nobody."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from typing import TYPE_CHECKING, Any

from msgspec import structs
from prometheus_client import CollectorRegistry

from router import line_log
from router.access_log import AccessLog, AccessLogSettings, open_access_log
from router.account import Call
from router.line_log import LineLog
from router.trace import Attempt, DecisionRecord
from support.logged import Logging, record_of

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def record(**changes: Any) -> DecisionRecord:
    choices, routed = Logging().decide(range(100))
    return structs.replace(record_of(choices, routed), **changes)


def call() -> Call:
    return Call("r1", None, "/v1/completions", 0.0, 0.0)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def logged(path: Path, *records: DecisionRecord, **settings: Any) -> list[dict[str, Any]]:
    """Return what a log with these settings has of these requests."""
    log = open_access_log(
        AccessLogSettings(path=str(path), **settings), clock=float, rng=random.Random(7)
    )
    assert log is not None
    for one in records:
        log.note(call(), one)
    await log.lines.close()
    return lines_of(path)


async def test_a_line_tells_of_request_decision_and_end(tmp_path: Path) -> None:
    [line] = await logged(
        tmp_path / "log", record(tenant="acme", trace_id="t" * 32, reported_output_tokens=3)
    )
    assert line["unix_s"] > 1_700_000_000
    told = {name: line[name] for name in ("method", "path", "model", "tenant", "status", "outcome")}
    assert told == {
        "method": "POST",
        "path": "/v1/completions",
        "model": "m",
        "tenant": "acme",
        "status": 200,
        "outcome": "done",
    }
    assert (line["trace_id"], line["client_request_id"]) == ("t" * 32, "CANARY-of-the-client")
    assert (line["ttft_s"], line["duration_s"], line["attempts"]) == (0.1, 0.3, 1)
    assert (line["prompt_tokens"], line["cached_tokens"], line["output_tokens"]) == (100, 0, 3)
    assert line["replica"]
    assert line["reason"] in {"prefix", "spill", "load", "rule"}
    assert line["request_bytes"] is None


async def test_a_line_has_the_side_of_a_canary(tmp_path: Path) -> None:
    sides = ("control", "candidate", None)
    lines = await logged(tmp_path / "log", *(record(side=side) for side in sides))
    assert [line["side"] for line in lines] == list(sides)


async def test_what_is_not_known_is_null_and_never_0(tmp_path: Path) -> None:
    """A request that was refused before it was read."""
    [line] = await logged(
        tmp_path / "log",
        record(
            status=401, outcome="refused", attempts=(), model=None, prompt_tokens=0, ttft_s=None,
            reported_prompt_tokens=None, reported_cached_tokens=None,
        ),
    )  # fmt: skip
    unknown = {name for name, value in line.items() if value is None}
    assert unknown >= {"replica", "reason", "model", "ttft_s", "prompt_tokens", "cached_tokens"}
    assert line["attempts"] == 0


async def test_a_sample_leaves_out_good_requests_only(tmp_path: Path) -> None:
    good = [record(request_id=f"good-{number}") for number in range(400)]
    bad = [
        record(request_id="failed", status=502, outcome="failed"),
        record(request_id="refused", status=429, outcome="refused"),
        record(request_id="left", status=499, outcome="cancelled"),
        record(request_id="engine", status=400),
        record(request_id="slow", duration_s=2.0),
    ]
    lines = await logged(tmp_path / "log", *good, *bad, sample=0.25, slow_ms=2_000)
    ids = [line["request_id"] for line in lines]
    assert ids[-5:] == ["failed", "refused", "left", "engine", "slow"]
    assert 60 < len(ids) - 5 < 140
    none = await logged(tmp_path / "none", *good, *bad, sample=0)
    assert [line["request_id"] for line in none] == ["failed", "refused", "left", "engine"]
    slow = await logged(tmp_path / "slow", *good, bad[-1], sample=0, slow_ms=2_000)
    assert [line["request_id"] for line in slow] == ["slow"]


async def test_the_error_is_that_of_the_last_attempt(tmp_path: Path) -> None:
    first = record()
    attempts = (Attempt(first.attempts[0].decision, "failed", "replica_died"),)
    [line] = await logged(
        tmp_path / "log", structs.replace(first, attempts=attempts, outcome="failed", status=502)
    )
    assert line["error"] == "replica_died"
    attempts = (Attempt(first.attempts[0].decision, "done", "complete"),)
    [good] = await logged(tmp_path / "good", structs.replace(first, attempts=attempts))
    assert good["error"] is None


async def test_a_sink_that_hangs_holds_up_nobody_and_what_is_lost_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    goes_on = threading.Event()

    class Hanging:
        def write(self, _: bytes) -> None:
            goes_on.wait(20)

        def close(self) -> None:
            pass

    monkeypatch.setattr(line_log, "MAX_QUEUED_BYTES", 100_000)
    monkeypatch.setattr(line_log, "CLOSE_S", 0.05)
    lines = LineLog("access log", "nowhere", Hanging(), float)
    log = AccessLog(AccessLogSettings(path="stderr"), lines, random.Random(1).random)
    registry = CollectorRegistry()
    registry.register(log)
    one = record()
    for _ in range(2_000):
        log.note(call(), one)
    assert lines.dropped > 1_000
    assert registry.get_sample_value("warmroute_access_log_dropped_total") == lines.dropped
    await asyncio.wait_for(lines.close(), 20)
    goes_on.set()


async def test_a_sink_that_fails_in_a_way_of_its_own_ends_no_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    written: list[bytes] = []

    class Failing:
        def write(self, lines: bytes) -> None:
            if not written:
                written.append(b"")
                message = "can't start new thread"
                raise RuntimeError(message)
            written.append(lines)

        def close(self) -> None:
            pass

    monkeypatch.setattr(line_log, "RETRY_S", 0.0)
    lines = LineLog("access log", "nowhere", Failing(), float)
    log = AccessLog(AccessLogSettings(path="stderr"), lines, random.Random(1).random)
    log.note(call(), record())
    await lines.close()
    assert (lines.written, lines.dropped) == (1, 0)
    assert json.loads(written[-1])["status"] == 200
    assert any("can't start new thread" in one.message for one in caplog.records)


async def test_stderr_is_a_place_too(capfd: pytest.CaptureFixture[str]) -> None:
    log = open_access_log(AccessLogSettings(path="stderr"), clock=float, rng=random.Random(1))
    assert log is not None
    log.note(call(), record())
    await log.lines.close()
    [line] = capfd.readouterr().err.splitlines()
    assert json.loads(line)["status"] == 200


def test_without_a_path_there_is_no_log() -> None:
    assert open_access_log(AccessLogSettings(), clock=float, rng=random.Random(1)) is None
