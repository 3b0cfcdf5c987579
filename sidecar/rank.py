"""One engine with several data-parallel ranks: a replica for each of them.

Ranks share an address and nothing else: each has a cache of its own and publishes it on a port of
its own. So each is a replica with its own events, generations, capacity and load, called
``NAME@dpR``. Requests reach it by a header that the router sets (``state.model.ReplicaRecord``).
What all ranks have in common, the engine's HTTP answers, is asked for once.

How many ranks there are is what the engine's list of publishers says, or ``ranks`` where the event
endpoints are given. It may change while the engine restarts: then all replicas are taken off, and
others take their place.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import structs
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from sidecar.agent import SidecarAgent
from sidecar.announce import Announcer
from sidecar.exporter import Exporter
from sidecar.metrics import RenewalReason
from sidecar.profile import SettingsError, replica_name
from sidecar.scrape import EngineClient, EngineError
from sidecar.sglang import LOAD_PATHS
from state.store import StateError
from state.tls import ClientTls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from prometheus_client import Metric

    from sidecar.metrics import SidecarMetrics
    from sidecar.profile import SidecarSettings
    from sidecar.subscriber import EventSource
    from state.model import ReplicaId, ReplicaRecord
    from state.store import ReplicaWriter

_FRESH_FRACTION: Final = 0.1
"""Of the time between two looks at the engine: so long one rank's answer is good for the others."""
_ENGINE_FIGURE: Final = re.compile(r"(?:vllm|sglang):(?!\w*_info\b)")
_RANK: Final = re.compile(r'[{,](?:engine|dp_rank)="(\d+)"')
_PAGES: Final = re.compile(r'(?<=[{,])(num_gpu_blocks=")(\d+)')
_PORT: Final = re.compile(r"(tcp://.+):(\d+)")
_LOG = logging.getLogger("warmroute.sidecar")

Ranks = tuple[int, ...]
"""The ranks behind one address, in order; empty where the engine is one replica."""


class RanksChangedError(SettingsError):
    """The engine has other ranks than its replicas were made for."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(f"the engine has {len(ranks) or 1} data-parallel ranks")
        self.ranks = ranks


def rank_metrics(text: str, rank: int, ranks: int) -> str:
    """Return what a Prometheus text says of one of ``ranks``, and of the process as a whole.

    A figure of the engine that names no rank is that of all of them together: of none here. vLLM
    tells the pages of all ranks in the line of each.
    """
    kept = []
    for line in text.splitlines():
        named = _RANK.search(line)
        is_kept = not _ENGINE_FIGURE.match(line) if named is None else int(named[1]) == rank
        if is_kept:
            kept.append(_PAGES.sub(lambda told: f"{told[1]}{int(told[2]) // ranks}", line))
    return "\n".join(kept)


def rank_loads(body: bytes, rank: int) -> bytes:
    """Return what SGLang's ``/v1/loads`` or ``/get_load`` says of one rank; it may be nothing."""
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body
    loads = raw.get("loads") if isinstance(raw, dict) else raw
    rows = loads if isinstance(loads, list) else []
    kept = [row for row in rows if isinstance(row, dict) and row.get("dp_rank") == rank]
    return msgspec.json.encode({"loads": kept})


def offset_endpoint(endpoint: str, rank: int) -> str:
    """Return where a rank publishes, given where rank 0 does; raises SettingsError."""
    named = _PORT.fullmatch(endpoint)
    if named is None:
        message = f"events, replay: expected tcp://host:port with several ranks, got {endpoint!r}"
        raise SettingsError(message)
    return f"{named[1]}:{int(named[2]) + rank}"


def rank_settings(settings: SidecarSettings, name: str, rank: int) -> SidecarSettings:
    """Return what the sidecar of one rank is told."""
    events, replay = settings.events, settings.replay
    return structs.replace(
        settings,
        replica=f"{name}@dp{rank}",
        events=None if events is None else offset_endpoint(events, rank),
        replay=None if replay is None else offset_endpoint(replay, rank),
    )


class SharedClient(EngineClient):
    """An engine's client whose answers are good for all of its ranks for a moment."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None,
        fresh_s: float,
        tls: ClientTls = ClientTls(),  # noqa: B008 - frozen
    ) -> None:
        super().__init__(url, api_key=api_key, tls=tls)
        self._fresh_s = fresh_s
        self._answers: dict[str, tuple[float, bytes | EngineError]] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def shared(self, path: str) -> bytes:
        """Return the body of a GET that was made a moment ago at most; raises EngineError."""
        async with self._locks.setdefault(path, asyncio.Lock()):
            known = self._answers.get(path)
            now_s = time.monotonic()
            if known is None or now_s - known[0] > self._fresh_s:
                try:
                    answer: bytes | EngineError = await self.get(path)
                except EngineError as error:
                    answer = error.with_traceback(None)
                known = self._answers[path] = (time.monotonic(), answer)
        if isinstance(known[1], EngineError):
            raise EngineError(str(known[1]), known[1].status)
        return known[1]


class RankClient(EngineClient):
    """The engine as one of its ranks sees it; ``rank`` None is the engine as a whole."""

    def __init__(self, shared: SharedClient, ranks: Ranks, rank: int | None) -> None:
        super().__init__(shared.endpoint, tls=shared.tls)
        self._shared = shared
        self._ranks = ranks
        self._rank = rank
        self.pin = None if rank is None else ranks.index(rank)

    async def _get(self, path: str) -> bytes:
        """Return the body of a GET, of figures what they say of the rank; raises EngineError."""
        if self._rank is None:
            return await self._shared.get(path)
        body = await self._shared.shared(path)
        if path == "/metrics":
            text = body.decode("utf-8", "replace")
            return rank_metrics(text, self._rank, len(self._ranks)).encode()
        return rank_loads(body, self._rank) if path in LOAD_PATHS else body

    async def event_sources(self) -> tuple[EventSource, ...]:
        """Return the rank's publisher; raises RanksChangedError where there are other ranks."""
        sources = await self.sources_by_rank()
        ranks = tuple(sources) if len(sources) > 1 else ()
        if ranks != self._ranks:
            raise RanksChangedError(ranks)
        return tuple(sources.values()) if self._rank is None else (sources[self._rank],)


