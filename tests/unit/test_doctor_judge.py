"""What the doctor says of each thing that it may have seen, and what it leaves out."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from router.availability import Standing, StandingView
from router.diagnosis import Diagnosis, Evidence, Kind
from router.replica_view import ReplicaView, RequestCounts, RouterView
from router.trust import Ground
from sidecar.scrape import EngineMetrics
from sidecar.subscriber import EventSource
from state.model import (
    EngineKind,
    EventCounts,
    Generation,
    ReplicaFacts,
    ReplicaId,
    ReplicaLoad,
    Rung,
)
from support.fleet_state import record
from warmroute.doctor import report_lines
from warmroute.doctor_case import (
    Case,
    Code,
    EngineReport,
    ProbeResult,
    ReplicaCase,
    Report,
    TokenCheck,
    Unchecked,
)
from warmroute.doctor_fleet import judge
from warmroute.doctor_gather import join_views
from warmroute.doctor_text import found

EVENTS = "tcp://10.0.0.7:5557"
COUNTS = EventCounts(last_sequence=99, batches=100, stored_pages=5_000, held_pages=900)
FACTS = ReplicaFacts(
    engine=EngineKind.VLLM,
    events=EVENTS,
    has_replay=True,
    page_tokens=16,
    block_tokens=64,
    capacity_pages=1_000,
    is_engine_up=True,
    generation=Generation("g1"),
    reason="start",
    counts=COUNTS,
)
ENGINE = EngineReport(
    url="http://10.0.0.7:8000",
    kind=EngineKind.VLLM,
    version="0.32.0",
    models=("m",),
    metrics=EngineMetrics(page_tokens=16, capacity_pages=1_000, prompt_tokens=100_000),
    sources=(EventSource(events=EVENTS),),
    is_caching=True,
)
VIEW = ReplicaView(
    replica="r1",
    endpoint="http://10.0.0.7:8000",
    up=True,
    draining=False,
    registered=True,
    has_events=True,
    can_fetch=False,
    models=("m",),
    inflight=0,
    inflight_elsewhere=0,
    load=None,
    resident_blocks=200,
    capacity_tokens=16_000,
    same_keys=True,
    facts=FACTS,
)
ROUTER = RouterView(
    rung=Rung.LIVE,
    state_age_s=0.1,
    state="redis://10.0.0.5:6379",
    lookup="mirror",
    policy="expected_ttft",
    recent=RequestCounts(requests=100, answered={"r1": 100}, unreported={"r1": 0}),
)
HEALTHY = ReplicaCase(
    name="r1",
    url=ENGINE.url,
    engine=ENGINE,
    view=VIEW,
    facts=FACTS,
    tokens=(TokenCheck(model="m", directory="/m", texts=3, chats=3),),
    probe=ProbeResult(prompt_tokens=1_000, reported_tokens=992, predicted_tokens=960),
)


@pytest.mark.parametrize(
    ("state", "words"),
    [("redis://10.0.0.5:6379", "redis-cli"), (None, "the router starts it again")],
)
def test_who_looks_after_a_store_is_said_with_its_address(state: str | None, words: str) -> None:
    router = replace(ROUTER, rung=Rung.STALE, state=state)
    (finding,) = judge(Case(replicas=(HEALTHY,), router=router)).findings
    assert words in finding.fix
    assert (state or "its private server") in finding.seen


def codes(case: ReplicaCase, router: RouterView | None = ROUTER, **fields: Any) -> list[Code]:
    return [each.code for each in judge(Case(replicas=(case,), router=router, **fields)).findings]


def with_facts(**changes: Any) -> ReplicaCase:
    counts = replace(COUNTS, **changes.pop("counts", {}))
    return replace(HEALTHY, facts=replace(FACTS, counts=counts, **changes))


def with_engine(**changes: Any) -> ReplicaCase:
    return replace(HEALTHY, engine=replace(ENGINE, **changes))


def with_recent(**changes: Any) -> RouterView:
    return replace(ROUTER, recent=replace(ROUTER.recent, **changes))


@pytest.mark.parametrize(
    ("standing", "words"),
    [
        (StandingView(standing=Standing.EJECTED, reason="failures", left_s=20.0), "20 s more"),
        (StandingView(standing=Standing.PROBATION, reason="failures"), "in probation"),
    ],
)
def test_a_replica_that_is_held_is_named(standing: StandingView, words: str) -> None:
    case = replace(HEALTHY, view=replace(VIEW, standing=standing))
    (finding,) = judge(Case(replicas=(case,), router=ROUTER)).findings
    assert finding.code is Code.REPLICA_EJECTED
    assert words in finding.seen


def test_nothing_is_said_where_nothing_is_wrong_whoever_could_not_be_asked() -> None:
    alone = replace(HEALTHY, view=None, facts=None, tokens=(), probe=None)
    blind = replace(HEALTHY, engine=None, tokens=(), probe=None)
    slow = StandingView(standing=Standing.SLOW_START, left_s=20.0)
    assert codes(replace(HEALTHY, view=replace(VIEW, standing=slow))) == []
    assert codes(HEALTHY) == codes(alone, None) == codes(blind) == []
    assert codes(replace(HEALTHY, view=None, record=record()), None, has_state=True) == []
    assert codes(replace(HEALTHY, facts=None, view=replace(VIEW, facts=None, same_keys=None))) == []


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (with_engine(is_caching=False), Code.CACHING_OFF),
        (with_engine(does_report_hits=False), Code.HITS_UNREPORTED),
        (with_facts(reason="lost", counts={"gaps": 3}), Code.EVENTS_LOST),
        (with_facts(counts={"dropped_batches": 1}), Code.EVENTS_LOST),
        (with_facts(has_unfit_pages=True), Code.PAGE_MISMATCH),
        (with_facts(page_tokens=32, counts={"batches": 0}), Code.PAGE_MISMATCH),
        (with_facts(unknown_media=("WARP",)), Code.UNKNOWN_MEDIUM),
        (with_facts(is_silent=True), Code.EVENTS_SILENT),
        (with_facts(events="tcp://10.0.0.7:5657"), Code.WRONG_EVENT_PORT),
        (with_facts(events="ipc:///run/kv"), Code.WRONG_EVENT_PORT),
        (with_facts(counts={"returned_pages": 500}), Code.CACHE_TOO_SMALL),
        (replace(HEALTHY, view=replace(VIEW, same_keys=False)), Code.KEYS_DIFFER),
        (replace(HEALTHY, view=replace(VIEW, resident_blocks=0)), Code.INDEX_EMPTY),
        (replace(HEALTHY, view=replace(VIEW, registered=False)), Code.NO_SIDECAR),
        (
            replace(HEALTHY, view=replace(VIEW, registered=False), record=record()),
            Code.OTHER_STATE,
        ),
        (
            replace(HEALTHY, probe=ProbeResult(prompt_tokens=999, reported_tokens=0)),
            Code.CACHING_OFF,
        ),
        (
            replace(
                HEALTHY,
                probe=ProbeResult(prompt_tokens=999, reported_tokens=896, predicted_tokens=0),
            ),
            Code.PREDICTION_WRONG,
        ),
        (replace(HEALTHY, probe=ProbeResult(prompt_tokens=999)), Code.HITS_UNREPORTED),
        (
            replace(
                HEALTHY,
                tokens=(
                    TokenCheck(
                        model="m", directory="/m", texts=3, chats=3, other_texts=1, other_chats=3
                    ),
                ),
            ),
            Code.TOKENIZER_MISMATCH,
        ),
        (
            replace(
                HEALTHY,
                tokens=(TokenCheck(model="m", directory="/m", texts=3, chats=3, other_chats=1),),
            ),
            Code.TEMPLATE_MISMATCH,
        ),
    ],
)
def test_one_thing_is_named_as_what_it_is(case: ReplicaCase, expected: Code) -> None:
    [finding] = judge(Case(replicas=(case,), router=ROUTER)).findings
    assert finding.code is expected
    assert finding.replica == "r1"
    assert finding.seen
    assert finding.fix


@pytest.mark.parametrize(
    "case",
    [
        with_facts(events="tcp://127.0.0.1:5557"),
        with_facts(has_unfit_pages=False, page_tokens=32),
        with_facts(counts={"gaps": 3}),
        with_facts(counts={"returned_pages": 499}),
        with_facts(counts={"stored_pages": 100, "returned_pages": 63}),
        replace(HEALTHY, probe=ProbeResult(prompt_tokens=60, reported_tokens=0)),
        replace(
            HEALTHY,
            probe=ProbeResult(prompt_tokens=999, reported_tokens=960, predicted_tokens=896),
        ),
    ],
)
def test_what_only_looks_odd_is_not_named(case: ReplicaCase) -> None:
    """Another host's name of a port; a page that events corrected; a gap that was replayed."""
    assert codes(case) == []


