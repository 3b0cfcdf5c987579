"""Engines for tests as real processes: vLLM's, or the bundled worker's.

An engine may be several processes: they are a process group of their own and end together. Engines
get less of a small machine than the router and the sidecars: those are what is tested. No session
of their own, because Linux weighs niceness within a session only.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import aiohttp

from support.port import free_ports

if TYPE_CHECKING:
    from types import TracebackType

READY_S: Final = 240.0
STOP_GRACE_S: Final = 10.0
LOG_TAIL_BYTES: Final = 3_000
POLL_S: Final = 0.1
ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # serves /reset_prefix_cache
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOOPBACK_IP": "127.0.0.1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


class EngineStartError(Exception):
    """An engine does not serve; the text has the end of its log."""


@dataclass(slots=True)
class Engine:
    """One engine, which keeps its ports over restarts; ``lives`` counts its starts."""

    name: str
    port: int
    events_port: int
    replay_port: int
    process: subprocess.Popen[bytes] | None = None
    log: Path = Path()
    lives: int = 0

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def is_alive(self) -> bool:
        """Whether its first process runs."""
        return self.process is not None and self.process.poll() is None


Command = Callable[[Engine], list[str]]
"""The words that start an engine on its ports."""


class Engines:
    """Engines that ``command`` starts and that log below ``directory``; none outlives the block."""

    def __init__(self, directory: Path, command: Command) -> None:
        self._directory = directory
        self._command = command
        self.engines: list[Engine] = []

    async def __aenter__(self) -> Self:
        """Start nothing yet."""
        self._http = aiohttp.ClientSession()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop every engine."""
        await self._http.close()
        for engine in self.engines:
            if engine.is_alive and engine.process is not None:
                engine.process.terminate()
        for engine in self.engines:
            await asyncio.to_thread(_end, engine, STOP_GRACE_S)

    def add(self, name: str) -> Engine:
        """Start a new engine."""
        port, events_port, replay_port = free_ports(3)
        engine = Engine(name, port, events_port, replay_port)
        self.engines.append(engine)
        self.start(engine)
        return engine

    def start(self, engine: Engine) -> None:
        """Start ``engine``, once more if it ran before."""
        assert not engine.is_alive
        engine.lives += 1
        engine.log = self._directory / f"{engine.name}-{engine.lives}.log"
        with engine.log.open("wb") as log:
            engine.process = subprocess.Popen(
                ["nice", "-n", "10", *self._command(engine)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **ENVIRONMENT},
                process_group=0,
            )

    async def ready(self, engine: Engine) -> None:
        """Wait until ``engine`` serves; raises EngineStartError with the end of its log."""
        deadline_s = time.monotonic() + READY_S
        while not await self._is_healthy(engine):
            if not engine.is_alive or time.monotonic() > deadline_s:
                tail = engine.log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
                message = f"{engine.name} does not serve:\n{tail}"
                raise EngineStartError(message)
            await asyncio.sleep(POLL_S)

    async def _is_healthy(self, engine: Engine) -> bool:
        try:
            async with self._http.get(f"{engine.url}/health") as answer:
                return answer.status == 200
        except aiohttp.ClientError:
            return False

    async def strike(self, engine: Engine) -> None:
        """Let ``engine`` die at once, in the middle of whatever it does."""
        await asyncio.to_thread(_end, engine, 0.0)

    async def reset(self, engine: Engine) -> None:
        """Empty the cache of ``engine``, as soon as nothing runs there."""
        async with asyncio.timeout(20):
            while True:
                async with self._http.post(f"{engine.url}/reset_prefix_cache") as answer:
                    if (await answer.json())["success"]:
                        return
                await asyncio.sleep(POLL_S)


def _end(engine: Engine, grace_s: float) -> None:
    """Wait up to ``grace_s`` for ``engine`` to end, then kill what is left of its group."""
    process = engine.process
    if process is None:
        return
    if grace_s:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    engine.process = None
