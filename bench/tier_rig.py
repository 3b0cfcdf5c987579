"""Real workers of the tier bench, asked over HTTP, one after the other or by several clients."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import aiohttp
import msgspec
from aiohttp import web

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from meter import cpu_s
from warmroute.local import Processes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

    from warmroute.local import Child

MODEL: Final = "tiny"
SOURCE_HEADER: Final = "X-Warmroute-Kv-Source"
PRINTABLE: Final = range(32, 127)
CHUNK_BYTES: Final = 16_384
READY_S: Final = 60.0
ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class Heard(msgspec.Struct, frozen=True):
    """One answered request."""

    ttft_s: float
    prompt_tokens: int
    cached_tokens: int


def tokens_of(seed: int, count: int) -> list[int]:
    """Return a text that shares no page with that of another seed."""
    rng = random.Random(seed)  # noqa: S311 - test data
    return rng.choices(PRINTABLE, k=count)


class Worker:
    """One worker process; ``ask`` times its answers."""

    def __init__(self, child: Child, http: aiohttp.ClientSession) -> None:
        self.url = child.words[0]
        self._child = child
        self._http = http

    async def ask(
        self, prompt: Sequence[int], *, output_tokens: int = 1, source: str | None = None
    ) -> Heard:
        """Return what a greedy completion took; ``source`` is where pages may be fetched."""
        body = {
            "model": MODEL,
            "prompt": list(prompt),
            "max_tokens": output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = {} if source is None else {SOURCE_HEADER: source}
        data = msgspec.json.encode(body)
        began_s = time.perf_counter()
        async with self._http.post(
            f"{self.url}/v1/completions", data=data, headers=headers
        ) as answer:
            answer.raise_for_status()
            first = await answer.content.readuntil(b"\n\n")
            ttft_s = time.perf_counter() - began_s
            rest = first + await answer.content.read()
        events = [event for event in rest.split(b"\n\n") if event.startswith(b"data: {")]
        usage = msgspec.json.decode(events[-1].removeprefix(b"data: "))["usage"]
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        return Heard(ttft_s, usage["prompt_tokens"], cached)

    async def reset(self) -> None:
        """Have it forget all pages, of all tiers."""
        async with self._http.post(f"{self.url}/reset_prefix_cache") as answer:
            answer.raise_for_status()

    async def tiers(self) -> dict[str, dict[str, Any]]:
        """Return ``/debug/kv`` by tier."""
        told = await self.get("/debug/kv")
        return {tier["tier"]: tier for tier in told["tiers"]}

    async def get(self, path: str) -> Any:
        """Return the JSON of a GET."""
        async with self._http.get(f"{self.url}{path}") as answer:
            answer.raise_for_status()
            return msgspec.json.decode(await answer.read())

    def cpu_s(self) -> float:
        """Return the CPU seconds that the process has used."""
        return cpu_s(self._child.process.pid)


class Rig:
    """Starts workers; made by ``tier_rig``."""

    def __init__(self, processes: Processes, http: aiohttp.ClientSession) -> None:
        self._processes = processes
        self._http = http

    async def start(self, *flags: str) -> Worker:
        """Start a worker with NumPy arithmetic on one thread."""
        words = ["worker", "--compute", "numpy", "--model", MODEL, "--threads", "1", *flags]
        child = await self._processes.start("worker", *words).ready(READY_S)
        return Worker(child, self._http)


@contextlib.asynccontextmanager
async def tier_rig(directory: Path) -> AsyncIterator[Rig]:
    """Start nothing yet; stop all workers at the end. One connection for each request."""
    processes = Processes(directory, {**os.environ, **ONE_THREAD})
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        try:
            yield Rig(processes, http)
        finally:
            await asyncio.to_thread(processes.stop_all)


async def in_turn(
    worker: Worker, prompts: Iterable[Sequence[int]], clients: int, output_tokens: int
) -> list[Heard]:
    """Have ``clients`` ask for the prompts in order, each the next one when it was answered."""
    waiting = iter(prompts)

    async def client() -> list[Heard]:
        return [await worker.ask(prompt, output_tokens=output_tokens) for prompt in waiting]

    return list(itertools.chain(*await asyncio.gather(*(client() for _ in range(clients)))))


def quantile_ms(heard: Sequence[Heard], share: float) -> float:
    """Return the nearest-rank quantile of the time to the first token."""
    ordered = sorted(each.ttft_s for each in heard)
    return 1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def mean_ms(heard: Sequence[Heard]) -> float:
    """Return the mean time to the first token."""
    return 1e3 * statistics.fmean(each.ttft_s for each in heard)


class SlowLink:
    """A worker's pages through a link of ``bytes_per_s``: says where, and passes them on."""

    def __init__(self, behind: Worker, bytes_per_s: float) -> None:
        self._behind = behind
        self._bytes_per_s = bytes_per_s
        self.url = ""

    async def __aenter__(self) -> Self:
        """Listen."""
        info = await self._behind.get("/kv_transfer")
        self._port = int(info["port"])
        self._server = await asyncio.start_server(self._pass_on, "127.0.0.1", 0)
        info["port"] = self._server.sockets[0].getsockname()[1]
        app = web.Application()

        async def told(_: web.Request) -> web.Response:
            return web.json_response(info)

        app.router.add_get("/kv_transfer", told)
        self._http = web.AppRunner(app, access_log=None)
        await self._http.setup()
        await web.TCPSite(self._http, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._http.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close all."""
        self._server.close()
        await self._http.cleanup()

    async def _pass_on(self, near: asyncio.StreamReader, out: asyncio.StreamWriter) -> None:
        far, back = await asyncio.open_connection("127.0.0.1", self._port)
        asking = asyncio.create_task(_copy(near, back))
        with contextlib.suppress(ConnectionError):
            while data := await far.read(CHUNK_BYTES):
                await asyncio.sleep(len(data) / self._bytes_per_s)
                out.write(data)
                await out.drain()
        asking.cancel()
        for stream in (out, back):
            stream.close()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while data := await source.read(CHUNK_BYTES):
        target.write(data)
        await target.drain()
