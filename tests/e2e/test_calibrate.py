"""``warmroute calibrate`` as a person runs it, against workers whose step model is known."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pytest
import pytest_asyncio
import yaml
from aiohttp import web

from sidecar.clock import LLAMA_8B_H100, StepCost
from sidecar.setting import WorkerSettings
from support.worker import running_worker, send_chat
from warmroute.sidecar import API_KEY_VARIABLE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from support.worker import RunningWorker

ROOT: Final = Path(__file__).parents[2]
MODEL: Final = "clock"
ATTEMPTS: Final = 3
QUIET_ERROR: Final = 0.02
"""By how much measurements scatter where nothing else wants the processor."""
TOLERANCE: Final = {
    "step_ms": 0.03,
    "prefill_token_ms": 0.06,
    "attention_pair_ms": 0.20,
    "decode_sequence_ms": 0.20,
    "kv_token_read_ms": 0.06,
}
"""What a sequence adds to a step is one part in 200 of it, and an attended pair much less."""


def calibrate(url: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "warmroute", "calibrate", "--engine", url, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        cwd=ROOT,
    )


def worker_of(**settings: Any) -> WorkerSettings:
    return WorkerSettings(compute="synthetic", served_model_name=MODEL, model=MODEL, **settings)


@pytest.fixture
def worker() -> Iterator[RunningWorker]:
    with running_worker(worker_of(preset="llama-8b-h100", speed_up=4.0)) as worker:
        yield worker


def _misses(cost: StepCost, noise: float) -> dict[str, tuple[float, float]]:
    """Return what was found and what is true where they differ by more than what is tolerated."""
    pairs = {name: (getattr(cost, name), getattr(LLAMA_8B_H100, name)) for name in TOLERANCE}
    return {
        name: (found, true)
        for name, (found, true) in pairs.items()
        if found != pytest.approx(true, rel=TOLERANCE[name] * noise)
    }


@pytest.mark.timeout(500)
def test_the_clock_of_a_worker_is_found_and_its_answers_are_predicted(tmp_path: Path) -> None:
    file = tmp_path / "cost.yaml"
    for attempt in range(ATTEMPTS):
        # Without pages of earlier attempts, and another order.
        with running_worker(worker_of(preset="llama-8b-h100")) as worker:
            flags = ("--seconds", "16", "--runs", "2", "--seed", str(attempt), "--json")
            ended = calibrate(worker.url, *flags, "--output", file)
        assert ended.returncode == 0, ended.stderr
        found = json.loads(ended.stdout)
        cost = msgspec.convert(yaml.safe_load(file.read_text()), StepCost)
        if found["fit"]["error"] < QUIET_ERROR and not _misses(cost, 1.0):
            break
    assert found["facts"]["step_tokens"] == 8192
    assert {"step_tokens", "max_sequences", "capacity_tokens"} <= set(found["facts"]["told"])
    noise = max(1.0, found["fit"]["error"] / QUIET_ERROR)  # that of the machine
    assert _misses(cost, noise) == {}, found["fit"]
    for name in TOLERANCE:
        assert found["fit"]["cost"][name] == pytest.approx(getattr(cost, name), rel=1e-4)
    assert 0 < found["fit"]["overhead_ms"] < 10 * noise
    assert sum(found["shares"].values()) == pytest.approx(1)
    assert len(found["runs"]) == 2
    for run in found["runs"]:
        assert run["predicted_ttft_ms"] == pytest.approx(run["ttft_ms"], rel=0.25 * noise), found[
            "runs"
        ]
        assert run["predicted_tpot_ms"] == pytest.approx(run["tpot_ms"], rel=0.25 * noise), found[
            "runs"
        ]


def test_a_person_reads_a_table_and_the_configuration(worker: RunningWorker) -> None:
    ended = calibrate(worker.url, "--seconds", "2", "--runs", "1")
    assert ended.returncode == 0, ended.stderr
    for words in (
        f"step times of {MODEL}, of at most 8,192 tokens a step",
        "step_ms",
        "kv_token_read_ms",
        "overhead_ms",
        "share",
        "router configuration: prefill: {token_ms: 0.0",
        "held-out runs",
        "median error of held-out runs: TTFT ",
    ):
        assert words in ended.stdout, words
    assert "probes" in ended.stderr


def test_other_traffic_is_told(worker: RunningWorker) -> None:
    with closing(send_chat(worker, {"stream": True, "max_tokens": 100_000, "ignore_eos": True})):
        ended = calibrate(worker.url, "--seconds", "1", "--runs", "0")
    assert ended.returncode == 0, ended.stderr
    assert "warning: the engine is busy: 1 requests run or wait that are not ours" in ended.stderr


def test_a_model_that_is_not_served_is_named(worker: RunningWorker) -> None:
    ended = calibrate(worker.url, "--model", "other")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert f"--model: other is not found: the engine serves {MODEL}" in ended.stderr


def test_nobody_at_the_address_is_told() -> None:
    ended = calibrate("http://127.0.0.1:1")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "no engine answers at http://127.0.0.1:1: " in ended.stderr


@pytest.mark.parametrize(
    ("url", "flags", "expected"),
    [
        ("http://192.0.2.1:8000", (), "is not on this machine; --allow-remote"),
        ("127.0.0.1:8000", (), "--engine: "),
        ("http://127.0.0.1:1", ("--seconds", "no"), "--seconds: "),
        ("http://127.0.0.1:1", ("--output", "/nowhere/cost.yaml"), "is in no directory"),
    ],
)
def test_wrong_usage_ends_with_2_before_anything_is_asked(
    url: str, flags: tuple[str, ...], expected: str
) -> None:
    ended = calibrate(url, *flags)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert expected in ended.stderr
    assert "Traceback" not in ended.stderr


class Stub:
    """An engine that serves a model and answers completions with ``status`` and ``body``."""

    def __init__(self) -> None:
        self.status = 400
        self.body = ""
        self.keys: set[str] = set()

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        return app

    async def _models(self, request: web.Request) -> web.Response:
        self.keys.add(request.headers.get("Authorization", ""))
        return web.json_response({"data": [{"id": MODEL, "max_model_len": 4096}]})

    async def _complete(self, request: web.Request) -> web.Response:
        self.keys.add(request.headers.get("Authorization", ""))
        return web.Response(status=self.status, text=self.body)


@pytest_asyncio.fixture
async def stub() -> AsyncIterator[tuple[Stub, str]]:
    served = Stub()
    runner = web.AppRunner(served.app())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield served, f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


EVENT: Final = 'data: {"choices":[{"text":"a"}]}\n\n'


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (400, "prompt: expected a string", "does not take token ids as a prompt: "),
        (200, EVENT, "the stream ended without [DONE]"),
        (200, EVENT * 3 + "data: [DONE]\n\n", "3 tokens came, not 1"),
        (200, 'data: {"error":{"message":"out of memory"}}\n\n', "broke off"),
        (200, "data: no\n\n", "DecodeError"),
    ],
)
async def test_an_engine_that_cannot_be_measured_says_why(
    stub: tuple[Stub, str], monkeypatch: pytest.MonkeyPatch, status: int, body: str, expected: str
) -> None:
    served, url = stub
    monkeypatch.setenv(API_KEY_VARIABLE, "the-key")
    served.status, served.body = status, body
    ended = await asyncio.to_thread(calibrate, url, "--seconds", "1")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert expected in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "the-key" not in ended.stderr
    assert served.keys == {"Bearer the-key"}
