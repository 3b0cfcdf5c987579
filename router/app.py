"""The composition root: builds every part of the router in order, runs it, takes it down.

Everything is built under one exit stack and one task group; tests build the same app with other
parts.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import secrets
import signal
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec import Struct, structs

from policies.hot import HeatMap
from policies.prefill import PrefillCost
from prompt.codec import load_codec
from prompt.model import CodecLoadError
from prompt.reader import PromptReader
from router.admin import Admin, AdminParts, admin_routes, client_routes
from router.allocator import keep_large_blocks
from router.billing import open_billing
from router.chooser import Chooser, Knowledge
from router.config import ConfigError
from router.decision_log import open_decision_log
from router.diagnosis import Diagnoses
from router.epoch import open_scopes
from router.feedback import Feedback
from router.fleet import FleetTable
from router.gate import load_secret, open_gate
from router.health import Health
from router.hold import Hold
from router.lifecycle import Lifecycle
from router.listener import Listener
from router.metrics import Metrics
from router.proxy import Proxy, ProxyParts
from router.quota import open_quotas, placements_of
from router.replica_view import FleetView, ViewParts
from router.state_reader import enter_reader
from router.token_source import TokenSource, TokenSourceParts
from router.trace import DecisionTrace
from router.trust_metrics import TrustMetrics
from router.upkeep import Upkeep, supervise
from router.upstream import UpstreamPool, UpstreamSettings
from state.client import redact
from state.direct import DirectReader
from state.embedded import EmbeddedValkey
from state.lease import LeaseBook
from state.mirror import Mirror
from state.prefix import salt_scope
from state.secret import ChainKeys

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractAsyncContextManager

    from prompt.codec import Codec
    from router.client import Handler
    from router.config import Config
    from router.decision_log import DecisionLog
    from router.epoch import ScopeEpochs
    from state.model import ReplicaId

    Beside = Callable[["App", str], AbstractAsyncContextManager[object]]

_log = logging.getLogger(__name__)

GC_THRESHOLDS: Final = (10_000, 10, 10)
"""A request makes some 500 objects, hardly any of them in cycles: looked at less often."""
SWITCH_S: Final = 0.0005
"""How long a thread that tokenizes a long prompt may keep the event loop waiting."""


class Served(Struct, frozen=True, kw_only=True):
    """Where a running router can be reached, and its state server, without credentials."""

    url: str
    admin_url: str | None
    state_url: str | None


def _knowledge(config: Config, reader: Mirror | DirectReader) -> Knowledge:
    keeps_placements = getattr(config.policy, "uses_placements", False)
    make = placements_of(config)
    return Knowledge(
        reader=reader,
        leases=LeaseBook(),
        pending=make(config.placements.pending_s),
        guessed=make(config.placements.guess_s),
        heat=HeatMap(config.hot_prefix),
        placed=make(config.placements.guess_s) if keeps_placements else None,
    )


class App:
    """One router process's parts, wired; no sockets yet."""

    def __init__(
        self,
        config: Config,
        codecs: Mapping[str, Codec],
        reader: Mirror | DirectReader,
        decisions: DecisionLog | None = None,
        secret: bytes | None = None,
        scopes: ScopeEpochs | None = None,
    ) -> None:
        clock = time.monotonic
        seed = config.seed if config.seed is not None else secrets.randbits(63)
        self.config = config
        self.reader = reader
        self.pool = UpstreamPool(UpstreamSettings(**structs.asdict(config.upstream)))
        self.know = _knowledge(config, reader)
        self.fleet = FleetTable(reader, config.replicas, config.adapters)
        jitter = random.Random(seed)  # noqa: S311 - spreads checks, guards nothing
        self.health = Health(self.fleet, self.pool, config.health, jitter)
        self.feedback = Feedback(self.know, clock, Diagnoses(time.time), reader.clears)
        self.upkeep = Upkeep(self.know, self.fleet, config.placements.guess_s, clock, self.feedback)
        self.prompts = PromptReader(codecs, load_codec(None), base_of=self.fleet.adapters.base_of)
        self.trace = DecisionTrace(config.decisions_kept)
        self.metrics = Metrics()
        self.metrics.registry.register(TrustMetrics(self.feedback, self.fleet.members))
        self.decisions = decisions
        if decisions is not None:
            self.metrics.registry.register(decisions)
        self.keys = ChainKeys(config.state.chain_seed, secret)
        self.gate = open_gate(config, secret, self.metrics.registry, scopes)
        self.tokens = self._build_tokens(jitter)
        self.hold = self._build_hold()
        self.lifecycle: Lifecycle | None = None
        self.billing = open_billing(config, self.metrics.registry) if config.tenants else None
        self.chooser = self._build_chooser(seed)
        self.proxy = Proxy(self._proxy_parts())
        self.view = self._build_view()
        self.admin = self._build_admin()
        self._wire_gauges()

    def _proxy_parts(self) -> ProxyParts:
        return ProxyParts(
            config=self.config,
            reader=self.reader,
            fleet=self.fleet,
            health=self.health,
            prompts=self.prompts,
            tokens=self.tokens,
            chooser=self.chooser,
            pool=self.pool,
            trace=self.trace,
            metrics=self.metrics,
            clock=time.monotonic,
            unix_clock=time.time,
            mint_id=lambda: secrets.token_hex(16),
            lookup=self.reader if isinstance(self.reader, DirectReader) else None,
            decisions=self.decisions,
            hold=self.hold,
            feedback=self.feedback,
            gate=self.gate,
            billing=self.billing,
            quotas=open_quotas(self.config, self.metrics.registry),
        )

    def _build_tokens(self, rng: random.Random) -> TokenSource:
        models = self.config.models
        return TokenSource(
            TokenSourceParts(
                fleet=self.fleet,
                pulse=self.health,
                pool=self.pool,
                settings=self.config.tokens,
                sources={model.name: model.tokens for model in models if model.tokens},
                registry=self.metrics.registry,
                clock=time.monotonic,
                rng=rng,
            )
        )

    def _build_chooser(self, seed: int) -> Chooser:
        return Chooser(
            self.know,
            self.config.policy,
            keys=self.keys,
            seed=seed,
            clock=time.monotonic,
            kv_transfer=self.config.kv_transfer,
        )

    def _build_hold(self) -> Hold | None:
        """Return the queue, where it is on.

        Without tenants, clients that share a cache salt are one.
        """
        settings = self.config.hold
        if not settings.enabled:
            return None
        cost = getattr(self.config.policy, "prefill", None)
        return Hold(
            settings,
            clock=time.monotonic,
            note=self.metrics.held,
            tenant_of=lambda routed: routed.tenant or salt_scope(routed.prompt.salt),
            cost=cost if isinstance(cost, PrefillCost) else PrefillCost(),
        )

    def _build_admin(self) -> Admin:
        return Admin(
            AdminParts(
                reader=self.reader,
                fleet=self.fleet,
                health=self.health,
                trace=self.trace,
                metrics=self.metrics,
                view=self.view,
                feedback=self.feedback,
            )
        )

    def _build_view(self) -> FleetView:
        return FleetView(
            ViewParts(
                config=self.config,
                digests=self.prompts.digests,
                reader=self.reader,
                fleet=self.fleet,
                health=self.health,
                leases=self.know.leases,
                trace=self.trace,
                keys=self.keys,
                facts=self.reader.facts,
                holdings=self.holdings,
                trust=self.feedback.rows,
            )
        )

    def operator_routes(self) -> dict[str, Mapping[str, Handler]]:
        """Return the table of the operator's listener."""
        scope_routes = self.lifecycle.routes() if self.lifecycle is not None else {}
        return admin_routes(self.admin) | scope_routes

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
        gauges.freshness, gauges.mirror = self.reader.freshness, self.reader.figures
        if isinstance(self.reader, DirectReader):
            gauges.lookups = self.reader.counts.by_outcome
        if self.hold is not None:
            gauges.held_requests = self.hold.__len__
        gauges.loop_lag_s = lambda: self.upkeep.loop_lag_s
        gauges.open_connections = lambda: self.pool.open_connections
        gauges.unusable_records = lambda: len(self.fleet.unusable)


