"""What an operator sees at a glance: the fleet and the router as they are, and the last minute.

``GET /admin/snapshot`` answers a ``Snapshot``; the dashboard gets one a second, ``warmroute top``
shows it in a terminal. Unknown is None.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from msgspec import Struct, structs

from router.canary_row import CanaryRow
from router.replica_view import RouterView
from router.sums import Minute
from state.model import ReplicaId

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from policies.hot import HeatMap
    from router.diagnosis import Diagnoses
    from router.fleet import FleetTable
    from router.history import History
    from router.replica_view import FleetView, ReplicaView
    from state.model import Generation, ReplicaState

HOT_SHOWN: Final = 20
MODELS_SHOWN: Final = 4
ID_DIGITS: Final = 12


class ReplicaRow(Struct, frozen=True, kw_only=True):
    """One replica. ``inflight`` are this router's requests, ``inflight_elsewhere`` other routers'.

    ``state`` is a ``Standing`` or "draining", with its cause, and for how many seconds more.
    ``limit`` bounds what is in flight there; None without one.
    ``models`` are the first few of ``model_count``. ``running``, ``queued`` and
    ``kv_used_fraction`` are the engine's own report. ``credit`` is the least part of a prediction
    that counts, ``precision`` that of the predictions which it goes by. ``generation_age_s`` is
    since this router saw the cache's life begin, or itself began where ``is_age_least``. ``last``
    is None where nothing was sent there in the last minute. ``notes`` are names of what is wrong.
    """

    replica: str
    endpoint: str
    state: str
    why: str
    left_s: float | None
    models: tuple[str, ...]
    model_count: int
    rank: int | None
    has_sidecar: bool
    has_events: bool
    inflight: int
    inflight_elsewhere: int
    limit: int | None
    running: int | None
    queued: int | None
    kv_used_fraction: float | None
    resident_blocks: int
    block_tokens: int | None
    capacity_tokens: int | None
    credit: float | None
    precision: float | None
    generation: str | None
    generation_age_s: float | None
    is_age_least: bool
    last: Minute | None
    notes: tuple[str, ...]


class PrefixRow(Struct, frozen=True, kw_only=True):
    """One hot prefix. ``prefix`` is the start of its last block's id.

    ``requests`` and ``spills`` are those of the last minute.
    """

    prefix: str
    tokens: int
    rate_per_s: float
    holders: tuple[str, ...]
    requests: int
    spills: int


class TenantRow(Struct, frozen=True, kw_only=True):
    """One configured tenant; ``inflight`` is None where requests are not counted by tenant."""

    tenant: str
    inflight: int | None
    last: Minute | None


class DiagnosisRow(Struct, frozen=True, kw_only=True):
    """One finding that lasts; ``/admin/diagnoses`` has its evidence."""

    kind: str
    replica: str
    model: str
    since_unix_s: float
    times: int
    finding: str
    advice: str


class Snapshot(Struct, frozen=True, kw_only=True):
    """Everything at one moment. ``rates`` are the requests of each of the last 60 s.

    ``canary`` is None where the settings have none.
    """

    unix_s: float
    started_unix_s: float
    version: str
    is_draining: bool
    open_requests: int
    held_requests: int
    replica_connections: int
    loop_lag_s: float
    viewers: int
    router: RouterView
    last: Minute
    rates: tuple[int, ...]
    replicas: tuple[ReplicaRow, ...]
    hot_prefixes: tuple[PrefixRow, ...]
    tenants: tuple[TenantRow, ...]
    diagnoses: tuple[DiagnosisRow, ...]
    canary: CanaryRow | None = None


@dataclass(slots=True)
class Ages:
    """Since when each replica's generation is known; ``tick`` is called about once a second."""

    clock: Callable[[], float]
    _since: dict[ReplicaId, tuple[Generation, float, bool]] = field(default_factory=dict)
    _is_first: bool = True

    def tick(self, registered: Mapping[ReplicaId, ReplicaState]) -> None:
        """Take in the registry. What is there at the first look may be older."""
        if not registered and self._is_first:
            return
        now_s, before = self.clock(), self._since
        after: dict[ReplicaId, tuple[Generation, float, bool]] = {}
        for replica, state in registered.items():
            known = before.get(replica)
            generation = state.record.generation
            is_same = known is not None and known[0] == generation
            after[replica] = known if is_same and known else (generation, now_s, self._is_first)
        self._since, self._is_first = after, False

    def of(self, replica: ReplicaId) -> tuple[float | None, bool]:
        """Return the age in seconds, and whether it is the least one."""
        known = self._since.get(replica)
        return (None, False) if known is None else (self.clock() - known[1], known[2])


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotParts:
    """What a snapshot is made of. ``tenants`` are the configured names."""

    view: FleetView
    fleet: FleetTable
    registered: Callable[[], Mapping[ReplicaId, ReplicaState]]
    heat: HeatMap
    diagnoses: Diagnoses
    history: History
    clock: Callable[[], float]
    unix_clock: Callable[[], float]
    version: str
    tenants: Sequence[str] = ()
    tenant_inflight: Callable[[str], int] | None = None
    is_draining: Callable[[], bool] = bool
    open_requests: Callable[[], int] = int
    held_requests: Callable[[], int] = int
    replica_connections: Callable[[], int] = int
    loop_lag_s: Callable[[], float] = float
    warm_up: Callable[[ReplicaId], str] = lambda _: ""
    """What is done to warm a replica, or before it goes; empty where nothing is."""
    canary: Callable[[], CanaryRow | None] = lambda: None


