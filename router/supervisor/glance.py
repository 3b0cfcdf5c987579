"""The snapshot of several processes: the last minute from one history, the rest added up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import structs

from router.snapshot import HOT_SHOWN, DiagnosisRow, PrefixRow, ReplicaRow, Snapshot, TenantRow
from router.supervisor.canary import canary_row
from router.supervisor.whole import STANDINGS, grouped, router
from state.model import ReplicaId

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from router.history import History
    from router.sums import Minute

DRAINING = "draining"


class Glance:
    """Makes the snapshot of what processes told last; ``Live`` shows it."""

    def __init__(
        self,
        history: History,
        listen: str,
        started_unix_s: float,
        is_draining: Callable[[], bool],
    ) -> None:
        self._history = history
        self._listen = listen
        self._started_unix_s = started_unix_s
        self._is_draining = is_draining
        self.viewers: Callable[[], int] = int
        self.told: Sequence[Snapshot] = ()
        """What the processes said; there is at least one before anybody looks."""

    def tick(self) -> None:
        """Do nothing: each process follows generations by itself."""

    def now(self) -> Snapshot:
        """Return everything as it was told last."""
        told, history = self.told, self._history
        newest = max(told, key=lambda one: one.unix_s)
        rows = grouped((one.replicas for one in told), lambda row: row.replica)
        minutes = history.replica_minutes([ReplicaId(each[0].replica) for each in rows])
        tenant_minutes = history.tenant_minutes()
        tenants = grouped((one.tenants for one in told), lambda row: row.tenant)
        return structs.replace(
            newest,
            started_unix_s=self._started_unix_s,
            is_draining=self._is_draining(),
            open_requests=sum(one.open_requests for one in told),
            held_requests=sum(one.held_requests for one in told),
            replica_connections=sum(one.replica_connections for one in told),
            loop_lag_s=max(one.loop_lag_s for one in told),
            viewers=self.viewers(),
            router=router([one.router for one in told], self._listen),
            last=history.minute(),
            rates=history.rates(),
            replicas=tuple(
                _replica(each, minutes.get(ReplicaId(each[0].replica))) for each in rows
            ),
            hot_prefixes=_hot(told),
            tenants=tuple(_tenant(each, tenant_minutes.get(each[0].tenant)) for each in tenants),
            diagnoses=_diagnoses(told),
            canary=canary_row(told),
        )


def _replica(rows: Sequence[ReplicaRow], last: Minute | None) -> ReplicaRow:
    inflight = sum(row.inflight for row in rows)
    everywhere = max(row.inflight + row.inflight_elsewhere for row in rows)
    worst = max(rows, key=lambda row: _severity(row.state))
    weights = [row.credit for row in rows if row.credit is not None]
    precisions = [row.precision for row in rows if row.precision is not None]
    return structs.replace(
        worst,
        inflight=inflight,
        inflight_elsewhere=max(0, everywhere - inflight),
        resident_blocks=max(row.resident_blocks for row in rows),
        credit=min(weights, default=None),
        precision=min(precisions, default=None),
        last=last,
        notes=tuple(dict.fromkeys(note for row in rows for note in row.notes)),
    )


def _severity(state: str) -> int:
    if state == DRAINING:
        return len(STANDINGS)
    names = [standing.value for standing in STANDINGS]
    return names.index(state) if state in names else 0


def _hot(told: Sequence[Snapshot]) -> tuple[PrefixRow, ...]:
    rows = [
        structs.replace(
            each[0],
            rate_per_s=round(sum(row.rate_per_s for row in each), 3),
            holders=tuple(sorted({holder for row in each for holder in row.holders})),
            requests=sum(row.requests for row in each),
            spills=sum(row.spills for row in each),
        )
        for each in grouped((one.hot_prefixes for one in told), lambda row: row.prefix)
    ]
    return tuple(sorted(rows, key=lambda row: row.rate_per_s, reverse=True)[:HOT_SHOWN])


def _tenant(rows: Sequence[TenantRow], last: Minute | None) -> TenantRow:
    counted = [row.inflight for row in rows if row.inflight is not None]
    return structs.replace(rows[0], inflight=sum(counted) if counted else None, last=last)


def _diagnoses(told: Sequence[Snapshot]) -> tuple[DiagnosisRow, ...]:
    found = grouped((one.diagnoses for one in told), lambda row: (row.kind, row.replica, row.model))
    return tuple(min(each, key=lambda row: row.since_unix_s) for each in found)
