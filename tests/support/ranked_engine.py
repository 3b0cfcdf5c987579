"""An engine with several data-parallel ranks behind one address: a front before bundled workers.

Each worker is a rank: a process with a cache and a publisher of its own. The front answers for all
of them as vLLM does: one health, one list of models, figures labelled by rank, publishers by rank,
and requests go to the rank that their header names, else in turn.
"""

from __future__ import annotations

import asyncio
import re
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

import aiohttp
from aiohttp import web

from support.fleet import until
from support.port import free_port

if TYPE_CHECKING:
    from types import TracebackType

    from support.fleet import LocalFleet
    from warmroute.local import Child

RANK_HEADER: Final = "X-data-parallel-rank"
PASSED: Final = ("/v1/chat/completions", "/v1/completions")


@dataclass(slots=True)
class Rank:
    """One worker on ports that outlive it."""

    number: int
    http_port: int
    events_port: int
    replay_port: int
    worker: Child | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.http_port}"

    def flags(self) -> list[str]:
        """Return what a worker is told to be found there."""
        return [
            *("--port", str(self.http_port)),
            *("--events-endpoint", f"tcp://127.0.0.1:{self.events_port}"),
            *("--replay-endpoint", f"tcp://127.0.0.1:{self.replay_port}"),
        ]


class RankedEngine:
    """``asked`` are the rank header and the rank of each request, None where it had no header."""

    def __init__(self, fleet: LocalFleet, ranks: int) -> None:
        self._fleet = fleet
        self._port = free_port()
        self._turn = 0
        self._started_at_s = time.time()
        self._runner: web.AppRunner | None = None
        self.ranks = [Rank(n, free_port(), free_port(), free_port()) for n in range(ranks)]
        self.asked: list[tuple[str | None, int]] = []

    @property
    def url(self) -> str:
        """Where the front listens."""
        return f"http://127.0.0.1:{self._port}"

    async def __aenter__(self) -> Self:
        """Start the workers, then the front."""
        await self._start(self.ranks)
        self._http = aiohttp.ClientSession()
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/kv_event_sources", self._sources)
        for path in PASSED:
            app.router.add_post(path, self._pass)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port).start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop the front; the fleet stops the workers."""
        if self._runner is not None:
            await self._runner.cleanup()
        await self._http.close()

    async def restart(self, *numbers: int, is_told: bool) -> None:
        """Kill the workers of ranks and start them anew; ``is_told``: the metrics show it."""
        struck = [self.ranks[number] for number in numbers]
        for rank in struck:
            assert rank.worker is not None
            processes = self._fleet.processes
            await asyncio.to_thread(processes.stop, rank.worker, number=signal.SIGKILL)
        await self._start(struck)
        if is_told:
            self._started_at_s = time.time()

    async def _start(self, ranks: list[Rank]) -> None:
        for rank in ranks:
            rank.worker = self._fleet.start_worker(f"rank{rank.number}", *rank.flags())
        for rank in ranks:
            assert rank.worker is not None
            await rank.worker.ready()

    async def _text(self, rank: Rank, path: str) -> str:
        async with self._http.get(rank.url + path) as answer:
            answer.raise_for_status()
            return await answer.text()

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _models(self, _: web.Request) -> web.Response:
        return web.Response(
            text=await self._text(self.ranks[0], "/v1/models"), content_type="application/json"
        )

    async def _metrics(self, _: web.Request) -> web.Response:
        lines = [f"process_start_time_seconds {self._started_at_s}"]
        for rank in self.ranks:
            try:
                text = await self._text(rank, "/metrics")
            except aiohttp.ClientError:
                continue
            lines += [
                _of_rank(line, rank.number, len(self.ranks))
                for line in text.splitlines()
                if line.startswith("vllm:")
            ]
        return web.Response(text="\n".join(lines) + "\n")

    async def _sources(self, _: web.Request) -> web.Response:
        sources = {
            str(rank.number): {
                "endpoint": f"tcp://*:{rank.events_port}",
                "replay_endpoint": f"tcp://*:{rank.replay_port}",
            }
            for rank in self.ranks
        }
        return web.json_response(sources)

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        pin = request.headers.get(RANK_HEADER)
        self._turn += 1
        number = self._turn % len(self.ranks) if pin is None else int(pin)
        self.asked.append((pin, number))
        body = await request.read()
        headers = {"Content-Type": "application/json"}
        url = self.ranks[number].url + request.path
        async with self._http.post(url, data=body, headers=headers) as answer:
            kept = {"Content-Type": answer.headers["Content-Type"]}
            reply = web.StreamResponse(status=answer.status, headers=kept)
            await reply.prepare(request)
            async for chunk in answer.content.iter_any():
                await reply.write(chunk)
        return reply


def _of_rank(line: str, number: int, ranks: int) -> str:
    """Return a worker's figure as that of a rank; the pages are those of all ranks, as in vLLM."""
    told = re.sub(
        r'(num_gpu_blocks=")(\d+)', lambda found: f"{found[1]}{int(found[2]) * ranks}", line
    )
    return told.replace('engine="0"', f'engine="{number}"')


async def blocks_of(fleet: LocalFleet) -> dict[str, int]:
    """Return how many blocks the router believes each replica to hold."""
    return {name: one["resident_blocks"] for name, one in (await fleet.seen()).items()}


async def settled_blocks(fleet: LocalFleet, wanted: dict[str, bool]) -> None:
    """Wait until each replica named holds something, or nothing."""

    async def is_so() -> bool:
        held: dict[str, Any] = await blocks_of(fleet)
        return all(bool(held.get(name)) is has_any for name, has_any in wanted.items())

    await until(is_so, f"blocks: {wanted}")
