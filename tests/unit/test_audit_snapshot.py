from __future__ import annotations

import pytest

from sidecar.audit import RESUMED, AuditFault, AuditReplay
from sidecar.journal import PageRecord, Transition
from support.audit_case import LIFE, PAGES, device, opened, states_of, t

SNAPSHOT = opened(
    totals=device(used=1, pinned=1),
    records={
        "device": [
            PageRecord(0, "used", holders={"a": 1, "b": 2}, tenant="x"),
            PageRecord(4, "pinned", is_indexed=True, is_pinned=True),
            PageRecord(5, "free"),
        ]
    },
)


def test_a_snapshot_alone_is_enough_to_go_on() -> None:
    replay = AuditReplay()
    replay.feed(SNAPSHOT)
    assert replay.summary().open_requests == ["a", "b"]
    for request in ("b", "a", "b"):
        replay.feed(t("release", 0, request=request))
    replay.feed(t("unpin", 4))
    replay.feed(t("count", totals=device(evictable=1)))


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (PageRecord(0, "used"), "nobody holds it"),
        (PageRecord(0, "allocated", holders={"a": 0}), "at least once"),
        (PageRecord(0, "evictable"), "such a page is indexed"),
        (PageRecord(0, "evictable", holders={"a": 1}, is_indexed=True), "has no holder"),
        (PageRecord(0, "pinned", is_indexed=True), "is_pinned is False"),
        (PageRecord(0, "reserved", is_indexed=True), "nobody holds it"),
        (PageRecord(9, "used", holders={"a": 1}), "the tier has 6 pages"),
        (PageRecord(0, "used", holders={"a": 1}), "0 used pages, not 1"),
    ],
)
def test_a_snapshot_that_contradicts_itself_is_a_fault(record: PageRecord, words: str) -> None:
    totals = {"device": {"free": 5, "pinned": 1}}
    with pytest.raises(AuditFault, match=words):
        AuditReplay().feed(opened(totals=totals, records={"device": [record]}))
    with pytest.raises(AuditFault, match="lists it twice"):
        AuditReplay().feed(opened(records={"device": [PageRecord(1, "used", {"a": 1})] * 2}))


def numbered(*transitions: Transition, first: int = 1) -> AuditReplay:
    replay = AuditReplay()
    for n, transition in enumerate(transitions, start=first):
        fields = {name: getattr(transition, name) for name in transition.__struct_fields__}
        replay.feed(Transition(**{**fields, "n": fields["n"] or n}))
    return replay


def test_a_missing_line_and_a_line_that_comes_twice_are_found() -> None:
    start = opened(run=7)
    numbered(start, *LIFE, first=100)
    with pytest.raises(AuditFault, match=r"lines 2 to 4 \(n\) are missing"):
        numbered(start, t("create", 0, request="a", n=5))
    with pytest.raises(AuditFault, match=r"expected line 3 \(n\), got line 2 again"):
        numbered(start, t("create", 0, request="a"), t("index", 0, n=2))


def test_a_snapshot_within_a_run_must_say_what_the_lines_before_it_say() -> None:
    create = t("create", 0, request="a")
    record = PageRecord(0, "allocated", holders={"a": 1})
    totals = {**device(allocated=1), "host": {"free": PAGES}}
    right = opened(run=7, why="rotated", totals=totals, records={"device": [record]})
    replay = numbered(opened(run=7), create, right)
    assert replay.summary().runs == 1
    other = PageRecord(0, "allocated", holders={"z": 1})
    wrong = opened(run=7, why="rotated", totals=totals, records={"device": [other]})
    with pytest.raises(AuditFault, match="the snapshot says allocated, held by z") as caught:
        numbered(opened(run=7), create, wrong)
    assert (caught.value.page, caught.value.request) == (0, "a")
    with pytest.raises(AuditFault, match="not in every snapshot"):
        numbered(opened(run=7), opened(run=7, why="rotated", totals=device()))
    smaller = {"device": {"free": 5}, "host": {"free": PAGES}}
    with pytest.raises(AuditFault, match="the snapshot has 5 pages, not 6"):
        numbered(opened(run=7), opened(run=7, why="rotated", totals=smaller))
    with pytest.raises(AuditFault, match="missing"):
        numbered(opened(run=7), opened(run=7, why="rotated", n=9))


def test_a_resumed_log_says_how_much_it_lost_and_begins_anew() -> None:
    replay = numbered(opened(run=7), *LIFE, opened(run=7, why=RESUMED, n=20))
    summary = replay.summary()
    assert (summary.lost_transitions, summary.runs, summary.open_requests) == (14, 1, [])
    assert states_of(replay) == {"free": 6}


def test_a_new_run_begins_anew_and_counts_what_the_last_one_left() -> None:
    replay = numbered(opened(run=7), *LIFE, opened(run=8, n=1), t("create", 0, request="a", n=2))
    summary = replay.summary()
    assert (summary.runs, summary.cut_requests, summary.open_requests) == (2, 2, ["a"])


def test_nothing_is_replayed_before_a_snapshot() -> None:
    with pytest.raises(AuditFault, match="expected a snapshot of this tier"):
        AuditReplay().feed(LIFE[0])
