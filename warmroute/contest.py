"""A contest of policies: one local fleet, one router after another, equal sessions, empty caches.

The fleet (Valkey, workers, sidecars) lives through all rounds. Each round has a fresh router, so
that none inherits what another learned.
"""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self, TypeAlias, TypeVar

import aiohttp
import msgspec
from msgspec import Meta, Struct

from policies.model import Reason
from router.trace import DecisionRecord
from state.embedded import EmbeddedValkey
from warmroute.driver import ChatClient, ChatFailedError, Driver, Exchange, open_http
from warmroute.environment import REDIS_VARIABLE
from warmroute.local import Child, ChildFailedError, Processes

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from pathlib import Path
    from types import TracebackType

    from warmroute.progress import Progress
    from warmroute.workload import Session

Result = TypeVar("Result")

MODEL: Final = "demo-model"
PRESET: Final = "llama-70b-fp8-2xh100"
COMPUTE_THREADS: Final = 1
"""Of each worker that computes: they share the machine's cores."""
ANY_PORT: Final = "127.0.0.1:0"
WATCH_S: Final = 0.2
POLL_S: Final = 0.05
EMPTY_TIMEOUT_S: Final = 20.0
DECISIONS_READ: Final = 50
CHILD_ENVIRONMENT: Final = {"TOKENIZERS_PARALLELISM": "false"}
"""Prompts come one by one; a thread pool in each of a dozen processes would only compete."""


ComputeName = Literal["synthetic", "numpy"]
Settle: TypeAlias = "Callable[[], Coroutine[Any, Any, None]]"


class ContestError(Exception):
    """The fleet does not do what the contest needs."""


class FleetSettings(Struct, frozen=True, kw_only=True):
    """The fleet that all policies get. ``speed_up`` is of the synthetic clock."""

    compute: ComputeName
    workers: Annotated[int, Meta(ge=1)]
    pages: int
    page_tokens: int
    speed_up: float
    tokenizer: str
    seed: int


class Round(Struct, frozen=True, kw_only=True):
    """What happened under one policy: every exchange in order of its end; one decision."""

    exchanges: tuple[Exchange, ...]
    duration_s: float
    decision: DecisionRecord | None


