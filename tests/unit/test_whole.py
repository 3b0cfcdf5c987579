"""What several processes tell operators becomes what one router would tell. Pure."""

from __future__ import annotations

import random

import msgspec
import pytest

from policies.model import Reason
from router.entrance import AdmissionView, ReplicaPlaces
from router.history import History
from router.replica_view import ReplicaView, RequestCounts, RouterView
from router.running_mean import Mean, RunningMean
from router.sums import Batch
from router.supervisor import whole
from router.supervisor.pulse import Pulse, read_pulse
from router.trust import Ground, TrustReport, TrustRow
from state.model import ReplicaId, Rung
from support.decided import Clock, decided


def replica(name: str = "a", **fields: object) -> ReplicaView:
    told: dict[str, object] = {
        "replica": name,
        "endpoint": "http://h:1",
        "up": True,
        "draining": False,
        "has_events": True,
        "can_fetch": False,
        "models": ("m",),
        "inflight": 0,
        "inflight_elsewhere": 0,
        "load": None,
        "resident_blocks": 0,
        "capacity_tokens": None,
    }
    return msgspec.convert(told | fields, ReplicaView)


def test_requests_of_all_processes_are_ours_and_those_of_other_routers_are_told_once() -> None:
    """Each process sees the others' requests as those of other routers."""
    first = replica(inflight=2, inflight_elsewhere=3 + 5, resident_blocks=7)
    second = replica(inflight=3, inflight_elsewhere=2 + 5, resident_blocks=9)
    (row,) = whole.replicas([[first], [second]])
    assert (row.inflight, row.inflight_elsewhere) == (5, 5)
    assert row.resident_blocks == 9


def test_a_replica_is_up_where_every_process_has_it_up() -> None:
    down = replica(up=False, fault="refused")
    rows = whole.replicas([[replica(), replica("b")], [down, replica("b")]])
    assert [(row.replica, row.up, row.fault) for row in rows] == [
        ("a", False, "refused"),
        ("b", True, None),
    ]


def admission(**fields: object) -> AdmissionView:
    told: dict[str, object] = {
        "rung": "normal",
        "inflight": 1,
        "places": 10,
        "waiting": 2,
        "pending": 8,
        "routers": 2,
        "loop_lag_s": 0.1,
    }
    return msgspec.convert(told | fields, AdmissionView)


def test_the_router_knows_what_its_least_process_knows() -> None:
    view = RouterView(rung=Rung.LIVE, state_age_s=0.1, state=None, lookup="mirror", policy="p")
    stale = msgspec.structs.replace(
        view,
        rung=Rung.STALE,
        state_age_s=4.0,
        recent=RequestCounts(requests=3, answered={"a": 2}),
        admission=admission(rung="close", loop_lag_s=0.3, memory_bytes=5),
    )
    live = msgspec.structs.replace(
        view,
        recent=RequestCounts(requests=4, answered={"a": 1, "b": 1}),
        admission=admission(replicas={"a": ReplicaPlaces(inflight=3)}),
    )
    told = whole.router([live, stale], "http://here")
    assert (told.rung, told.state_age_s, told.listen) == (Rung.STALE, 4.0, "http://here")
    assert (told.recent.requests, told.recent.answered) == (7, {"a": 3, "b": 1})
    assert told.admission == admission(
        rung="close",
        inflight=2,
        places=20,
        waiting=4,
        pending=16,
        loop_lag_s=0.3,
        memory_bytes=5,
        replicas={"a": {"inflight": 3}},
    )


def book(precision: float | None, requests: float, tokens: int, credit: float = 1.0) -> TrustRow:
    return TrustRow(
        ground=Ground.EVENTS,
        replica=ReplicaId("a"),
        model="m",
        precision=precision,
        precision_by_request=precision,
        recall=None,
        recall_by_request=None,
        requests=requests,
        hits=0.0,
        credit=credit,
        predicted_tokens=tokens,
        reported_tokens=tokens,
        matched_tokens=tokens,
    )


def test_shares_are_weighed_by_the_requests_behind_them() -> None:
    first = TrustReport(replicas=(book(1.0, 30.0, 100),), tenants=())
    second = TrustReport(replicas=(book(0.5, 10.0, 40, 0.25),), tenants=())
    (row,) = whole.trust([first, second]).replicas
    assert row.precision == pytest.approx(0.875)
    assert (row.requests, row.credit, row.predicted_tokens) == (40.0, 0.25, 140)
    assert row.recall is None


def test_a_pooled_mean_is_that_of_all_values_and_as_sure() -> None:
    draws = random.Random(4)
    parts, all_of_them = [RunningMean(), RunningMean()], RunningMean()
    for part in parts:
        for _ in range(4_096):
            value = draws.gauss(3.0, 2.0)
            part.add(value)
            all_of_them.add(value)
    pooled, direct = whole.pooled([part.told() for part in parts]), all_of_them.told()
    assert pooled.mean == pytest.approx(direct.mean)
    assert pooled.low is not None
    assert pooled.high is not None
    assert direct.low is not None
    assert direct.high is not None
    assert pooled.high - pooled.low == pytest.approx(direct.high - direct.low, rel=0.3)
    assert whole.pooled([Mean(count=0, mean=None)]) == Mean(count=0, mean=None)


def test_a_history_of_batches_is_the_history_of_their_requests() -> None:
    """Percentiles too: what crosses between processes are buckets, not percentiles."""
    clock = Clock()
    histories = [History(clock, 5_000.0) for _ in range(3)]
    direct, left, right = histories
    joined = History(clock, 5_000.0)
    for each in (left, right):
        each.untold = Batch()
    draws = random.Random(2)
    for number in range(600):
        record = decided(ttft_s=draws.expovariate(2.0), reason=Reason.SPILL, tenant="acme")
        prefix = b"hot" if number % 3 else b""
        direct.note(record, prefix)
        (left, right)[number % 2].note(record, prefix)
    for each in histories:
        each.fold()
    for each in (left, right):
        assert each.untold is not None
        pulse = Pulse(number=1, batch=each.untold, open_requests=1, loop_lag_s=0.0)
        joined.take(read_pulse(msgspec.msgpack.encode(pulse)).batch)
    clock.now_s += 1.0
    for each in (direct, joined):
        each.advance()
    assert joined.view() == direct.view()
    assert joined.minute() == direct.minute()
    assert joined.tenant_minutes() == direct.tenant_minutes()
    assert joined.prefix_traffic() == direct.prefix_traffic()
    replicas = [ReplicaId("r0")]
    assert joined.replica_minutes(replicas) == direct.replica_minutes(replicas)
