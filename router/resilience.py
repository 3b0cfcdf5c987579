"""Builds what keeps a fleet serving while some of it fails, and shows it as metrics."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from router.autopsy import Autopsy
from router.availability import Availability, Standing
from router.ejection import Cause
from router.quarantine import Quarantine
from router.recovery import Recovery, RecoveryParts
from router.retry_budget import RetryBudget
from router.silence import Silence

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable

    from prometheus_client import CollectorRegistry, Metric

    from router.config import Config
    from router.fleet import FleetTable
    from router.health import Health
    from router.upstream import UpstreamPool
    from state.lease import LeaseBook

SECRET_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ResilienceParts:
    """What it is built on."""

    config: Config
    fleet: FleetTable
    health: Health
    leases: LeaseBook
    pool: UpstreamPool
    registry: CollectorRegistry
    clock: Callable[[], float]
    rng: random.Random
    standing: Callable[[], tuple[int, int]] = lambda: (0, 1)
    """How many live routers come before this one, and how many there are."""


class Resilience(Collector):
    """The parts of one router, wired."""

    def __init__(self, parts: ResilienceParts) -> None:
        config, clock = parts.config, parts.clock
        self._fleet, self._clock = parts.fleet, clock
        self.availability = Availability(
            parts.fleet,
            parts.health,
            parts.leases,
            config.ejection,
            ramp_s=config.health.slow_start_s,
            clock=clock,
            rng=parts.rng,
        )
        parts.health.on_change = self.availability.look
        self.quarantine = Quarantine(config.quarantine, secrets.token_bytes(SECRET_BYTES))
        self.recovery = Recovery(
            RecoveryParts(
                settings=config.retry,
                fleet=parts.fleet,
                health=parts.health,
                availability=self.availability,
                budget=RetryBudget(config.retry, clock()),
                quarantine=self.quarantine,
                autopsy=Autopsy(parts.pool),
                clock=clock,
                standing=parts.standing,
            )
        )
        self._silence = Silence(parts.health, parts.pool, self.availability)
        parts.registry.register(self)

    def tick(self) -> None:
        """Follow time and the checks."""
        self.availability.look()
        self.quarantine.tick(self._clock())
        self._silence.look()

    def collect(self) -> Iterable[Metric]:
        """Yield the standing of each replica as it is now, and what was counted."""
        availability, quarantine = self.availability, self.quarantine
        states = GaugeMetricFamily(
            "warmroute_replica_state", "1 for what a replica is now.", labels=["replica", "state"]
        )
        for replica in self._fleet.members():
            now = availability.standing(replica).standing
            for standing in Standing:
                states.add_metric([replica, standing.value], float(standing is now))
        yield states
        ejections = CounterMetricFamily(
            "warmroute_ejections", "Replicas ejected, by cause.", labels=["cause"]
        )
        for cause in Cause:
            ejections.add_metric([cause.value], float(availability.ejections[cause.value]))
        yield ejections
        text = "Models of which so few replicas are available that all are used."
        short = len(availability.short_models)
        yield GaugeMetricFamily("warmroute_panic_models", text, value=float(short))
        text = "Times that a model came to be short of replicas."
        yield CounterMetricFamily("warmroute_panics", text, value=float(availability.panics))
        text = "Requests that are refused because replicas died of them."
        yield GaugeMetricFamily(
            "warmroute_quarantined_requests", text, value=float(quarantine.convicts)
        )
        text = "Times that a quarantined request was refused."
        yield CounterMetricFamily(
            "warmroute_quarantine_refusals", text, value=float(quarantine.refused)
        )
        yield self.recovery.retries.metric()
        yield self.recovery.denied.metric()

    async def close(self) -> None:
        """End what runs on its own."""
        await self.recovery.close()
