"""The composition root: builds every part of the router in order.

Everything is built under one exit stack and one task group; tests build the same app with other
parts.
"""

from __future__ import annotations

import logging
import random
import secrets
import time
from typing import TYPE_CHECKING

from msgspec import structs

from policies.hot import HeatMap
from prompt.codec import load_codec
from prompt.reader import PromptReader
from router.admin import Admin, AdminParts, admin_routes
from router.billing import open_billing
from router.canary import open_canary
from router.chooser import Chooser, Knowledge
from router.concurrency import learned_limits
from router.diagnosis import Diagnoses
from router.discovery.source import Discovery
from router.entrance import Entrance, EntranceParts
from router.feedback import Feedback
from router.fleet import FleetTable
from router.gate import open_gate
from router.health import Health
from router.hedge import Hedging
from router.history import History
from router.metrics import Metrics
from router.mint import Mint
from router.operator import open_live, page_routes
from router.proxy import Proxy, ProxyParts
from router.public_prefix import open_public
from router.quota import open_quotas, placements_of
from router.recording import open_recording
from router.replica_view import FleetView, ViewParts
from router.resilience import Resilience, ResilienceParts
from router.saving import open_savings
from router.sealed_state import SealCounts
from router.shadow_policy import open_shadow
from router.supervisor.share import share_of
from router.token_source import TokenSource, TokenSourceParts
from router.trace import DecisionTrace
from router.trust_metrics import TrustMetrics
from router.upkeep import Upkeep
from router.upstream import UpstreamPool, UpstreamSettings
from state.direct import DirectReader
from state.lease import LeaseBook
from state.secret import ChainKeys

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from contextlib import AbstractAsyncContextManager

    from prompt.codec import Codec
    from router.access_log import AccessLog
    from router.client import Handler
    from router.config import Config
    from router.decision_log import DecisionLog
    from router.epoch import ScopeEpochs
    from router.lifecycle import Lifecycle
    from router.setting_life import SettingLife
    from router.tls import TlsWatch
    from router.tracing import Tracing
    from router.warm_up import WarmUps
    from state.mirror import Mirror
    from state.model import ReplicaId

    Beside = Callable[["App", str], AbstractAsyncContextManager[object]]

_log = logging.getLogger(__name__)