@pytest.mark.parametrize(
    ("router", "expected"),
    [
        (replace(ROUTER, rung=Rung.STALE), Code.STATE_NOT_LIVE),
        (with_recent(unroutable={"template error": 51}), Code.PROMPTS_UNREAD),
        (with_recent(inexact=51), Code.PROMPTS_UNREAD),
        (with_recent(short=51), Code.PROMPTS_SHORT),
        (with_recent(unreported={"r1": 90}), Code.HITS_UNREPORTED),
    ],
)
def test_what_the_router_saw_is_named(router: RouterView, expected: Code) -> None:
    assert codes(HEALTHY, router) == [expected]


def test_requests_that_have_no_prefix_by_nature_and_few_requests_say_nothing() -> None:
    by_nature = {"path without a prefix": 100}
    assert codes(HEALTHY, with_recent(unroutable=by_nature)) == []
    assert codes(HEALTHY, with_recent(requests=9, short=9, inexact=9)) == []
    assert codes(HEALTHY, with_recent(answered={"r1": 1}, unreported={"r1": 1})) == []


def test_a_salt_that_is_on_one_side_only_is_named() -> None:
    """B19."""
    plain = with_facts(counts={"plain_pages": 10})
    salted = with_facts(counts={"salted_pages": 10})
    both = with_facts(counts={"plain_pages": 10, "salted_pages": 10})
    all_salted, some = with_recent(salted={"r1": 100}), with_recent(salted={"r1": 50})
    assert codes(plain, all_salted) == codes(salted) == [Code.SALT_MISMATCH]
    for case in (plain, salted, both):
        assert codes(case, some) == []
    assert codes(plain) == codes(salted, all_salted) == codes(both, all_salted) == []
    assert codes(plain, with_recent(answered={"other": 100}, salted={"other": 100})) == []


