"""Runs bundled workers as real processes on free ports."""

from __future__ import annotations

import json
import selectors
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final
from urllib.error import HTTPError

import msgspec

from sidecar.setting import WorkerAddress, WorkerSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

_ROOT: Final = Path(__file__).resolve().parents[2]
_START_TIMEOUT_S: Final = 100.0
_STOP_TIMEOUT_S: Final = 60.0


@dataclass(slots=True)
class RunningWorker:
    """A worker process and where it listens."""

    process: subprocess.Popen[str]
    address: WorkerAddress
    settings: WorkerSettings
    log: IO[str]

    @property
    def url(self) -> str:
        """``http://host:port``."""
        return self.address.http

    def logged(self) -> str:
        """Return what it wrote to stderr so far."""
        self.log.seek(0)
        return self.log.read()

    def stop(self) -> int:
        """Send SIGTERM, wait, and return the exit status."""
        self.process.terminate()
        return self.process.wait(_STOP_TIMEOUT_S)


@contextmanager
def running_worker(
    settings: WorkerSettings, python: str | Path = sys.executable
) -> Iterator[RunningWorker]:
    """Run a worker; afterwards it must have ended with status 0 and without a stack trace."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [python, "-m", "sidecar.worker", "--json", msgspec.json.encode(settings)],
            cwd=_ROOT,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        try:
            worker = RunningWorker(process, _address(process, log), settings, log)
            yield worker
            status = worker.stop() if process.poll() is None else process.returncode
            assert "Traceback" not in worker.logged(), worker.logged()
            assert status == 0, (status, worker.logged())
        finally:
            if process.poll() is None:
                process.kill()
                process.wait(_STOP_TIMEOUT_S)
            if process.stdout is not None:
                process.stdout.close()


def _address(process: subprocess.Popen[str], log: IO[str]) -> WorkerAddress:
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        has_line = bool(selector.select(_START_TIMEOUT_S))
    words = process.stdout.readline().split() if has_line else []
    if len(words) != 6:  # "ready URL events ENDPOINT replay ENDPOINT"
        log.seek(0)
        message = f"the worker did not start: {log.read()}"
        raise AssertionError(message)
    return WorkerAddress(http=words[1], events=words[3], replay=words[5])


def get_text(worker: RunningWorker, path: str) -> str:
    """Return the body of a GET."""
    with urllib.request.urlopen(f"{worker.url}{path}", timeout=60) as response:  # noqa: S310 - http
        return str(response.read().decode())


def post_json(worker: RunningWorker, path: str, body: Any) -> tuple[int, Any]:
    """Return status and decoded body of a POST; ``body`` may be raw bytes."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(f"{worker.url}{path}", raw, method="POST")  # noqa: S310 - http
    try:
        with urllib.request.urlopen(request, timeout=60) as response:  # noqa: S310 - http
            return response.status, json.loads(response.read())
    except HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def metrics_of(worker: RunningWorker) -> dict[str, float]:
    """Return the worker's metrics by their names without ``vllm:``."""
    lines = [line for line in get_text(worker, "/metrics").splitlines() if not line.startswith("#")]
    pairs = (line.rsplit(" ", 1) for line in lines)
    return {name.split("{")[0].removeprefix("vllm:"): float(value) for name, value in pairs}


def send_chat(worker: RunningWorker, body: dict[str, Any]) -> socket.socket:
    """Send a chat request on a connection of its own."""
    host, port = worker.url.removeprefix("http://").split(":")
    raw = json.dumps(
        {"model": worker.settings.model, "messages": [{"role": "user", "content": "hi"}]} | body
    )
    connection = socket.create_connection((host, int(port)), timeout=60)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: w\r\nContent-Length: {len(raw)}\r\n\r\n"
    connection.sendall((head + raw).encode())
    return connection


def wait_for_metric(worker: RunningWorker, name: str, value: float, within_s: float) -> float:
    """Return after how long the metric had ``value``."""
    start_s = time.monotonic()
    while metrics_of(worker)[name] != value:
        assert time.monotonic() - start_s < within_s, f"{name} is not {value}: {metrics_of(worker)}"
    return time.monotonic() - start_s