def _knowledge(config: Config, reader: Mirror | DirectReader) -> Knowledge:
    keeps_placements = getattr(config.policy, "uses_placements", False)
    make = placements_of(config)
    leases = LeaseBook()
    return Knowledge(
        reader=reader,
        leases=leases,
        pending=make(config.placements.pending_s),
        guessed=make(config.placements.guess_s),
        heat=HeatMap(config.hot_prefix),
        placed=make(config.placements.guess_s) if keeps_placements else None,
        limits=learned_limits(config.admission, leases, reader),
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
        self.whole = config
        """What is configured for all processes; ``config`` is this one's share."""
        self.config = config = share_of(config)
        self.reader = reader
        self.pool = UpstreamPool(UpstreamSettings(**structs.asdict(config.upstream)))
        self.know = _knowledge(config, reader)
        self.fleet = FleetTable(reader, config.replicas, config.adapters, config.registration)
        jitter = random.Random(seed)  # noqa: S311 - spreads checks, guards nothing
        self.discovery = Discovery(config, self.fleet, jitter)
        self.health = Health(self.fleet, self.pool, config.health, jitter)
        self.feedback = Feedback(self.know, clock, Diagnoses(time.time), reader.clears)
        self.metrics = Metrics()
        self.metrics.registry.register(self.discovery.directory)
        self.metrics.registry.register(SealCounts(reader.guard))
        self.resilience = self._build_resilience(jitter)
        self.upkeep = Upkeep(
            self.know, self.fleet, config.placements.guess_s, clock, self.feedback, self.resilience
        )
        self.prompts = self._prompt_reader(codecs)
        self.trace = DecisionTrace(config.decisions_kept)
        self.metrics.registry.register(TrustMetrics(self.feedback, self.fleet.members))
        self.decisions = decisions
        if decisions is not None:
            self.metrics.registry.register(decisions)
        self.keys = ChainKeys(config.state.chain_seed, secret)
        self.gate = open_gate(config, secret, self.metrics.registry, scopes)
        self.tokens = self._build_tokens(jitter)
        self.entrance = self._build_entrance()
        self.hold = self.entrance.hold
        self.lifecycle: Lifecycle | None = None
        self.tls: TlsWatch | None = None
        self.settings: SettingLife | None = None
        self.warm_ups: WarmUps | None = None
        self.access: AccessLog | None = None
        self.billing = open_billing(config, self.metrics.registry) if config.tenants else None
        self.chooser = self._build_chooser(seed)
        self.quotas = open_quotas(config, self.metrics.registry)
        self.history = History(clock, time.time())
        registry = self.metrics.registry
        self.recording = open_recording(config.recording, registry, time.time)
        self.shadow = open_shadow(config.shadow, lambda: self.chooser.decided_by, registry, clock)
        self.canary = open_canary(self.chooser, registry, time.time)
        self.proxy = Proxy(self._proxy_parts())
        self._hedge()
        self.view = self._build_view()
        self.admin = self._build_admin()
        self._wire_gauges()
        open_savings(self)
        self.live = open_live(self, self.history)

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
            mint_id=Mint(),
            availability=self.resilience.availability,
            recovery=self.resilience.recovery,
            quarantine=self.resilience.quarantine,
            lookup=self.reader if isinstance(self.reader, DirectReader) else None,
            decisions=self.decisions,
            hold=self.hold,
            admission=self.entrance.admission,
            feedback=self.feedback,
            gate=self.gate,
            billing=self.billing,
            quotas=self.quotas,
            history=self.history,
            recording=self.recording,
            shadow=self.shadow,
            canary=self.canary,
        )

    def _hedge(self) -> None:
        """Let slow first bytes be hedged, where that is configured."""
        if self.config.hedge.enabled:
            leases, overload = self.know.leases, self.entrance.overload
            hedging = Hedging(
                self.proxy.parts,
                self.proxy.attempts,
                leases.inflight,
                lambda: bool(overload.rung),
            )
            self.proxy.hedging = hedging
            self.metrics.registry.register(hedging)

    def _build_resilience(self, rng: random.Random) -> Resilience:
        return Resilience(
            ResilienceParts(
                config=self.config,
                fleet=self.fleet,
                health=self.health,
                leases=self.know.leases,
                pool=self.pool,
                registry=self.metrics.registry,
                clock=time.monotonic,
                rng=rng,
                standing=lambda: (self.reader.rank, self.reader.routers),
            )
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
        chooser = Chooser(
            self.know,
            self.config.policy,
            keys=self.keys,
            seed=seed,
            clock=time.monotonic,
            kv_transfer=self.config.kv_transfer,
        )
        chooser.outlook.public = open_public(self.config, self.prompts)
        return chooser

    def _build_entrance(self) -> Entrance:
        return Entrance(
            EntranceParts(
                config=self.config,
                know=self.know,
                reader=self.reader,
                routers=lambda: max(self.reader.routers, self.config.processes),
                fleet=self.fleet,
                pulse=self.health,
                candidates=self.resilience.availability.candidates,
                metrics=self.metrics,
                clock=time.monotonic,
                lag_s=lambda: self.upkeep.loop_lag_s,
            )
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
                admission=self.entrance.view,
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
                standing=self.resilience.availability.standing,
                admission=self.entrance.view,
                decided_by=lambda: self.chooser.decided_by,
            )
        )

    def operator_routes(self) -> dict[str, Mapping[str, Handler]]:
        """Return the table of the operator's listener."""
        scope_routes = self.lifecycle.routes() if self.lifecycle is not None else {}
        setting_routes = self.settings.routes() if self.settings is not None else {}
        return admin_routes(self.admin) | page_routes(self) | scope_routes | setting_routes

    def aside(self) -> dict[str, Callable[[], Awaitable[None]]]:
        """Return what runs beside the requests and is not needed for any."""
        found = {
            "recording": self.recording,
            "shadow": self.shadow,
            "warm-up": self.warm_ups,
        }
        return {name: part.run for name, part in found.items() if part is not None}

    def log_access(self, access: AccessLog | None) -> None:
        """Log requests there from now on."""
        self.access = self.proxy.access = access
        if access is not None:
            self.metrics.registry.register(access)

    def trace_requests(self, tracing: Tracing | None) -> None:
        """Trace requests there from now on."""
        self.proxy.tracing = tracing
        if tracing is not None:
            self.metrics.registry.register(tracing)

    def _prompt_reader(self, codecs: Mapping[str, Codec]) -> PromptReader:
        base_of, kept_bytes = self.fleet.adapters.base_of, self.config.prompt_bytes
        return PromptReader(codecs, load_codec(None), base_of=base_of, kept_bytes=kept_bytes)

    def holdings(self) -> Mapping[ReplicaId, int]:
        """Return the blocks that each replica is known, or guessed, to hold."""
        held = self.reader.holdings()
        guessed = self.know.guessed
        return {
            replica: held[replica].blocks
            if replica in held and member.has_events
            else guessed.resident(replica)
            for replica, member in self.fleet.members().items()
        }

    def _wire_gauges(self) -> None:
        gauges, leases = self.metrics.gauges, self.know.leases
        gauges.inflight = lambda: {r: leases.inflight(r) for r in self.fleet.members()}
        gauges.up = lambda: {r: self.health.is_up(r) for r in self.fleet.members()}
        gauges.resident_blocks = self.holdings
        gauges.freshness, gauges.mirror = self.reader.freshness, self.reader.figures
        if isinstance(self.reader, DirectReader):
            gauges.lookups = self.reader.counts.by_outcome
        gauges.held_requests = self.entrance.waiting
        gauges.loop_lag_s = lambda: self.upkeep.loop_lag_s
        gauges.spreads.append(self.upkeep.lags)
        gauges.open_connections = lambda: self.pool.open_connections
        gauges.unusable_records = lambda: len(self.fleet.unusable)
        gauges.prompt_bytes = lambda: self.prompts.used_bytes
