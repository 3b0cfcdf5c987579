"""A whole fleet of real processes: Valkey, workers, a sidecar for each, routers in front.

``async with LocalFleet(directory, plan) as fleet`` starts everything, waits until the router sees
every replica, and takes everything down again. No process may have logged a stack trace.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import aiohttp
import msgspec
from prometheus_client.parser import text_string_to_metric_families

from state.embedded import EmbeddedValkey
from warmroute.local import Child, Processes

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from pathlib import Path
    from types import TracebackType

MODEL = "fleet-model"
ANY_PORT = "127.0.0.1:0"
POLL_S = 0.02
START_S = 300.0
"""How long a process may take to begin where others have the processor."""
STOP_GRACE_S = 30.0
"""A busy machine takes its time over the end of a process, and exit codes are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """What to start. ``config`` is merged into each router's file.

    ``state_url`` is that of a server which is already there; None starts one.
    """

    state_url: str | None = None
    replicas: int = 2
    routers: int = 1
    model: str = MODEL
    tokenizer: Path | None = None
    pages: int = 8192
    preset: str = "instant"
    speed_up: float = 1.0
    worker_flags: tuple[str, ...] = ()
    sidecar_flags: tuple[str, ...] = ()
    router_flags: tuple[str, ...] = ()
    router_prefix: tuple[str, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Router:
    """A running router process and its two listeners."""

    child: Child
    url: str
    admin_url: str

    @property
    def port(self) -> int:
        """The port that clients use."""
        return int(self.url.rpartition(":")[2])


@dataclass(slots=True)
class Replica:
    """A worker and its sidecar; ``name`` is what routers call them."""

    name: str
    worker: Child
    sidecar: Child

    @property
    def url(self) -> str:
        """Where the worker listens."""
        return self.worker.words[0]

    @property
    def port(self) -> int:
        """The worker's port."""
        return int(self.url.rpartition(":")[2])


class LocalFleet:
    """See the module. ``routers[0]`` is the one that the short methods ask."""

    def __init__(self, directory: Path, plan: FleetPlan | None = None) -> None:
        self.directory = directory
        self.plan = plan or FleetPlan()
        self.processes = Processes(directory, stop_grace_s=STOP_GRACE_S)
        self.replicas: list[Replica] = []
        self.routers: list[Router] = []
        self.state_url = ""
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        try:
            self.state_url = (
                self.plan.state_url or (await self._stack.enter_async_context(EmbeddedValkey())).url
            )
            await self._stack.enter_async_context(self.processes)
            self.http = await self._stack.enter_async_context(aiohttp.ClientSession())
            names = [f"w{index}" for index in range(self.plan.replicas)]
            workers = [self.start_worker(name) for name in names]
            sidecars = []
            for name, worker in zip(names, workers, strict=True):
                await worker.ready(START_S)
                sidecars.append(self.start_sidecar(name, worker.words[0]))
            self.replicas = [
                Replica(name, worker, await sidecar.ready(START_S))
                for name, worker, sidecar in zip(names, workers, sidecars, strict=True)
            ]
            for _ in range(self.plan.routers):
                self.routers.append(await self.start_router())
            for router in self.routers:
                await self.all_up(router)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for name in ("router", "sidecar"):  # a sidecar asks its engine whether it may go
            await asyncio.to_thread(self._stop_all, name)
        await self._stack.aclose()
        if error is None:
            traced = [child.log_tail() for child in self.processes.children if _has_trace(child)]
            assert not traced, "\n".join(traced)

    def _stop_all(self, name: str) -> None:
        children = [child for child in self.processes.children if child.name.startswith(name)]
        for child in children:
            if child.is_alive():
                child.process.terminate()
        for child in children:
            self.processes.stop(child)

    # Starting.

    def start_worker(self, name: str, *flags: str) -> Child:
        """Start a worker like the plan's, with ``flags`` on top."""
        plan = self.plan
        words = [
            "worker",
            "--compute",
            "synthetic",
            "--model",
            plan.model,
            "--pages",
            str(plan.pages),
        ]
        words += ["--preset", plan.preset, "--speed-up", str(plan.speed_up)]
        if plan.tokenizer is not None:
            words += ["--tokenizer", str(plan.tokenizer)]
        return self.processes.start(f"worker-{name}", *words, *plan.worker_flags, *flags)

    def start_sidecar(self, name: str, engine: str, *flags: str) -> Child:
        """Start the sidecar of the worker at ``engine``."""
        words = ["--engine", engine, "--redis", self.state_url, "--replica", name]
        words += self.plan.sidecar_flags
        return self.processes.start(f"sidecar-{name}", "sidecar", *words, *flags)

    async def start_router(self, **config: Any) -> Router:
        """Start one more router; ``config`` on top of the plan's. It need not see replicas yet."""
        plan = self.plan
        settings: dict[str, Any] = {
            "listen": ANY_PORT,
            "admin": ANY_PORT,
            "seed": 1,
            "state": {"redis": self.state_url},
            "drain": {"accept_s": 0.0},
            **plan.config,
            **config,
        }
        # A busy machine takes its time to accept a connection: that is no fault of an engine.
        settings["upstream"] = {"connect_timeout_s": 20.0, **settings.get("upstream", {})}
        if plan.tokenizer is not None:
            settings["models"] = [{"name": plan.model, "tokenizer": str(plan.tokenizer)}]
        number = len(self.processes.children)
        path = self.directory / f"router-{number}.yaml"
        path.write_text(json.dumps(settings))
        words = (sys.executable, "-m", "warmroute", "serve", "--config", str(path))
        command = [*plan.router_prefix, *words, *plan.router_flags]
        child = await self.processes.start_command("router", command).ready(START_S)
        return Router(child, url=child.words[0], admin_url=child.words[2])

    # Looking.

    @property
    def router(self) -> Router:
        """The first router."""
        return self.routers[0]

    async def get(self, url: str) -> Any:
        """Return the JSON that a GET answers."""
        async with self.http.get(url) as answer:
            return msgspec.json.decode(await answer.read())

    async def all_up(self, router: Router, replicas: int | None = None) -> None:
        """Wait until ``router`` sees all planned replicas up, or just as many as ``replicas``."""
        planned = self.plan.replicas + len(self.plan.config.get("replicas", ()))
        wanted = planned if replicas is None else replicas

        async def is_so() -> bool:
            seen = await self.seen(router)
            up = [name for name, one in seen.items() if one["up"] and not one["draining"]]
            return len(up) == wanted

        await until(is_so, f"{wanted} replicas up")

    async def seen(self, router: Router | None = None) -> dict[str, dict[str, Any]]:
        """Return what the router knows of each replica, by name."""
        url = (router or self.router).admin_url
        return {one["replica"]: one for one in await self.get(f"{url}/debug/replicas")}

    async def decisions(self, limit: int, router: Router | None = None) -> list[dict[str, Any]]:
        """Return the last decision records, oldest first."""
        url = (router or self.router).admin_url
        records: list[dict[str, Any]] = await self.get(f"{url}/debug/decisions?limit={limit}")
        return records[::-1]

    async def decision(self, request_id: str, router: Router | None = None) -> dict[str, Any]:
        """Return one decision record, once the request has ended."""
        url = f"{(router or self.router).admin_url}/debug/decisions/{request_id}"
        found: dict[str, Any] = {}

        async def is_kept() -> bool:
            async with self.http.get(url) as answer:
                if answer.status == 200:
                    found.update(msgspec.json.decode(await answer.read()))
                return answer.status == 200

        await until(is_kept, f"a record of {request_id}")
        return found

    async def gauges(self, url: str) -> dict[str, float]:
        """Return the samples of ``/metrics`` below ``url``, summed over their labels."""
        async with self.http.get(f"{url}/metrics") as answer:
            text = await answer.text()
        sums: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
        return sums

    async def in_engine(self, replica: Replica) -> int:
        """Return how many requests run or wait on a worker."""
        gauges = await self.gauges(replica.url)
        return int(gauges["vllm:num_requests_running"] + gauges["vllm:num_requests_waiting"])

    async def inflight(self, router: Router | None = None) -> int:
        """Return the open leases of one router."""
        return int(sum(one["inflight"] for one in (await self.seen(router)).values()))

    async def settled(self, timeout_s: float = 60.0) -> None:
        """Wait until nothing is in flight: no lease, nothing on a worker, no page held."""

        async def is_so() -> bool:
            for router in self.routers:
                if router.child.is_alive() and await self.inflight(router):
                    return False
            for replica in self.replicas:
                if replica.worker.is_alive():
                    gauges = await self.gauges(replica.url)
                    if await self.in_engine(replica) or gauges["vllm:kv_cache_usage_perc"]:
                        return False
            return True

        await until(is_so, "nothing in flight", timeout_s)


def _has_trace(child: Child) -> bool:
    return b"Traceback" in child.log.read_bytes()


async def until(
    is_so: Callable[[], Awaitable[bool]], wanted: str, timeout_s: float = 60.0
) -> float:
    """Wait until ``is_so()`` and return how long it took; fails after the timeout."""
    began_s = time.monotonic()
    while not await is_so():
        assert time.monotonic() - began_s < timeout_s, f"not within {timeout_s} s: {wanted}"
        await asyncio.sleep(POLL_S)
    return time.monotonic() - began_s
