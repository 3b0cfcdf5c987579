"""Faults at a real worker process: told to stop, left by clients, out of time. No page is lost."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from sidecar.setting import WorkerSettings
from support.worker import (
    RunningWorker,
    get_text,
    metrics_of,
    post_json,
    running_worker,
    send_chat,
    wait_for_metric,
)

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator

ROOT: Final = Path(__file__).parents[2]
MODEL: Final = "tiny"
LONG: Final = 12_000
"""Output tokens that take longer than any test."""
LONG_PROMPT: Final = "a prompt that takes many steps " * 130
HANGS_S: Final = 60.0
STOP_S: Final = 20.0
"""The promise is 1 s from the signal on, half of it grace; the rest is for a busy machine."""
COMPUTES: Final[dict[str, dict[str, Any]]] = {
    "numpy": {"compute": "numpy", "threads": 1, "max_num_batched_tokens": 64},
    "synthetic": {"compute": "synthetic", "preset": "llama-8b-h100"},
    "slow": {"compute": "synthetic", "preset": "llama-8b-h100", "speed_up": 0.005},
}
"""``slow`` takes more than 1 s for a step: whatever happens, happens in the middle of one."""


@dataclass(slots=True)
class Audited:
    """A worker that writes an audit, and what the audit said once the worker had ended."""

    worker: RunningWorker
    audit: dict[str, Any]


@contextmanager
def audited(folder: Path, compute: str, **fields: Any) -> Iterator[Audited]:
    """Run a worker; afterwards its audit must be without fault, and without anything open."""
    path = folder / "audit"
    settings = WorkerSettings(
        model=MODEL, pages=2048, audit=str(path), **(COMPUTES[compute] | fields)
    )
    with running_worker(settings) as worker:
        running = Audited(worker, {})
        yield running
    ended = subprocess.run(
        [sys.executable, "-m", "warmroute", "kv", "audit", str(path), "--final", "--json"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    running.audit |= json.loads(ended.stdout)
    assert running.audit["open_requests"] == []
    assert running.audit["torn_files"] == []
    pages = running.audit["final_pages"]["device"]
    assert (pages["allocated"], pages["used"], pages["reserved"]) == (0, 0, 0)


def held_pages(worker: RunningWorker) -> int:
    """Return how many pages requests hold, or wait for."""
    [device] = json.loads(get_text(worker, "/debug/kv"))["tiers"]
    assert sum(device["states"].values()) == device["total_pages"]
    return sum(device["states"][state] for state in ("allocated", "used", "reserved"))


def wait_until_idle(worker: RunningWorker) -> None:
    """Wait until nothing runs, nothing waits and no page is held."""
    wait_for_metric(worker, "num_requests_running", 0, HANGS_S)
    wait_for_metric(worker, "num_requests_waiting", 0, HANGS_S)
    assert held_pages(worker) == 0


def generated_tokens(worker: RunningWorker) -> float:
    return metrics_of(worker)["generation_tokens_total"]


def read_events(connection: socket.socket, events: int) -> bytes:
    """Read until so many events have come."""
    raw = b""
    while raw.count(b"data: ") < events:
        data = connection.recv(65536)
        assert data, raw
        raw += data
    return raw


def rest_of(connection: socket.socket) -> bytes:
    raw = b""
    while data := connection.recv(65536):
        raw += data
    return raw


def error_code(raw: bytes) -> int:
    """Return the code of the error object at the end of ``raw``."""
    found = re.search(rb'\{"error":.*"code":(\d+)\}\}', raw)
    assert found, raw
    return int(found[1])


class TestStop:
    @pytest.mark.parametrize("compute", COMPUTES)
    def test_streams_end_with_an_error_event_when_the_worker_is_told_to_stop(
        self, tmp_path: Path, compute: str
    ) -> None:
        """Three in mid-stream, one that waits and one that is not streamed; default grace."""
        with audited(tmp_path, compute, max_num_seqs=4) as running, ExitStack() as stack:
            worker = running.worker

            def send(**body: Any) -> socket.socket:
                body = {"max_tokens": LONG, "ignore_eos": True} | body
                return stack.enter_context(closing(send_chat(worker, body)))

            streams = [send(stream=True) for _ in range(3)]
            whole = send()
            heads = [read_events(stream, 2) for stream in streams]
            wait_for_metric(worker, "num_requests_running", 4, HANGS_S)
            waiting = send(stream=True)
            wait_for_metric(worker, "num_requests_waiting", 1, HANGS_S)
            signalled_s = time.monotonic()
            worker.process.terminate()
            tails = [rest_of(stream) for stream in [*streams, waiting]]
            answer = rest_of(whole)
            assert time.monotonic() - signalled_s < STOP_S
            assert worker.process.wait(HANGS_S) == 0
        for raw in [*map(b"".join, zip(heads, tails, strict=False)), tails[-1]]:
            assert raw.startswith(b"HTTP/1.1 200 ")
            assert raw.rstrip().endswith(b"0")  # the body ends as a whole one
            assert error_code(raw) == 503
            assert b"[DONE]" not in raw
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert error_code(answer) == 503
        assert running.audit["ended_requests"] == {"cancelled": 5}

    def test_a_worker_that_stops_in_the_middle_of_a_prompt_says_so(self, tmp_path: Path) -> None:
        """No token was sent yet: still the answer ends with an error, not as a clean one."""
        with audited(tmp_path, "numpy", max_num_batched_tokens=16) as running:
            worker = running.worker
            with closing(_send_prompt(worker, stream=True)) as connection:
                wait_for_metric(worker, "num_requests_running", 1, HANGS_S)
                worker.process.terminate()
                raw = rest_of(connection)
            assert worker.process.wait(HANGS_S) == 0
        assert error_code(raw) == 503
        assert raw.count(b"data: ") == 2  # the role, and the error
        assert b"[DONE]" not in raw


def _send_prompt(worker: RunningWorker, **body: Any) -> socket.socket:
    messages = [{"role": "user", "content": LONG_PROMPT}]
    return send_chat(worker, {"messages": messages, "max_tokens": 8} | body)


def _leave_before_prefill(worker: RunningWorker) -> None:
    with closing(send_chat(worker, {"max_tokens": LONG, "ignore_eos": True})):
        wait_for_metric(worker, "num_requests_running", 1, HANGS_S)
        waiting = _send_prompt(worker, stream=True)
        wait_for_metric(worker, "num_requests_waiting", 1, HANGS_S)
        waiting.close()
        wait_for_metric(worker, "num_requests_waiting", 0, HANGS_S)
        assert metrics_of(worker)["num_requests_running"] == 1


def _leave_in_prefill(worker: RunningWorker) -> None:
    before = generated_tokens(worker)
    for is_stream in (True, False):
        connection = _send_prompt(worker, stream=is_stream)
        wait_for_metric(worker, "num_requests_running", 1, HANGS_S)
        assert held_pages(worker) > 0
        connection.close()
        wait_until_idle(worker)
    assert generated_tokens(worker) == before, "the prompt was through: not a test of prefill"


def _leave_between(worker: RunningWorker) -> None:
    connection = send_chat(worker, {"stream": True, "max_tokens": LONG, "ignore_eos": True})
    raw = read_events(connection, 2)
    assert re.search(rb'"id":"chatcmpl-[0-9a-f]{32}"', raw)
    connection.close()


def _leave_in_decode(worker: RunningWorker) -> None:
    connections = [
        send_chat(worker, {"stream": True, "n": 2, "max_tokens": LONG, "ignore_eos": True})
        for _ in range(3)
    ]
    for connection in connections:
        read_events(connection, 3)
    assert held_pages(worker) > 0
    for connection in connections:
        connection.close()


class TestLeave:
    @pytest.mark.parametrize("compute", ["numpy", "slow"])
    @pytest.mark.parametrize(
        ("leave", "limits", "requests"),
        [
            (_leave_before_prefill, {"max_num_seqs": 1}, 2),
            (_leave_in_prefill, {"max_num_batched_tokens": 16}, 2),
            (_leave_between, {}, 1),
            (_leave_in_decode, {}, 6),
        ],
    )
    def test_a_client_that_leaves_frees_its_pages_and_nothing_more_is_generated_for_it(
        self,
        tmp_path: Path,
        compute: str,
        leave: Callable[[RunningWorker], None],
        limits: dict[str, int],
        requests: int,
    ) -> None:
        """B40, C78: at four points; what runs counts 0 again, and ids cannot be guessed."""
        with audited(tmp_path, compute, shutdown_grace_s=0, **limits) as running:
            leave(running.worker)
            wait_until_idle(running.worker)
            generated = generated_tokens(running.worker)
            status, _ = post_json(
                running.worker, "/v1/completions", {"model": MODEL, "prompt": "x", "max_tokens": 1}
            )
            assert status == 200
            assert generated_tokens(running.worker) == generated + 1
            assert held_pages(running.worker) == 0
        assert running.audit["ended_requests"] == {"cancelled": requests, "done": 1}


class TestTimeout:
    @pytest.mark.parametrize("compute", ["numpy", "slow"])
    def test_a_request_out_of_time_is_told_so_wherever_it_is_and_leaves_no_page(
        self, tmp_path: Path, compute: str
    ) -> None:
        """In decode, streamed and not, and in the queue; then the next request is served."""
        fields = {"request_timeout_s": 0.8, "max_num_seqs": 2, "shutdown_grace_s": 0}
        long = {"max_tokens": LONG, "ignore_eos": True}
        with audited(tmp_path, compute, **fields) as running:
            worker = running.worker
            with (
                closing(send_chat(worker, long | {"stream": True})) as stream,
                closing(send_chat(worker, long)) as whole,
            ):
                wait_for_metric(worker, "num_requests_running", 1, HANGS_S)
                with closing(send_chat(worker, long | {"stream": True})) as waiting:
                    head = whole.recv(65536)
                    assert head.startswith(b"HTTP/1.1 504 ")
                    raws = [_until_error(stream), _until_error(waiting)]
            assert [error_code(raw) for raw in raws] == [504, 504]
            assert b"[DONE]" not in b"".join(raws)
            wait_until_idle(worker)
        assert running.audit["ended_requests"] == {"timed_out": 3}

    def test_what_ends_in_time_is_not_touched(self, tmp_path: Path) -> None:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 4, "ignore_eos": True}
        with audited(tmp_path, "numpy", request_timeout_s=60) as running:
            status, answer = post_json(running.worker, "/v1/completions", body)
            assert (status, answer["usage"]["completion_tokens"]) == (200, 4)
        assert running.audit["ended_requests"] == {"done": 1}


def _until_error(connection: socket.socket) -> bytes:
    raw = b""
    while b'"error"' not in raw or not raw.rstrip().endswith(b"0"):
        data = connection.recv(65536)
        assert data, raw
        raw += data
    return raw
