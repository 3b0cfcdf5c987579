"""Processes of a local fleet: started, waited for, and always taken down again.

Each child logs to a file of its own and says ``ready ...`` on standard output once it serves.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

POLL_S = 0.02
READY_S = 60.0
STOP_GRACE_S = 6.0
LOG_TAIL_BYTES = 2_000


class ChildFailedError(Exception):
    """A process of the local fleet ended or did not become ready; the text shows its log's end."""


@dataclass(slots=True)
class Child:
    """One process; ``words`` are those of its ready line."""

    name: str
    process: subprocess.Popen[bytes]
    output: Path
    log: Path
    words: list[str] = field(default_factory=list)

    def is_alive(self) -> bool:
        """Return whether the process runs."""
        return self.process.poll() is None

    def log_tail(self) -> str:
        """Return the end of what the process logged."""
        return self.log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")

    async def ready(self, timeout_s: float = READY_S) -> Self:
        """Wait for the ready line; raises ChildFailedError."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            for line in self.output.read_text(errors="replace").splitlines():
                if line.startswith("ready"):
                    self.words = line.split()[1:]
                    return self
            if not self.is_alive() or time.monotonic() > deadline_s:
                state = "is not ready" if self.is_alive() else f"ended ({self.process.returncode})"
                message = f"{self.name} {state}:\n{self.log_tail()}"
                raise ChildFailedError(message)
            await asyncio.sleep(POLL_S)


class Processes:
    """Children in start order; leaving the block stops them in reverse, none survives.

    One that has not ended ``stop_grace_s`` after it was told to is killed.
    """

    def __init__(
        self,
        directory: Path,
        environment: Mapping[str, str] | None = None,
        *,
        stop_grace_s: float = STOP_GRACE_S,
    ) -> None:
        self._directory = directory
        self._environment = environment
        self._stop_grace_s = stop_grace_s
        self._started = 0
        self.children: list[Child] = []

    async def __aenter__(self) -> Self:
        """Start nothing yet."""
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop every child."""
        self.stop_all()

    def start(self, name: str, *arguments: str) -> Child:
        """Start ``warmroute ARGUMENTS`` as a process called ``name``."""
        return self.start_command(name, [sys.executable, "-m", "warmroute", *arguments])

    def start_command(self, name: str, command: Sequence[str]) -> Child:
        """Start any command as a process called ``name``."""
        self._started += 1
        output = self._directory / f"{self._started:03d}-{name}.out"
        log = output.with_suffix(".log")
        with output.open("wb") as out, log.open("wb") as err:
            process = subprocess.Popen(  # noqa: S603 - our own program
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=None if self._environment is None else {**os.environ, **self._environment},
            )
        child = Child(name, process, output, log)
        self.children.append(child)
        return child

    def stop(
        self, child: Child, *, number: int = signal.SIGTERM, grace_s: float | None = None
    ) -> int:
        """Stop one child and return its exit code; it is killed when it takes too long."""
        if child.is_alive():
            child.process.send_signal(number)
        try:
            return child.process.wait(self._stop_grace_s if grace_s is None else grace_s)
        except subprocess.TimeoutExpired:
            child.process.kill()
            return child.process.wait()

    def stop_all(self) -> None:
        """Stop every child that still runs, the last started first."""
        alive = [child for child in reversed(self.children) if child.is_alive()]
        for child in alive:  # a router that is told by SIGTERM waits for load balancers to notice
            is_router = child.name.startswith("router")
            child.process.send_signal(signal.SIGINT if is_router else signal.SIGTERM)
        deadline_s = time.monotonic() + self._stop_grace_s
        for child in alive:
            try:
                child.process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
