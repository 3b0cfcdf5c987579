"""What an operator sees at a glance: true, and unknown where nobody knows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from policies.hot import HeatMap, HotPrefix, HotSettings
from policies.model import Reason
from router.availability import Standing, StandingView
from router.diagnosis import Diagnoses
from router.entrance import AdmissionView, ReplicaPlaces
from router.history import History
from router.replica_view import ReplicaView, RouterView
from router.snapshot import Ages, ReplicaRow, Snapshot, SnapshotParts, Snapshots
from router.trust import Ground, TrustRow
from state.model import (
    EngineKind,
    Generation,
    ReplicaFacts,
    ReplicaId,
    ReplicaLoad,
    ReplicaRecord,
    ReplicaState,
    Rung,
)
from support.decided import Clock, decided
from support.fleet_model import model_prompt
from support.fleet_state import record

R0 = ReplicaId("r0")


def view(name: str = "r0", **changes: Any) -> ReplicaView:
    base = ReplicaView(
        replica=name,
        endpoint="http://127.0.0.1:9",
        up=True,
        draining=False,
        has_events=False,
        can_fetch=False,
        models=("m",),
        inflight=0,
        inflight_elsewhere=0,
        load=None,
        resident_blocks=0,
        capacity_tokens=None,
    )
    return msgspec.structs.replace(base, **changes)


def trust(credit: float, precision: float | None) -> TrustRow:
    return TrustRow(
        ground=Ground.EVENTS,
        precision=precision,
        precision_by_request=precision,
        recall=None,
        recall_by_request=None,
        requests=9.0,
        hits=0.0,
        credit=credit,
        predicted_tokens=0,
        reported_tokens=0,
        matched_tokens=0,
    )


def rig(*views: ReplicaView, **parts: Any) -> tuple[Clock, History, Snapshots]:
    clock = Clock()
    history = History(clock, 5_000.0)
    router = RouterView(rung=Rung.LIVE, state_age_s=0.1, state=None, lookup="mirror", policy="p")
    shown = SimpleNamespace(replicas=lambda: list(views), router=lambda: router)
    members = {ReplicaId(one.replica): None for one in views}
    made: dict[str, Any] = {
        "view": shown,
        "fleet": SimpleNamespace(members=lambda: members),
        "registered": dict,
        "heat": HeatMap(HotSettings()),
        "diagnoses": Diagnoses(lambda: 5_000.0),
        "history": history,
        "clock": clock,
        "unix_clock": lambda: 4_000.0 + clock.now_s,
        "version": "9.9",
    }
    return clock, history, Snapshots(SnapshotParts(**(made | parts)))


def row(snapshots: Snapshots) -> ReplicaRow:
    (found,) = snapshots.now().replicas
    return found


def test_an_empty_fleet_is_no_fault_and_has_no_figures() -> None:
    _, _, snapshots = rig()
    now = snapshots.now()
    assert (now.replicas, now.hot_prefixes, now.tenants, now.diagnoses) == ((), (), (), ())
    assert (now.last.requests, now.last.ttft_p50_s) == (0, None)
    again = msgspec.json.decode(msgspec.json.encode(now), type=Snapshot)
    assert again == now, "the command line reads what the router writes"


def test_what_nobody_tells_is_unknown_and_never_zero() -> None:
    _, _, snapshots = rig(view())
    seen = row(snapshots)
    assert (seen.queued, seen.running, seen.kv_used_fraction) == (None, None, None)
    assert (seen.credit, seen.precision, seen.last, seen.generation_age_s) == (None,) * 4
    assert seen.notes == ("no_sidecar",)


def test_an_engines_own_report_is_passed_on() -> None:
    load = ReplicaLoad(running=3, queued=2, kv_used_fraction=0.5)
    seen_there = view(load=load, inflight=4, inflight_elsewhere=1, registered=True, has_events=True)
    _, history, snapshots = rig(seen_there)
    history.note(decided(replica="r0", reason=Reason.SPILL))
    history.fold()
    seen = row(snapshots)
    assert (seen.running, seen.queued, seen.kv_used_fraction) == (3, 2, 0.5)
    assert (seen.inflight, seen.inflight_elsewhere, seen.notes) == (4, 1, ())
    assert seen.last is not None
    assert (seen.last.requests, seen.last.spills, seen.last.measured_share) == (1, 1, 0.5)


@pytest.mark.parametrize(
    ("up", "draining", "state"),
    [(True, False, "up"), (False, False, "down"), (True, True, "draining")],
)
def test_a_replica_has_one_state(state: str, *, up: bool, draining: bool) -> None:
    _, _, snapshots = rig(view(up=up, draining=draining))
    assert row(snapshots).state == state


def test_a_standing_comes_with_its_cause_and_its_end_and_the_limit_of_its_load() -> None:
    standing = StandingView(standing=Standing.EJECTED, reason="status", left_s=12.34)
    admission = AdmissionView(
        rung="normal", inflight=3, places=64, waiting=0, pending=10, routers=1, loop_lag_s=0.0,
        replicas={"r0": ReplicaPlaces(inflight=3, limit=16)},
    )  # fmt: skip
    router = RouterView(
        rung=Rung.LIVE, state_age_s=0.1, state=None, lookup="mirror", policy="p",
        admission=admission,
    )  # fmt: skip
    shown = SimpleNamespace(replicas=lambda: [view(standing=standing)], router=lambda: router)
    _, _, snapshots = rig(view(), view=shown)
    seen = row(snapshots)
    assert (seen.state, seen.why, seen.left_s, seen.limit) == ("ejected", "status", 12.3, 16)
    told = snapshots.now().router.admission
    assert told is not None
    assert (told.places, told.replicas) == (64, {})


def test_the_least_trusted_kind_of_prediction_is_shown() -> None:
    rows = (trust(1.0, 0.99), trust(0.4, 0.4), trust(0.2, None))
    _, _, snapshots = rig(view(trust=rows))
    assert (row(snapshots).credit, row(snapshots).precision) == (0.4, 0.4)


def test_what_is_wrong_with_a_replica_is_named_as_the_doctor_names_it() -> None:
    facts = ReplicaFacts(
        engine=EngineKind.VLLM, is_silent=True, has_unfit_pages=True, unknown_media=("tape",)
    )
    _, _, snapshots = rig(view(registered=True, facts=facts, same_keys=False))
    assert row(snapshots).notes == (
        "events_off", "events_silent", "page_mismatch", "unknown_medium", "keys_differ",
    )  # fmt: skip


def test_long_lists_of_adapters_are_cut_and_counted() -> None:
    _, _, snapshots = rig(view(models=tuple(f"m{number}" for number in range(500))))
    assert (len(row(snapshots).models), row(snapshots).model_count) == (4, 500)


def test_only_configured_tenants_are_named() -> None:
    _, history, snapshots = rig(tenants=["a", "b"], tenant_inflight={"a": 2, "b": 0}.get)
    history.note(decided(tenant="a"))
    history.note(decided(tenant="somebody"))
    history.fold()
    found = {one.tenant: (one.inflight, one.last) for one in snapshots.now().tenants}
    assert list(found) == ["a", "b"]
    assert found["a"][0] == 2
    assert found["a"][1] is not None
    assert found["b"] == (0, None)


def test_a_hot_prefix_is_shown_with_its_holders_and_spills() -> None:
    heat = HeatMap(HotSettings())
    replicas = [ReplicaId(f"r{number}") for number in range(4)]
    clock, history, snapshots = rig(*map(view, replicas), heat=heat)
    prefix = b""
    for number in range(100):
        clock.now_s += 0.05
        prompt = model_prompt(("system", 2_048), (f"tail{number}", 256))
        arrival = heat.observe(prompt.chain, prompt.prompt_tokens, replicas, clock.now_s)
        prefix = arrival.prefix
        reason = Reason.SPILL if number % 10 == 0 else Reason.PREFIX
        history.note(decided(number, reason=reason), prefix)
    history.fold()
    (hot,) = snapshots.now().hot_prefixes
    assert hot.prefix == prefix.hex()[:12]
    assert hot.tokens == 2_048
    assert hot.rate_per_s == pytest.approx(20.0, rel=0.2)
    assert set(hot.holders) <= set(replicas)
    assert len(hot.holders) > 1
    (known,) = heat.hottest(clock.now_s, 5)
    assert isinstance(known, HotPrefix)
    assert 0 < hot.spills <= hot.requests <= 100
    clock.now_s += 40.0
    (later,) = snapshots.now().hot_prefixes
    assert later.rate_per_s == pytest.approx(1.34, rel=0.1), "what nobody brings fades"
    clock.now_s += 60.0
    assert snapshots.now().hot_prefixes == ()


def test_an_age_is_that_of_the_generation_and_least_where_it_began_unseen() -> None:
    clock = Clock()
    ages = Ages(clock)

    def registered(**generations: str) -> dict[ReplicaId, ReplicaState]:
        return {
            ReplicaId(name): ReplicaState(record=_record(name, generation))
            for name, generation in generations.items()
        }

    ages.tick({})
    ages.tick(registered(r0="g1"))
    clock.now_s += 100.0
    ages.tick(registered(r0="g1", r1="x"))
    clock.now_s += 5.0
    assert ages.of(R0) == (105.0, True)
    assert ages.of(ReplicaId("r1")) == (5.0, False)
    ages.tick(registered(r0="g2"))
    clock.now_s += 1.0
    assert ages.of(R0) == (1.0, False)
    assert ages.of(ReplicaId("r1")) == (None, False), "who left is forgotten"


def _record(name: str, generation: str) -> ReplicaRecord:
    return record(ReplicaId(name), cast("str", Generation(generation)))
