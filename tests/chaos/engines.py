"""The replica processes of the rig: each behind a link, with a registrar that follows it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from chaos.evidence import Count
from chaos.link import FaultLink
from chaos.registrar import Registrar
from chaos.wire import CutError, Wire, request_bytes

if TYPE_CHECKING:
    import subprocess

    from warmroute.local import Child, Processes

TESTS: Final = str(Path(__file__).parents[1])
ASK_S: Final = 8.0
START_S: Final = 30.0


class Engine:
    """One replica: ``name``, its process, its link."""

    def __init__(self, name: str, port: int, processes: Processes, directory: Path) -> None:
        self.name = name
        self.port = port
        self.link = FaultLink(port)
        self.ledger = directory / f"{name}.ledger"
        self.attempts = Count(self.ledger, "begin")
        self.lives: list[str] = []
        self._processes = processes
        self._key = ""
        self._child: Child | None = None
        self.registrar: Registrar | None = None
        self._following: asyncio.Task[None] | None = None

    async def open(self, key: bytes, state_url: str, about: tuple[str, bytes]) -> Self:
        """Start the process, its link and its registrar."""
        self._key = key.hex()
        self.ledger.touch()
        await self.start()
        await self.link.__aenter__()
        self.registrar = Registrar(self.name, self.link.url, self.ask, state_url, about)
        self._following = asyncio.create_task(self.registrar.run(), name=f"registrar {self.name}")
        return self

    async def close(self) -> None:
        """End all three."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        self.send(signal.SIGCONT)
        self.kill()
        await self.link.__aexit__()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The process of this life."""
        assert self._child is not None
        return self._child.process

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        return self._child is not None and self._child.is_alive()

    async def start(self) -> None:
        """Begin another life, with an empty cache, and wait until it answers."""
        life = secrets.token_hex(4)
        told = {"name": self.name, "port": self.port, "key": self._key, "life": life}
        words = json.dumps(told | {"ledger": str(self.ledger)})
        # No site packages: it starts in a tenth of the time.
        command = ["env", f"PYTHONPATH={TESTS}", sys.executable, "-S", "-m", "chaos.replica", words]
        self._child = self._processes.start_command(f"replica-{self.name}", command)
        self.lives.append(life)
        deadline_s = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError, TimeoutError):
                await self.ask("/health")
                return
            assert time.monotonic() < deadline_s, f"{self.name} does not start"
            assert self.is_alive, self._child.log_tail()
            await asyncio.sleep(0.03)

    def kill(self) -> None:
        """End its life at once, and refuse connections as its port does."""
        if self.is_alive:
            self.process.kill()
            self.process.wait()
            self.link.notice_death()

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        if self.is_alive:
            os.kill(self.process.pid, number)

    async def mode(self, kind: str, **about: Any) -> None:
        """Tell the process how to behave."""
        await self.ask("/chaos/mode", json.dumps({"kind": kind, **about}).encode())

    async def ask(self, path: str, body: bytes = b"") -> Any:
        """Ask the process itself, not by the link; raises OSError and TimeoutError."""
        async with asyncio.timeout(ASK_S):
            try:
                wire = await Wire.open(self.port)
            except CutError as error:
                raise OSError(str(error)) from None
            try:
                wire.send(request_bytes(path.partition("?")[0] + _query(path), body, {}))
                head = await wire.head()
                received = b"".join([part async for part in wire.body(head)])
            except CutError as error:
                raise OSError(str(error)) from None
            finally:
                wire.close()
        return json.loads(received)

    async def state(self) -> dict[str, Any]:
        """Return what it computes now."""
        told: dict[str, Any] = await self.ask("/chaos/state")
        return told


def _query(path: str) -> str:
    _, mark, query = path.partition("?")
    return mark + query
