"""Runs bundled workers as real processes on free ports."""

from __future__ import annotations

import selectors
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final

import msgspec

from sidecar.setting import WorkerAddress, WorkerSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

_ROOT: Final = Path(__file__).resolve().parents[2]
_START_TIMEOUT_S: Final = 20.0
_STOP_TIMEOUT_S: Final = 15.0


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
def running_worker(settings: WorkerSettings) -> Iterator[RunningWorker]:
    """Run a worker; afterwards it must have ended with status 0 and without a stack trace."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "sidecar.worker", "--json", msgspec.json.encode(settings)],
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