class Arena:
    """``async with Arena(...)``: the fleet runs while the block does; ``play`` is one round."""

    def __init__(self, fleet: FleetSettings, logs: Path) -> None:
        self._fleet = fleet
        self._logs = logs
        self._stack = AsyncExitStack()
        self._engines: list[str] = []
        self._required: list[Child] = []

    async def __aenter__(self) -> Self:
        try:
            valkey = await self._stack.enter_async_context(EmbeddedValkey())
            environment = {**CHILD_ENVIRONMENT, REDIS_VARIABLE: valkey.url}
            self._processes = await self._stack.enter_async_context(
                Processes(self._logs, environment)
            )
            self._http = await self._stack.enter_async_context(open_http())
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stack.aclose()

    async def _start(self) -> None:
        fleet, start = self._fleet, self._processes.start
        words = _worker_words(fleet)
        names = [f"worker-{index}" for index in range(fleet.workers)]
        workers = [start(name, "worker", *words) for name in names]
        sidecars = []
        for name, worker in zip(names, workers, strict=True):
            engine = (await worker.ready()).words[0]
            self._engines.append(engine)
            # When the fleet stops, no request runs any more: there is nothing to wait for.
            about = ["--engine", engine, "--replica", name, "--drain-grace-s", "0"]
            sidecars.append(start(f"{name}-sidecar", "sidecar", *about))
        for sidecar in sidecars:
            await sidecar.ready()
        self._required = workers + sidecars

    async def play(
        self, policy: str, sessions: Sequence[Session], open_sessions: int, progress: Progress
    ) -> Round:
        """Play ``sessions`` through a fresh router with ``policy``, all caches empty.

        Raises ChildFailedError and ContestError.
        """
        return await self._on_router(
            policy, lambda url, admin: self._play(url, admin, sessions, open_sessions, progress)
        )

    async def ask(
        self, policy: str, work: Callable[[ChatClient, Settle], Coroutine[Any, Any, Result]]
    ) -> Result:
        """Return what ``work`` does through a fresh router with ``policy``, all caches empty.

        ``work`` also gets what waits until the router sees no request under way. Raises
        ChildFailedError and ContestError.
        """

        async def with_client(url: str, admin_url: str) -> Result:
            await self._empty_caches(admin_url)
            async with open_http() as http:
                client = ChatClient(http, url, MODEL, time.monotonic)
                return await work(client, lambda: self._fleet_is(_is_idle, admin_url))

        return await self._on_router(policy, with_client)

    async def _on_router(
        self, policy: str, work: Callable[[str, str], Coroutine[Any, Any, Result]]
    ) -> Result:
        """Start a router, give its two addresses to ``work``, and stop it."""
        words = ["--listen", ANY_PORT, "--admin", ANY_PORT, "--policy", policy, "--receipts"]
        words += ["--model", f"{MODEL}={self._fleet.tokenizer}", "--seed", str(self._fleet.seed)]
        router = self._processes.start(f"router-{policy}", "serve", *words)

        async def when_ready() -> Result:
            url, _, admin_url = (await router.ready()).words[:3]
            return await work(url, admin_url)

        try:
            return await _while_alive(when_ready(), [*self._required, router])
        except (ChatFailedError, aiohttp.ClientError) as error:
            message = f"{type(error).__name__}: {error}\n{router.name}:\n{router.log_tail()}"
            raise ContestError(message) from error
        finally:
            self._processes.stop(router, number=signal.SIGINT)  # no load balancer has to notice

    async def _play(
        self,
        url: str,
        admin_url: str,
        sessions: Sequence[Session],
        open_sessions: int,
        progress: Progress,
    ) -> Round:
        await self._empty_caches(admin_url)
        exchanges: list[Exchange] = []

        def take(exchange: Exchange) -> None:
            exchanges.append(exchange)
            progress.advance()

        async with open_http() as http:
            client = ChatClient(http, url, MODEL, time.monotonic)
            began_s = time.monotonic()
            await Driver(client, open_sessions, time.monotonic, take).play(sessions)
            duration_s = time.monotonic() - began_s
        decision = await self._decision(admin_url)
        return Round(exchanges=tuple(exchanges), duration_s=duration_s, decision=decision)

    async def _empty_caches(self, admin_url: str) -> None:
        """Clear the workers' caches and wait until the router sees a whole fleet, empty, idle."""
        for engine in self._engines:
            async with self._http.post(f"{engine}/reset_prefix_cache") as response:
                response.raise_for_status()
        await self._fleet_is(_is_fresh, admin_url)

    async def _fleet_is(self, state: Callable[[dict[str, Any]], bool], admin_url: str) -> None:
        """Wait until the router sees every worker in ``state``; raises ContestError."""
        deadline_s = time.monotonic() + EMPTY_TIMEOUT_S
        while True:
            replicas = msgspec.json.decode(await self._get(f"{admin_url}/debug/replicas"))
            if len(replicas) == self._fleet.workers and all(map(state, replicas)):
                return
            if time.monotonic() > deadline_s:
                message = f"the fleet did not become empty and idle: {replicas}"
                raise ContestError(message)
            await asyncio.sleep(POLL_S)

    async def _decision(self, admin_url: str) -> DecisionRecord | None:
        """Return a late decision, best one that a prefix decided."""
        body = await self._get(f"{admin_url}/debug/decisions?limit={DECISIONS_READ}")
        records = msgspec.json.decode(body, type=list[DecisionRecord])
        by_prefix = (
            record for record in records if record.attempts[-1].decision.reason is Reason.PREFIX
        )
        return next(by_prefix, records[0] if records else None)

    async def _get(self, url: str) -> bytes:
        async with self._http.get(url) as response:
            response.raise_for_status()
            return await response.read()


def _worker_words(fleet: FleetSettings) -> list[str]:
    words = ["--compute", fleet.compute, "--model", MODEL, "--tokenizer", fleet.tokenizer]
    if fleet.compute == "synthetic":
        words += ["--preset", PRESET, "--speed-up", str(fleet.speed_up)]
    else:
        words += ["--threads", str(COMPUTE_THREADS)]
    words += ["--pages", str(fleet.pages), "--page-tokens", str(fleet.page_tokens)]
    return [*words, "--seed", str(fleet.seed), "--log-level", "warning"]


def _is_fresh(replica: dict[str, Any]) -> bool:
    return _is_idle(replica) and replica["has_events"] and replica["resident_blocks"] == 0


def _is_idle(replica: dict[str, Any]) -> bool:
    load = replica["load"]
    return replica["up"] and load is not None and not (load["running"] or load["queued"])


async def _while_alive(work: Coroutine[Any, Any, Result], children: Sequence[Child]) -> Result:
    """Return what ``work`` returns; raises ChildFailedError as soon as one of ``children`` ends."""
    task = asyncio.create_task(work)
    try:
        while not task.done():
            await asyncio.wait([task], timeout=WATCH_S)
            _check_alive(children)
        if task.exception() is not None:
            # A connection breaks before the end of its process can be seen: name the cause.
            await asyncio.sleep(WATCH_S)
            _check_alive(children)
        return task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _check_alive(children: Sequence[Child]) -> None:
    for child in children:
        if not child.is_alive():
            message = f"{child.name} ended ({child.process.returncode}):\n{child.log_tail()}"
            raise ChildFailedError(message)