def load_codecs(config: Config) -> dict[str, Codec]:
    """Return the codec of each configured model; raises ConfigError."""
    codecs: dict[str, Codec] = {}
    for index, model in enumerate(config.models):
        if model.tokenizer is None:
            continue
        try:
            codecs[model.name] = load_codec(Path(model.tokenizer))
        except CodecLoadError as error:
            message = f"models[{index}].tokenizer: {error}"
            raise ConfigError(message) from None
    return codecs


async def serve(
    config: Config, ready: Callable[[Served], None], beside: Beside | None = None
) -> None:
    """Run a router until SIGTERM or SIGINT, then drain; ``ready`` is called once it listens.

    ``beside`` makes what runs as long as the router does, of its parts and the state's URL. Raises
    ConfigError for what only starting shows: a tokenizer, an address, a state URL.
    """
    codecs = load_codecs(config)
    secret = load_secret(config)
    async with AsyncExitStack() as stack:
        decisions = open_decision_log(
            config.decisions,
            config.policy,
            secrets.token_hex(6),
            clock=time.monotonic,
            unix_s=time.time(),
        )
        if decisions is not None:
            stack.push_async_callback(decisions.close)
        clients = Listener("listen", config.listen)
        stack.push_async_callback(clients.close)
        operators = None
        if config.admin is not None:
            operators = Listener("admin", config.admin)
            stack.push_async_callback(operators.close)
        state_url = config.state.redis
        if state_url is None:
            state_url = (await stack.enter_async_context(EmbeddedValkey())).url
        scopes = open_scopes(config, secret, state_url, time.monotonic)
        reader = await enter_reader(stack, state_url, config.state.lookup, scopes)
        if isinstance(reader, Mirror):
            reader.limit_memory(config.state.mirror_bytes)
        app = App(config, codecs, reader, decisions, secret, scopes)
        if scopes is not None:
            app.lifecycle = await stack.enter_async_context(Lifecycle(app, scopes))
        stack.push_async_callback(app.pool.close)
        stack.push_async_callback(app.tokens.close)
        stack.callback(app.prompts.close)
        if beside is not None:
            await stack.enter_async_context(beside(app, state_url))
        app.view.listen = clients.url
        served = Served(
            url=clients.url,
            admin_url=None if operators is None else operators.url,
            state_url=redact(state_url),
        )
        await _serve_until_told(app, clients, operators, lambda: ready(served))