class Snapshots:
    """Makes snapshots of one router; nothing here waits."""

    def __init__(self, parts: SnapshotParts) -> None:
        self._parts = parts
        self._started_unix_s = parts.unix_clock()
        self.ages = Ages(parts.clock)
        self.viewers: Callable[[], int] = int

    def tick(self) -> None:
        """Follow generations, also while nobody looks."""
        self.ages.tick(self._parts.registered())

    def now(self) -> Snapshot:
        """Return everything as it is."""
        parts = self._parts
        history = parts.history
        found = parts.diagnoses.active()
        kinds: dict[str, list[str]] = {}
        for one in found:
            kinds.setdefault(one.replica, []).append(one.kind.value)
        minutes = history.replica_minutes(parts.fleet.members())
        views, router = parts.view.replicas(), parts.view.router()
        admission, places = router.admission, {}
        if admission is not None:  # what is said of each replica is in its row
            places = admission.replicas
            router = structs.replace(router, admission=structs.replace(admission, replicas={}))
        return Snapshot(
            unix_s=parts.unix_clock(),
            started_unix_s=self._started_unix_s,
            version=parts.version,
            is_draining=parts.is_draining(),
            open_requests=parts.open_requests(),
            held_requests=parts.held_requests(),
            replica_connections=parts.replica_connections(),
            loop_lag_s=round(parts.loop_lag_s(), 6),
            viewers=self.viewers(),
            router=router,
            last=history.minute(),
            rates=history.rates(),
            replicas=tuple(
                self._row(
                    view,
                    minutes,
                    tuple(kinds.get(view.replica, ())),
                    places[view.replica].limit if view.replica in places else None,
                )
                for view in views
            ),
            hot_prefixes=self._hot(),
            tenants=self._tenants(),
            diagnoses=tuple(
                DiagnosisRow(
                    kind=one.kind.value,
                    replica=one.replica,
                    model=one.model,
                    since_unix_s=one.since_unix_s,
                    times=one.times,
                    finding=one.finding,
                    advice=one.advice,
                )
                for one in found
            ),
            canary=parts.canary(),
        )

    def _row(
        self,
        view: ReplicaView,
        minutes: Mapping[ReplicaId, Minute],
        kinds: tuple[str, ...],
        limit: int | None,
    ) -> ReplicaRow:
        replica = ReplicaId(view.replica)
        load, told = view.load, [row for row in view.trust if row.precision is not None]
        age_s, is_least = self.ages.of(replica)
        state, why, left_s = state_of(view)
        why = why or self._parts.warm_up(replica)
        weakest = min(told, key=lambda row: row.credit, default=None)
        return ReplicaRow(
            replica=replica,
            endpoint=view.endpoint,
            state=state,
            why=why,
            left_s=left_s,
            models=view.models[:MODELS_SHOWN],
            model_count=len(view.models),
            rank=view.rank,
            has_sidecar=view.registered,
            has_events=view.has_events,
            inflight=view.inflight,
            inflight_elsewhere=view.inflight_elsewhere,
            limit=limit,
            running=load.running if load is not None else None,
            queued=load.queued if load is not None else None,
            kv_used_fraction=load.kv_used_fraction if load is not None else None,
            resident_blocks=view.resident_blocks,
            block_tokens=view.block_tokens,
            capacity_tokens=view.capacity_tokens,
            credit=weakest.credit if weakest is not None else None,
            precision=weakest.precision if weakest is not None else None,
            generation=view.generation,
            generation_age_s=None if age_s is None else round(age_s, 1),
            is_age_least=is_least,
            last=minutes.get(replica),
            notes=notes(view) + kinds,
        )

    def _hot(self) -> tuple[PrefixRow, ...]:
        parts = self._parts
        traffic = parts.history.prefix_traffic()
        members = parts.fleet.members()
        rows = []
        for hot in parts.heat.hottest(parts.clock(), HOT_SHOWN):
            seen = traffic.get(hot.prefix)
            rows.append(
                PrefixRow(
                    prefix=hot.prefix.hex()[:ID_DIGITS],
                    tokens=hot.tokens,
                    rate_per_s=round(hot.rate_per_s, 3),
                    holders=tuple(sorted(one for one in hot.holders if one in members)),
                    requests=seen.requests if seen is not None else 0,
                    spills=seen.spills if seen is not None else 0,
                )
            )
        return tuple(rows)

    def _tenants(self) -> tuple[TenantRow, ...]:
        parts = self._parts
        minutes = parts.history.tenant_minutes()
        inflight = parts.tenant_inflight
        return tuple(
            TenantRow(
                tenant=name,
                inflight=inflight(name) if inflight is not None else None,
                last=minutes.get(name),
            )
            for name in parts.tenants
        )


def state_of(view: ReplicaView) -> tuple[str, str, float | None]:
    """Return what a replica is, the cause, and for how many seconds more."""
    if view.draining:
        return "draining", "", None
    standing = view.standing
    if standing is None:
        return ("up" if view.up else "down"), view.fault or "", None
    left_s = None if standing.left_s is None else round(standing.left_s, 1)
    return standing.standing.value, standing.reason, left_s


def notes(view: ReplicaView) -> tuple[str, ...]:
    """Return the names of what is plainly wrong, as ``warmroute doctor`` has them."""
    facts, found = view.facts, []
    if not view.registered:
        found.append("no_sidecar")
    elif not view.has_events:
        found.append("events_off")
    if facts is not None:
        if facts.is_silent:
            found.append("events_silent")
        if facts.has_unfit_pages:
            found.append("page_mismatch")
        if facts.unknown_media:
            found.append("unknown_medium")
    if view.same_keys is False:
        found.append("keys_differ")
    return tuple(found)
