"""What several processes tell operators, as one router would tell it. Pure functions."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING, TypeVar

from msgspec import structs

from router.availability import Standing
from router.diagnosis import DiagnosisReport
from router.entrance import AdmissionView
from router.overload import LoadRung
from router.replica_view import RequestCounts
from router.running_mean import Mean
from router.shadow_policy import ShadowReport, ShadowSide
from router.trust import TrustReport, TrustRow
from state.model import Rung

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

    from router.replica_view import ReplicaView, RouterView

_T = TypeVar("_T")

RUNGS = (Rung.LIVE, Rung.STALE, Rung.LOCAL)
STANDINGS = tuple(Standing)


def grouped(lists: Iterable[Iterable[_T]], key: Callable[[_T], Hashable]) -> list[list[_T]]:
    """Return what has the same key together, in the order of its first one."""
    found: dict[Hashable, list[_T]] = {}
    for each in lists:
        for one in each:
            found.setdefault(key(one), []).append(one)
    return list(found.values())


def worst_rung(rungs: Iterable[Rung]) -> Rung:
    """Return the rung that knows least."""
    return max(rungs, key=RUNGS.index)


def load_order(name: str) -> LoadRung:
    """Return the place of an overload rung by its name."""
    return LoadRung[name.upper()]


def replicas(told: Sequence[Sequence[ReplicaView]]) -> list[ReplicaView]:
    """Return every replica: up where all processes have it up, with the requests of all."""
    return [_replica(rows) for rows in grouped(told, lambda row: row.replica)]


def _replica(rows: Sequence[ReplicaView]) -> ReplicaView:
    first = rows[0]
    inflight = sum(row.inflight for row in rows)
    everywhere = max(row.inflight + row.inflight_elsewhere for row in rows)
    standings = [row.standing for row in rows if row.standing is not None]
    return structs.replace(
        first,
        up=all(row.up for row in rows),
        fault=next((row.fault for row in rows if row.fault), None),
        standing=max(standings, key=lambda one: STANDINGS.index(one.standing), default=None),
        draining=any(row.draining for row in rows),
        registered=any(row.registered for row in rows),
        has_events=any(row.has_events for row in rows),
        inflight=inflight,
        inflight_elsewhere=max(0, everywhere - inflight),
        resident_blocks=max(row.resident_blocks for row in rows),
        models=tuple(sorted({model for row in rows for model in row.models})),
        trust=tuple(trust_rows(row.trust for row in rows)),
    )


def router(told: Sequence[RouterView], listen: str) -> RouterView:
    """Return the router: its knowledge as that of the process that knows least."""
    admissions = [view.admission for view in told if view.admission is not None]
    newest = max(told, key=lambda view: view.settings_version)
    models = grouped((view.models for view in told), lambda model: model.name)
    return structs.replace(
        newest,
        rung=worst_rung(view.rung for view in told),
        state_age_s=max(view.state_age_s for view in told),
        models=tuple(rows[0] for rows in sorted(models, key=lambda rows: rows[0].name)),
        listen=listen,
        recent=recent([view.recent for view in told]),
        admission=admission(admissions) if admissions else None,
    )


def recent(told: Sequence[RequestCounts]) -> RequestCounts:
    """Return the counts of the last requests of all, ``RECENT_DECISIONS`` of each at most."""

    def summed(counts: Iterable[dict[str, int]]) -> dict[str, int]:
        total: Counter[str] = Counter()
        for one in counts:
            total.update(one)
        return dict(total)

    return RequestCounts(
        requests=sum(one.requests for one in told),
        unroutable=summed(one.unroutable for one in told),
        inexact=sum(one.inexact for one in told),
        short=sum(one.short for one in told),
        answered=summed(one.answered for one in told),
        salted=summed(one.salted for one in told),
        unreported=summed(one.unreported for one in told),
    )


def admission(told: Sequence[AdmissionView]) -> AdmissionView:
    """Return what is admitted: sums, and the rung of the process that does least."""

    def total(values: Iterable[int | None]) -> int | None:
        known = [value for value in values if value is not None]
        return sum(known) if known else None

    return AdmissionView(
        rung=max((one.rung for one in told), key=load_order),
        inflight=sum(one.inflight for one in told),
        places=sum(one.places for one in told),
        waiting=sum(one.waiting for one in told),
        pending=sum(one.pending for one in told),
        routers=max(one.routers for one in told),
        loop_lag_s=max(one.loop_lag_s for one in told),
        memory_bytes=total(one.memory_bytes for one in told),
        memory_limit_bytes=total(one.memory_limit_bytes for one in told),
        replicas={
            name: max(
                (one.replicas[name] for one in told if name in one.replicas),
                key=lambda places: places.inflight,
            )
            for name in dict.fromkeys(name for one in told for name in one.replicas)
        },
    )


def trust(told: Sequence[TrustReport]) -> TrustReport:
    """Return how far predictions come true, over the requests of all."""
    return TrustReport(
        replicas=tuple(trust_rows(report.replicas for report in told)),
        tenants=tuple(trust_rows(report.tenants for report in told)),
    )


def trust_rows(told: Iterable[Iterable[TrustRow]]) -> list[TrustRow]:
    """Return each book once: shares by the requests behind them, the least credit, all tokens."""
    books = grouped(told, lambda row: (row.ground, row.replica, row.model, row.tenant))
    return [
        structs.replace(
            rows[0],
            precision=_mean((row.precision, row.requests) for row in rows),
            precision_by_request=_mean((row.precision_by_request, row.requests) for row in rows),
            recall=_mean((row.recall, row.hits) for row in rows),
            recall_by_request=_mean((row.recall_by_request, row.hits) for row in rows),
            requests=sum(row.requests for row in rows),
            hits=sum(row.hits for row in rows),
            credit=min(row.credit for row in rows),
            predicted_tokens=sum(row.predicted_tokens for row in rows),
            reported_tokens=sum(row.reported_tokens for row in rows),
            matched_tokens=sum(row.matched_tokens for row in rows),
        )
        for rows in books
    ]


def _mean(weighed: Iterable[tuple[float | None, float]]) -> float | None:
    known = [(value, weight) for value, weight in weighed if value is not None]
    total = sum(weight for _, weight in known)
    if not known:
        return None
    if not total:
        return sum(value for value, _ in known) / len(known)
    return sum(value * weight for value, weight in known) / total


def diagnoses(told: Sequence[DiagnosisReport]) -> DiagnosisReport:
    """Return every finding once, as the process that has had it longest tells it."""
    active = grouped(
        (report.active for report in told), lambda one: (one.kind, one.replica, one.model)
    )
    ended = [one for report in told for one in report.ended]
    return DiagnosisReport(
        active=tuple(min(rows, key=lambda one: one.since_unix_s) for rows in active),
        ended=tuple(sorted(ended, key=lambda one: one.ended_unix_s or 0.0, reverse=True)),
    )


def shadow(told: Sequence[ShadowReport]) -> ShadowReport:
    """Return what the shadow policy would have done under the newest settings of any process."""
    version = max(report.settings_version for report in told)
    told = [report for report in told if report.settings_version == version]
    worst = sorted(
        (one for report in told for one in report.worst),
        key=lambda one: one.ttft_change_ms,
        reverse=True,
    )
    reasons = dict.fromkeys(name for report in told for name in report.reasons)
    return structs.replace(
        told[0],
        overall=_side([report.overall for report in told]),
        unanswered=sum(report.unanswered for report in told),
        skipped=sum(report.skipped for report in told),
        reasons={
            name: _side([report.reasons[name] for report in told if name in report.reasons])
            for name in reasons
        },
        worst=tuple(worst[: max(len(report.worst) for report in told)]),
    )


def _side(told: Sequence[ShadowSide]) -> ShadowSide:
    return ShadowSide(
        decisions=sum(side.decisions for side in told),
        same_replica=sum(side.same_replica for side in told),
        ttft_change_ms=pooled([side.ttft_change_ms for side in told]),
        hit_change_ratio=pooled([side.hit_change_ratio for side in told]),
    )


def pooled(told: Sequence[Mean]) -> Mean:
    """Return the mean of all values; its interval where every part has one."""
    known = [(one, one.mean) for one in told if one.count and one.mean is not None]
    count = sum(one.count for one, _ in known)
    if not count:
        return Mean(count=0, mean=None)
    mean = sum(one.count * value for one, value in known) / count
    variance = 0.0
    for one, _ in known:
        if one.low is None or one.high is None:
            return Mean(count=count, mean=mean)
        variance += (one.count / count * (one.high - one.low) / 2) ** 2
    half = math.sqrt(variance)
    return Mean(count=count, mean=mean, low=mean - half, high=mean + half)