async def _serve_until_told(
    app: App, clients: Listener, operators: Listener | None, ready: Callable[[], None]
) -> None:
    """Serve until SIGTERM or SIGINT, then drain: not ready, still accepting, finish."""
    keep_large_blocks()
    sys.setswitchinterval(SWITCH_S)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with asyncio.TaskGroup() as tasks:
        background = [
            tasks.create_task(supervise("health", app.health.run), name="health"),
            tasks.create_task(supervise("upkeep", app.upkeep.run), name="upkeep"),
        ]
        if app.decisions is not None:
            run = supervise("decision log", app.decisions.run)
            background.append(tasks.create_task(run, name="decision log"))
        routes = client_routes(app.proxy, app.admin, app.config.paths)
        await clients.start(
            routes if app.gate is None else app.gate.guarded(routes), app.config.limits
        )
        if operators is not None:
            await operators.start(app.operator_routes(), app.config.limits)
        # What lives as long as the process is not looked at again by every collection.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        ready()
        await stop.wait()
        await _drain(app, clients)
        for task in background:
            task.cancel()


async def _drain(app: App, clients: Listener) -> None:
    """Let open requests finish; load balancers that look at ``/readyz`` have left before."""
    drain = app.config.drain
    app.admin.is_draining = True
    if app.hold is not None:
        app.hold.drain()
    _log.info("draining: %d requests open", app.proxy.open_requests)
    await asyncio.sleep(drain.accept_s)
    clients.stop_accepting()
    try:
        async with asyncio.timeout(drain.grace_s):
            await app.proxy.idle()
    except TimeoutError:
        _log.warning("drain: %d requests did not finish in time", app.proxy.open_requests)
