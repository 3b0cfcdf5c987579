"""Real vLLM engines for tests, of the executable that ``WARMROUTE_VLLM`` names.

An engine is several processes: they are a process group of their own and end together. Engines get
less of a small machine than the router and the sidecars: those are what is tested. No session of
their own, because Linux weighs niceness within a session only.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

import aiohttp

from support.chaos import free_ports
from support.tokenizer import CHAT_TEMPLATE, SPECIAL_TOKENS, write_tokenizer

if TYPE_CHECKING:
    from types import TracebackType

VARIABLE: Final = "WARMROUTE_VLLM"
MODEL: Final = "tiny-llama"
PAGE_TOKENS: Final = 32
"""The smallest of vLLM on a CPU."""
CONTEXT_TOKENS: Final = 2048
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


class NoEngineError(Exception):
    """There is no vLLM to test with, or it did not start; the text says what to do."""


def vllm_executable(named: str | None) -> Path:
    """Return the executable that the variable ``named``, itself or by its environment.

    Raises NoEngineError.
    """
    if not named:
        message = f"{VARIABLE} is not set: name a vLLM executable, or the environment it is in"
        raise NoEngineError(message)
    executable = Path(named).absolute()
    if executable.is_dir():
        executable = executable / "bin" / "vllm"
    for file in (executable, executable.with_name("python")):
        if not os.access(file, os.X_OK):
            message = f"{VARIABLE}={named}: {file} is no executable"
            raise NoEngineError(message)
    return executable


def write_model(folder: Path, vllm: Path) -> Path:
    """Write a tiny model with random weights and a tokenizer of its own to ``folder``."""
    write_tokenizer(
        folder,
        chat_template=CHAT_TEMPLATE.replace("message.content", "(message.content or '')"),
        config={"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIAL_TOKENS[0]},
    )
    script = Path(__file__).with_name("tiny_llama.py")
    made = subprocess.run(
        [vllm.with_name("python"), "-P", script, folder],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        message = f"no model was made:\n{made.stderr[-LOG_TAIL_BYTES:]}"
        raise NoEngineError(message)
    return folder


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


class Engines:
    """Engines of one model with caches of ``pages``; none outlives the block."""

    def __init__(self, directory: Path, vllm: Path, model: Path, pages: int) -> None:
        self._directory = directory
        self._vllm = vllm
        self._model = model
        self._pages = pages
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
                ["nice", "-n", "10", str(self._vllm), "serve", *self._arguments(engine)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **ENVIRONMENT},
                process_group=0,
            )

    def _arguments(self, engine: Engine) -> list[str]:
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{engine.events_port}",
            "replay_endpoint": f"tcp://*:{engine.replay_port}",
        }
        valued = {
            "--served-model-name": MODEL,
            "--host": "127.0.0.1",
            "--port": engine.port,
            # Half the precision makes near-ties, and texts that depend on what else is computed.
            "--dtype": "float32",
            "--seed": 0,
            "--max-model-len": CONTEXT_TOKENS,
            "--max-num-seqs": 8,
            "--block-size": PAGE_TOKENS,
            "--num-gpu-blocks-override": self._pages,
            "--kv-events-config": json.dumps(events),
        }
        flags = [str(word) for pair in valued.items() for word in pair]
        switches = ["--enforce-eager", "--enable-prefix-caching", "--enable-prompt-tokens-details"]
        return [str(self._model), *flags, *switches]

    async def ready(self, engine: Engine) -> None:
        """Wait until ``engine`` serves; raises NoEngineError with the end of its log."""
        deadline_s = time.monotonic() + READY_S
        while not await self._is_healthy(engine):
            if not engine.is_alive or time.monotonic() > deadline_s:
                tail = engine.log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
                message = f"{engine.name} does not serve:\n{tail}"
                raise NoEngineError(message)
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
        async with asyncio.timeout(10):
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