def test_engines_without_events_are_told_apart_from_those_nobody_knows() -> None:
    for kind in (EngineKind.VLLM, EngineKind.SGLANG, EngineKind.WORKER):
        silent = replace(HEALTHY, engine=replace(ENGINE, kind=kind, sources=None), facts=None)
        [finding] = judge(Case(replicas=(silent,), router=ROUTER)).findings
        assert finding.code is Code.EVENTS_OFF
        assert "--kv-events-config" in finding.fix
        assert ("enable_kv_cache_events" in finding.fix) is (kind is not EngineKind.SGLANG)
    unknown = replace(ENGINE, kind=EngineKind.UNKNOWN, sources=None)
    assert codes(replace(HEALTHY, engine=unknown, facts=None)) == []
    assert codes(replace(HEALTHY, engine=replace(unknown, sources=()), facts=None)) == [
        Code.EVENTS_OFF
    ]
    followed = replace(ENGINE, sources=None)  # an older vLLM, whose sidecar was told where
    assert codes(replace(HEALTHY, engine=followed)) == []


def test_an_endpoint_where_nothing_listens_counts_on_the_engines_own_host_only() -> None:
    """B50: vLLM connects to an endpoint without a wildcard, so that nobody can."""
    local = replace(ENGINE, url="http://127.0.0.1:8000", deaf=(EVENTS,))
    never = replace(FACTS, is_silent=True, counts=EventCounts())
    alone = replace(HEALTHY, engine=local, view=None, facts=None, probe=None)
    [finding] = judge(Case(replicas=(alone,))).findings
    assert finding.code is Code.EVENTS_SILENT
    assert "tcp://*:5557" in finding.fix
    assert codes(replace(alone, engine=replace(local, url=ENGINE.url)), None) == []
    assert codes(replace(HEALTHY, engine=local)) == []  # events were heard
    assert codes(replace(HEALTHY, engine=local, facts=never)) == [Code.EVENTS_SILENT]
    one_rank = replace(local, sources=(*(ENGINE.sources or ()), EventSource(events="tcp://h:1")))
    assert codes(replace(alone, engine=one_rank), None) == []


