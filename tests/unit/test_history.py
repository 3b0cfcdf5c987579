"""The last minutes in figures: bounded, cheap, and right."""

from __future__ import annotations

import random

import pytest

from policies.model import Reason
from router.history import (
    FOLD_REQUESTS,
    PREFIXES_MOST,
    SECONDS_KEPT,
    TENS_KEPT,
    History,
    Traffic,
)
from router.sums import Sums
from state.model import ReplicaId
from support.decided import Clock, decided

UNIX_S = 5_000.0
R0, R1 = ReplicaId("r0"), ReplicaId("r1")


def rig() -> tuple[Clock, History]:
    clock = Clock()
    return clock, History(clock, UNIX_S)


def after(clock: Clock, history: History, seconds: float) -> int:
    """Let time pass in ticks of a quarter of a second."""
    closed = 0
    for _ in range(round(seconds * 4)):
        clock.now_s += 0.25
        history.fold()
        closed += history.advance()
    return closed


def test_a_request_is_in_the_second_and_in_the_ten_seconds_in_which_it_ended() -> None:
    clock, history = rig()
    after(clock, history, 2)
    for number in range(3):
        history.note(decided(number))
    after(clock, history, 9)
    view = history.view()
    assert [point.requests for point in view.seconds] == [0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 0]
    assert view.seconds[2].start_unix_s == UNIX_S + 2
    (ten,) = view.tens
    assert (ten.start_unix_s, ten.span_s, ten.requests) == (UNIX_S, 10, 3)
    assert (ten.prompt_tokens, ten.predicted_tokens, ten.reported_tokens) == (300, 180, 150)


@pytest.mark.parametrize(
    ("outcome", "status", "replica", "kind"),
    [
        ("done", 200, "r0", None),
        ("failed", 502, "r0", "failed"),
        ("done", 500, "r0", "failed"),
        ("failed", 200, "r0", "failed"),
        ("failed", 503, "r0", "failed"),
        ("failed", 503, None, "shed"),
        ("failed", 429, None, "shed"),
        ("refused", 400, None, "refused"),
        ("done", 404, "r0", "refused"),
        ("cancelled", 499, "r0", "cancelled"),
        ("cancelled", 499, None, "cancelled"),
    ],
)
def test_every_end_is_counted_once_and_by_who_is_to_blame(
    outcome: str, status: int, replica: str | None, kind: str | None
) -> None:
    sums = Sums()
    sums.add(decided(replica=replica, outcome=outcome, status=status))
    counted = {
        name: getattr(sums, name)
        for name in ("failed", "shed", "refused", "cancelled")
        if getattr(sums, name)
    }
    assert counted == ({} if kind is None else {kind: 1})
    assert sums.requests == 1


def test_percentiles_are_right_within_five_percent() -> None:
    rng = random.Random(3)
    values = sorted(rng.lognormvariate(-2.0, 1.5) for _ in range(4_001))
    sums = Sums()
    for value in values:
        sums.add(decided(ttft_s=value))
    for share in (0.5, 0.95, 0.99):
        assert sums.ttft_s(share) == pytest.approx(values[int(share * 4_000)], rel=0.05)
    assert Sums().ttft_s(0.5) is None, "nothing is no time of 0"


def test_a_minute_forgets_what_is_older_and_a_replica_that_nobody_asked() -> None:
    clock, history = rig()
    history.note(decided(replica="r0"))
    after(clock, history, 20)
    history.note(decided(replica="r1", reason=Reason.SPILL))
    after(clock, history, 25)
    assert history.minute().requests == 2
    minutes = history.replica_minutes([R0, R1, ReplicaId("idle")])
    assert {name: one.requests for name, one in minutes.items()} == {R0: 1, R1: 1}
    assert (minutes[R1].spills, minutes[R0].spills) == (1, 0)
    assert minutes[R1].measured_share == 0.5
    assert minutes[R1].predicted_share == 0.6
    after(clock, history, 16)
    assert set(history.replica_minutes([R0, R1])) == {R1}
    after(clock, history, 60)
    last = history.minute()
    assert (last.requests, last.ttft_p50_s, last.measured_share) == (0, None, None)
    assert 50.0 <= last.span_s <= 60.0