@dataclass(slots=True)
class _Crew:
    """The agents of an engine's ranks, and what they registered."""

    agents: list[SidecarAgent] = field(default_factory=list)
    registered: dict[ReplicaId, ReplicaRecord] = field(default_factory=dict)


class _AllMetrics(Collector):
    """The numbers of several ranks: a family once, with a sample for each replica."""

    def __init__(self, crew: _Crew) -> None:
        self._crew = crew

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for metrics in self._parts():
            for family in metrics.collect():
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples.extend(family.samples)
        return families.values()

    def _parts(self) -> Sequence[SidecarMetrics]:
        return [agent.metrics for agent in self._crew.agents]


class RankRunner:
    """Runs the agents of one engine, as many as it has ranks."""

    def __init__(
        self,
        settings: SidecarSettings,
        writer: ReplicaWriter,
        *,
        clock: Callable[[], float],
        rng: random.Random,
        on_ready: Callable[[ReplicaRecord], None] | None,
    ) -> None:
        self._settings = settings
        self._writer = writer
        self._clock = clock
        self._rng = rng
        self._on_ready = on_ready
        self._crew = _Crew()
        self._registry = CollectorRegistry()
        self._registry.register(_AllMetrics(self._crew))

    def render(self) -> bytes:
        """Return the text that ``/metrics`` answers."""
        return generate_latest(self._registry)

    def renew(self, weights_revision: str | None) -> None:
        """Begin a new generation of every rank, of other weights where they are named."""
        if weights_revision is not None:
            self._settings = structs.replace(self._settings, weights_revision=weights_revision)
        for agent in self._crew.agents:
            agent.renew(RenewalReason.ASKED, weights_revision)

    async def run(self, shared: SharedClient, stop: asyncio.Event) -> None:
        """Run until ``stop``; raises FencedError and SettingsError."""
        told = self._settings.ranks
        if told is not None and self._settings.events is None:
            message = "ranks: expected events too, the endpoint of rank 0"
            raise SettingsError(message)
        ranks = tuple(range(told)) if told is not None and told > 1 else ()
        while True:
            try:
                await self._run_crew(shared, ranks, stop)
            except RanksChangedError as error:
                await self._deregister()
                ranks = error.ranks
                _LOG.info("%s: each is a replica of its own", error)
            else:
                return

    async def _run_crew(self, shared: SharedClient, ranks: Ranks, stop: asyncio.Event) -> None:
        self._crew.agents[:] = self._agents(shared, ranks)
        self._crew.registered.clear()
        try:
            async with asyncio.TaskGroup() as tasks:
                for agent in self._crew.agents:
                    tasks.create_task(agent.run(stop))
        except BaseExceptionGroup as group:
            raise _first(group) from None

    def _agents(self, shared: SharedClient, ranks: Ranks) -> list[SidecarAgent]:
        settings = self._settings
        if not ranks:
            return [self._agent(settings, RankClient(shared, (), None))]
        name = replica_name(settings, shared)
        return [
            self._agent(rank_settings(settings, name, rank), RankClient(shared, ranks, rank))
            for rank in ranks
        ]

    def _agent(self, settings: SidecarSettings, client: RankClient) -> SidecarAgent:
        announcer = Announcer(
            self._writer,
            clock=self._clock,
            rng=self._rng,
            heartbeat_interval_s=settings.heartbeat_interval_s,
            flush_interval_s=settings.flush_interval_s,
            on_registered=self._note_registered,
        )
        return SidecarAgent(settings, client, announcer, self._clock)

    def _note_registered(self, record: ReplicaRecord) -> None:
        """Tell that all ranks are there, once the last one is."""
        registered = self._crew.registered
        registered[record.replica] = record
        if self._on_ready is not None and len(registered) == len(self._crew.agents):
            self._on_ready(record)

    async def _deregister(self) -> None:
        """Take off replicas whose agents are gone; what the store does not take, it forgets."""
        for record in self._crew.registered.values():
            with suppress(StateError):
                await self._writer.deregister(record.replica, record.generation)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def run_agent(
    settings: SidecarSettings,
    writer: ReplicaWriter,
    *,
    stop: asyncio.Event,
    clock: Callable[[], float] = time.monotonic,
    rng: random.Random | None = None,
    on_ready: Callable[[ReplicaRecord], None] | None = None,
) -> None:
    """Run one engine's sidecar until ``stop``; raises FencedError and SettingsError.

    ``on_ready`` is called when all of its replicas are registered, and at each generation after.
    """
    fresh_s = _FRESH_FRACTION * settings.scrape_interval_s
    try:
        client = SharedClient(
            settings.engine, api_key=settings.api_key, fresh_s=fresh_s, tls=settings.tls
        )
    except ValueError as error:
        raise SettingsError(str(error)) from error
    if client.path is not None:  # a record says where routers of other hosts connect
        message = "engine: expected http://host:port or https://host:port, not a unix socket"
        raise SettingsError(message)
    runner = RankRunner(
        settings, writer, clock=clock, rng=rng or random.SystemRandom(), on_ready=on_ready
    )
    async with AsyncExitStack() as stack:
        shared = await stack.enter_async_context(client)
        await stack.enter_async_context(Exporter(settings.metrics, runner.render, runner.renew))
        await runner.run(shared, stop)