def test_a_full_pool_counts_where_no_sidecar_counts_pages() -> None:
    full = EngineMetrics(load=ReplicaLoad(kv_used_fraction=0.97), page_tokens=16)
    case = replace(HEALTHY, facts=None, view=None, engine=replace(ENGINE, metrics=full))
    assert codes(case, None) == []
    thrown_out = replace(case, engine=replace(ENGINE, metrics=full, preemptions=3))
    assert codes(thrown_out, None) == [Code.CACHE_TOO_SMALL]


def test_a_cause_hides_its_consequences() -> None:
    empty = replace(VIEW, resident_blocks=0, registered=False)
    off = replace(
        HEALTHY,
        view=empty,
        facts=replace(FACTS, events=None, is_silent=True, counts=EventCounts()),
        engine=replace(ENGINE, sources=()),
        probe=ProbeResult(prompt_tokens=999, reported_tokens=960, predicted_tokens=0),
    )
    assert codes(off) == [Code.EVENTS_OFF]
    wrong = with_facts(events="tcp://10.0.0.7:1", is_silent=True, counts={"batches": 0})
    wrong = replace(wrong, view=replace(VIEW, resident_blocks=0), probe=off.probe)
    assert codes(wrong) == [Code.WRONG_EVENT_PORT]


def test_what_the_router_diagnosed_is_said_where_nothing_else_explains_it() -> None:
    """A77."""
    evidence = Evidence(
        requests=20,
        hits=0,
        precision=0.0,
        recall=None,
        other_lengths=None,
        recent_requests=16,
        recent_predicted_tokens=9_000,
        recent_reported_tokens=0,
        ratio=0.0,
    )
    diagnosis = Diagnosis(
        kind=Kind.NO_HITS,
        replica=ReplicaId("r1"),
        model="m",
        ground=Ground.EVENTS,
        since_unix_s=1.0,
        finding="The engine reports 0 of 9000.",
        advice="Check it.",
        evidence=evidence,
    )
    [finding] = judge(Case(replicas=(HEALTHY,), router=ROUTER, diagnoses=(diagnosis,))).findings
    assert (finding.code, finding.fix) == (Code.UNTRUSTED, "Check it.")
    other = replace(diagnosis, replica=ReplicaId("r2"))
    assert codes(HEALTHY, diagnoses=(other,)) == []
    assert codes(with_engine(is_caching=False), diagnoses=(diagnosis,)) == [Code.CACHING_OFF]


def test_a_report_fits_its_terminal_and_counts_what_it_found() -> None:
    finding = found(Code.EVENTS_OFF, "r1", seen="It names none. " * 20, fix="start it so " * 20)
    report = Report(
        replicas=("r1", "r2"),
        findings=(finding, replace(finding, replica=None)),
        unchecked=(Unchecked(what="tokens", why="status 404 " * 20),),
    )
    lines = report_lines(report, 60)
    assert max(map(len, lines)) <= 60
    assert lines[0] == "events_off: r1"
    assert "events_off: the router" in lines
    assert lines[-1] == "2 replicas examined: 2 findings"
    empty = Report(replicas=(), findings=(), unchecked=())
    assert report_lines(empty, 60) == ["0 replicas examined: nothing wrong was found"]


def test_ranks_and_the_engine_that_a_router_was_configured_with_are_all_kept() -> None:
    """Each rank of one engine is a record elsewhere; all have the one view of it."""
    url = "http://10.0.0.7:8000"
    configured = replace(VIEW, replica="h:8000", registered=False)
    cases = {
        "h:8000": ReplicaCase(name="h:8000", url=url, view=configured),
        "e@dp0": ReplicaCase(name="e@dp0", url=url),
        "e@dp1": ReplicaCase(name="e@dp1", url=url),
    }
    join_views(cases)
    assert {name: case.view for name, case in cases.items()} == {
        "e@dp0": configured,
        "e@dp1": configured,
    }