def test_what_an_engine_does_not_report_is_no_miss() -> None:
    sums = Sums()
    sums.add(decided(reported_cached_tokens=None))
    sums.add(decided(reported_cached_tokens=0))
    sums.add(decided(reported_cached_tokens=80))
    assert (sums.told, sums.hits, sums.told_tokens, sums.reported_tokens) == (2, 1, 200, 80)


def test_both_rings_are_bounded_and_have_no_gaps() -> None:
    clock, history = rig()
    after(clock, history, 1_000)
    view = history.view()
    assert (len(view.seconds), len(view.tens)) == (SECONDS_KEPT, TENS_KEPT)
    for ring, step in ((view.seconds, 1), (view.tens, 10)):
        starts = [point.start_unix_s for point in ring]
        assert starts == [starts[0] + step * at for at in range(len(ring))]
    assert view.tens[-1].start_unix_s == UNIX_S + 990


def test_a_process_that_stood_still_for_a_day_is_quickly_up_to_date() -> None:
    clock, history = rig()
    clock.now_s += 86_400.5
    assert history.advance() == 86_400
    view = history.view()
    assert view.seconds[-1].start_unix_s == UNIX_S + 86_399
    assert len(view.seconds) == SECONDS_KEPT
    assert len(view.tens) <= SECONDS_KEPT // 10 + 1, "nothing is drawn for nobody"


def test_a_burst_is_added_up_in_parts_and_never_waits_for_the_tick() -> None:
    _, history = rig()
    parts: list[int] = []
    history.on_records = lambda records: parts.append(len(records))
    for number in range(2 * FOLD_REQUESTS + 5):
        history.note(decided(number))
    assert parts == [FOLD_REQUESTS, FOLD_REQUESTS]
    history.fold()
    assert parts == [FOLD_REQUESTS, FOLD_REQUESTS, 5]


def test_hot_prefixes_are_counted_by_name_and_bounded() -> None:
    clock, history = rig()
    history.note(decided(0), b"hot")
    history.note(decided(1, reason=Reason.SPILL), b"hot")
    history.note(decided(2))
    after(clock, history, 11)
    history.note(decided(3), b"hot")
    for number in range(3 * PREFIXES_MOST):
        history.note(decided(number), number.to_bytes(2, "big"))
    history.fold()
    traffic = history.prefix_traffic()
    assert traffic[b"hot"] == Traffic(requests=3, spills=1)
    assert len(traffic) == PREFIXES_MOST


def test_tenants_are_told_apart() -> None:
    _, history = rig()
    history.note(decided(0, tenant="a"))
    history.note(decided(1, replica=None, tenant="b", outcome="failed", status=429))
    history.note(decided(2))
    history.fold()
    found = {name: (one.requests, one.shed) for name, one in history.tenant_minutes().items()}
    assert found == {"a": (1, 0), "b": (1, 1)}


def test_tenants_that_have_a_place_are_counted_when_there_is_none_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("router.history.TENANTS_MOST", 2)
    _, history = rig()
    for number, tenant in enumerate("abcab"):
        history.note(decided(number, tenant=tenant))
    history.fold()
    found = {name: one.requests for name, one in history.tenant_minutes().items()}
    assert found == {"a": 2, "b": 2}


def test_the_longest_lag_of_a_second_and_of_ten_is_kept() -> None:
    clock, history = rig()
    for lag_s in (0.001, 0.4, 0.002, 0.003):
        history.sample(7, lag_s)
    after(clock, history, 1)
    history.sample(3, 0.001)
    after(clock, history, 9)
    view = history.view()
    assert [point.loop_lag_s for point in view.seconds[:3]] == [0.4, 0.001, 0.0]
    assert view.tens[0].loop_lag_s == 0.4
    assert (view.seconds[0].inflight, view.tens[0].inflight) == (7, 3)
