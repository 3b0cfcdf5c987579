"""Builds what stands before a request is routed, and shows it: overload, limits, rates, queue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec import Struct
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from policies.prefill import PrefillCost
from router.admission import Admission, AdmissionParts
from router.hold import Hold
from router.overload import LoadRung, Overload
from router.rate import Rates
from state.prefix import salt_scope

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from prometheus_client import Metric

    from router.chooser import Knowledge
    from router.config import Config
    from router.fleet import FleetTable, Member, Pulse
    from router.metrics import Metrics
    from state.store import FleetReader


class ReplicaPlaces(Struct, frozen=True, kw_only=True):
    """What one replica has in flight, of all routers, and may have.

    ``slowness``: how many times longer first tokens took of late than on the idle replica.
    """

    inflight: int
    limit: int | None = None
    slowness: float | None = None


class AdmissionView(Struct, frozen=True, kw_only=True):
    """What the router admits now. ``places`` are for leases of this router, ``routers`` are live.

    ``waiting`` of at most ``pending`` requests wait for a place, or for their replica.
    """

    rung: str
    inflight: int
    places: int
    waiting: int
    pending: int
    routers: int
    loop_lag_s: float
    memory_bytes: int | None = None
    memory_limit_bytes: int | None = None
    replicas: dict[str, ReplicaPlaces] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class EntranceParts:
    """What it is built on. ``routers`` is how many are live, with this one."""

    config: Config
    know: Knowledge
    reader: FleetReader
    routers: Callable[[], int]
    fleet: FleetTable
    pulse: Pulse
    candidates: Callable[[str | None], Sequence[Member]]
    metrics: Metrics
    clock: Callable[[], float]
    lag_s: Callable[[], float]


class Entrance(Collector):
    """The parts of one router, wired."""

    def __init__(self, parts: EntranceParts) -> None:
        config = parts.config
        self._parts = parts
        self.overload = Overload(
            config.admission.overload, clock=parts.clock, lag_s=parts.lag_s, tick=self._tick
        )
        self.admission = Admission(
            config.admission,
            AdmissionParts(
                leases=parts.know.leases,
                reader=parts.reader,
                fleet=parts.fleet,
                pulse=parts.pulse,
                candidates=parts.candidates,
                overload=self.overload,
                limits=parts.know.limits,
            ),
        )
        rates = Rates(config.tenants, parts.clock, parts.routers)
        self.admission.rates = rates or None
        self.hold = self._build_hold()
        if self.hold is not None:
            self.admission.gives_way = self.hold.gives_way
        registry = parts.metrics.registry
        registry.register(self)
        registry.register(self.admission.sheds.counts)

    def _build_hold(self) -> Hold | None:
        """Return the queue; None where requests ask the store once and cannot be chosen for anew.

        Without tenants, clients that share a cache salt are one.
        """
        config = self._parts.config
        if config.state.lookup == "direct":
            return None
        return Hold(
            config.hold,
            clock=self._parts.clock,
            note=self._parts.metrics.held,
            tenant_of=lambda routed: routed.tenant or salt_scope(routed.prompt.salt),
            cost=_cost_of(config),
            places=self.admission,
        )

    def adopt(self, config: Config) -> None:
        """Go by what ``config`` says of admission and holding from now on."""
        self.overload.adopt(config.admission.overload)
        self.admission.adopt(config.admission)
        if self.hold is not None:
            self.hold.adopt(config.hold, _cost_of(config))

    def _tick(self) -> None:
        self.admission.refresh()

    def waiting(self) -> int:
        """Return how many requests wait."""
        return 0 if self.hold is None else len(self.hold)

    def view(self) -> AdmissionView:
        """Return what is admitted now."""
        parts, admission, overload = self._parts, self.admission, self.overload
        limits = parts.know.limits
        ratios = limits.ratios() if limits is not None else {}
        return AdmissionView(
            rung=overload.rung.name.lower(),
            inflight=parts.know.leases.open_count,
            places=admission.cap,
            waiting=self.waiting(),
            pending=admission.pending,
            routers=parts.routers(),
            loop_lag_s=round(parts.lag_s(), 4),
            memory_bytes=overload.used_bytes,
            memory_limit_bytes=overload.limit_bytes,
            replicas={
                replica: ReplicaPlaces(
                    inflight=admission.inflight(replica),
                    limit=admission.limit(replica),
                    slowness=ratios.get(replica),
                )
                for replica in parts.fleet.members()
            },
        )

    def collect(self) -> Iterable[Metric]:
        """Yield what is admitted now, as gauges; those of replicas where they have limits."""
        view, overload = self.view(), self.overload
        ladder = GaugeMetricFamily(
            "warmroute_overload_rung", "1 for what the router stopped doing.", labels=["rung"]
        )
        for rung in LoadRung:
            ladder.add_metric([rung.name.lower()], float(rung is overload.rung))
        yield ladder
        moves = CounterMetricFamily(
            "warmroute_overload_transitions", "Moves to a rung.", labels=["rung"]
        )
        for rung in LoadRung:
            moves.add_metric([rung.name.lower()], float(overload.entered.get(rung, 0)))
        yield moves
        for name, text, value in (
            ("admission_inflight", "Open leases of this router.", view.inflight),
            ("admission_places", "Most open leases of this router.", view.places),
            ("admission_pending", "Most requests that may wait.", view.pending),
            ("live_routers", "Routers that share the fleet, with this one.", view.routers),
            ("memory_bytes", "Resident memory of this process.", view.memory_bytes),
            ("memory_limit_bytes", "What it may take.", view.memory_limit_bytes),
        ):
            if value is not None:
                yield GaugeMetricFamily(f"warmroute_{name}", text, value=float(value))
        limits = GaugeMetricFamily(
            "warmroute_replica_limit", "Most requests in flight there.", labels=["replica"]
        )
        slowness = GaugeMetricFamily(
            "warmroute_replica_slowness_ratio",
            "Times to first token against those of the idle replica.",
            labels=["replica"],
        )
        for replica, places in view.replicas.items():
            if places.limit is not None:
                limits.add_metric([replica], float(places.limit))
            if places.slowness is not None:
                slowness.add_metric([replica], places.slowness)
        yield limits
        yield slowness


def _cost_of(config: Config) -> PrefillCost:
    cost = getattr(config.policy, "prefill", None)
    return cost if isinstance(cost, PrefillCost) else PrefillCost()
