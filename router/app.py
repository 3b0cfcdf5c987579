"""The composition root: builds every part of the router in order, runs it, takes it down.

Everything is built under one exit stack and one task group; tests build the same app with other
parts.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import signal
import time
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from policies.hot import HeatMap
from prompt.codec import load_codec
from prompt.reader import PromptReader
from router.admin import Admin, AdminParts, admin_routes, client_routes
from router.allocator import keep_large_blocks
from router.chooser import Chooser, Knowledge
from router.config import split_address
from router.fleet import FleetTable
from router.health import Health
from router.metrics import Metrics
from router.proxy import Proxy, ProxyParts
from router.server import BACKLOG, RouteTable, build_server
from router.trace import DecisionTrace
from router.upkeep import Upkeep, supervise
from router.upstream import UpstreamPool, UpstreamSettings
from state.client import RedisSettings
from state.embedded import EmbeddedValkey
from state.lease import LeaseBook
from state.mirror import Mirror
from state.model import RouterId
from state.placement import Placements

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from aiohttp import web

    from router.config import Config
    from router.server import Handler
    from state.model import ReplicaId

_log = logging.getLogger(__name__)

STATE_TIMEOUT_S = 1.0
"""Patient, as no request waits for the state store; by then the view is called stale anyway."""


class Served(Struct, frozen=True, kw_only=True):
    """Where a running router can be reached: ``http://host:port``, and its state server."""

    url: str
    admin_url: str | None
    state_url: str | None


class App:
    """One router process's parts, wired; no sockets yet."""

    def __init__(self, config: Config, reader: Mirror) -> None:
        clock = time.monotonic
        seed = config.seed if config.seed is not None else secrets.randbits(63)
        times = config.upstream
        self.config = config
        self.reader = reader
        self.pool = UpstreamPool(
            UpstreamSettings(
                connect_timeout_s=times.connect_timeout_s,
                first_byte_timeout_s=times.first_byte_timeout_s,
                chunk_idle_timeout_s=times.chunk_idle_timeout_s,
                write_stall_timeout_s=times.write_stall_timeout_s,
                pool_idle_s=times.pool_idle_s,
            )
        )
        self.know = Knowledge(
            reader=reader,
            leases=LeaseBook(),
            pending=Placements(config.placements.pending_s),
            guessed=Placements(config.placements.guess_s),
            heat=HeatMap(config.hot_prefix),
        )
        self.fleet = FleetTable(reader, config.replicas)
        self.health = Health(self.fleet, self.pool, config.health, random.Random(seed))  # noqa: S311 - jitter
        self.upkeep = Upkeep(self.know, self.fleet, config.placements.guess_s, clock)
        codecs = {model.name: load_codec(Path(model.tokenizer)) for model in config.models}
        self.prompts = PromptReader(codecs, load_codec(None))
        self.trace = DecisionTrace(config.decisions_kept)
        self.metrics = Metrics()
        chooser = Chooser(
            self.know,
            config.policy,
            chain_seed=config.state.chain_seed,
            seed=seed,
            clock=clock,
        )
        self.proxy = Proxy(
            ProxyParts(
                config=config,
                reader=reader,
                fleet=self.fleet,
                health=self.health,
                prompts=self.prompts,
                chooser=chooser,
                pool=self.pool,
                trace=self.trace,
                metrics=self.metrics,
                clock=clock,
                unix_clock=time.time,
                mint_id=lambda: secrets.token_hex(16),
            )
        )
        self.admin = Admin(
            AdminParts(
                reader=reader,
                fleet=self.fleet,
                health=self.health,
                leases=self.know.leases,
                trace=self.trace,
                metrics=self.metrics,
                holdings=self.holdings,
            )
        )
        self._wire_gauges()

    def holdings(self) -> Mapping[ReplicaId, int]:
        """Return the blocks that each replica is known, or guessed, to hold."""
        held = self.reader.holdings()
        guessed = self.know.guessed
        return {
            replica: held[replica].blocks if replica in held else guessed.resident(replica)
            for replica in self.fleet.members()
        }

    def _wire_gauges(self) -> None:
        gauges, leases = self.metrics.gauges, self.know.leases
        gauges.inflight = lambda: {r: leases.inflight(r) for r in self.fleet.members()}
        gauges.up = lambda: {r: self.health.is_up(r) for r in self.fleet.members()}
        gauges.resident_blocks = self.holdings
        gauges.freshness = self.reader.freshness
        gauges.loop_lag_s = lambda: self.upkeep.loop_lag_s
        gauges.open_connections = lambda: self.pool.open_connections


async def _listen(
    routes: Mapping[str, Mapping[str, Handler]], key: str, address: str
) -> tuple[web.Server, asyncio.Server, str]:
    host, port = split_address(key, address)
    server = build_server(RouteTable(routes))
    listener = await asyncio.get_running_loop().create_server(server, host, port, backlog=BACKLOG)
    bound_port = listener.sockets[0].getsockname()[1]
    return server, listener, f"http://{f'[{host}]' if ':' in host else host}:{bound_port}"


async def serve(config: Config, ready: Callable[[Served], None]) -> None:
    """Run a router until SIGTERM or SIGINT, then drain; ``ready`` is called once it listens."""
    keep_large_blocks()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        state_url = config.state.redis
        if state_url is None:
            state_url = (await stack.enter_async_context(EmbeddedValkey())).url
        router_id = RouterId(secrets.token_hex(6))
        reader = await stack.enter_async_context(
            Mirror(
                RedisSettings(
                    url=state_url,
                    command_timeout_s=STATE_TIMEOUT_S,
                    connect_timeout_s=STATE_TIMEOUT_S,
                ),
                router_id,
                clock=time.monotonic,
                rng=random.Random(router_id),  # noqa: S311 - jitter
            )
        )
        app = App(config, reader)
        stack.push_async_callback(app.pool.close)
        stack.callback(app.prompts.close)
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        background = [
            tasks.create_task(supervise("health", app.health.run), name="health"),
            tasks.create_task(supervise("upkeep", app.upkeep.run), name="upkeep"),
        ]
        try:
            await _serve_until(app, stop, state_url, ready)
        finally:
            for task in background:
                task.cancel()


async def _serve_until(
    app: App, stop: asyncio.Event, state_url: str, ready: Callable[[Served], None]
) -> None:
    """Listen until ``stop``, then drain: not ready, still accepting, finish, close."""
    config = app.config
    clients, listener, url = await _listen(
        client_routes(app.proxy, app.admin), "listen", config.listen
    )
    operators, admin_listener, admin_url = None, None, None
    if config.admin is not None:
        operators, admin_listener, admin_url = await _listen(
            admin_routes(app.admin), "admin", config.admin
        )
    ready(Served(url=url, admin_url=admin_url, state_url=state_url))
    await stop.wait()
    app.admin.is_draining = True
    _log.info("draining: %d requests open", app.proxy.open_requests)
    with suppress(asyncio.CancelledError):
        await asyncio.sleep(config.drain.accept_s)
    listener.close()
    try:
        async with asyncio.timeout(config.drain.grace_s):
            await app.proxy.idle()
    except TimeoutError:
        _log.warning("drain: %d requests did not finish in time", app.proxy.open_requests)
    await clients.shutdown(timeout=0.5)
    if operators is not None and admin_listener is not None:
        admin_listener.close()
        await operators.shutdown(timeout=0.5)
