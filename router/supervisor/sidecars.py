"""Sidecars that router processes asked for: they outlive the process that did, not the supervisor.

A process that is replaced would otherwise end the sidecar of a replica, and with it all that is
known of what the replica holds.
"""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Final, NamedTuple

from router.supervisor.message import Launch, SidecarEnded

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Mapping

    from router.supervisor.child import Child

    Starter = Callable[[list[str], Mapping[str, str]], subprocess.Popen[bytes]]

LOOK_S: Final = 0.25
STOP_S: Final = 4.0
STOP_POLL_S: Final = 0.02
EXIT_FAILED: Final = 1


class _Running(NamedTuple):
    child: Child
    number: int
    process: subprocess.Popen[bytes]


class Sidecars:
    """One for each replica at most; ``start`` makes a process that ends with this one."""

    def __init__(self, start: Starter) -> None:
        self._start = start
        self._running: dict[str, _Running] = {}

    def launch(self, child: Child, told: Launch) -> None:
        """Start the sidecar of a replica for ``child``; one that runs there is ended."""
        before = self._running.pop(told.replica, None)
        if before is not None and before.process.poll() is None:
            before.process.kill()
        try:
            process = self._start(list(told.command), told.environment)
        except OSError:
            child.send(SidecarEnded(told.sidecar, EXIT_FAILED))
            return
        self._running[told.replica] = _Running(child, told.sidecar, process)

    async def run(self) -> None:
        """Tell of those that ended, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()

    def look(self) -> None:
        """Tell of those that ended."""
        for replica, (child, number, process) in list(self._running.items()):
            status = process.poll()
            if status is not None:
                del self._running[replica]
                child.send(SidecarEnded(number, status))

    async def close(self) -> None:
        """End them all."""
        running, self._running = list(self._running.values()), {}
        for one in running:
            if one.process.poll() is None:
                one.process.send_signal(signal.SIGTERM)
        for _ in range(round(STOP_S / STOP_POLL_S)):
            if all(one.process.poll() is not None for one in running):
                break
            await asyncio.sleep(STOP_POLL_S)
        for one in running:
            if one.process.poll() is None:
                one.process.kill()
            one.process.wait()
