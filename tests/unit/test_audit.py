from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from sidecar.audit import CLOSED, AuditFault, conservation_fault
from support.audit_case import LIFE, device, replayed, states_of, t

if TYPE_CHECKING:
    from sidecar.journal import Transition


def fault_of(*transitions: Transition) -> AuditFault:
    """Return the fault of the last transition; the ones before it must be right."""
    replay = replayed(*transitions[:-1])
    with pytest.raises(AuditFault) as caught:
        replay.feed(transitions[-1])
    assert caught.value.line == len(transitions) + 1
    return caught.value


def test_a_page_goes_from_free_over_allocated_and_used_to_evictable_and_back() -> None:
    assert states_of(replayed(*LIFE[:3])) == {"free": 4, "allocated": 2}
    released = (
        *LIFE,
        t("release", 1, 0, request="a", why="done"),
        t("end", request="a", why="done"),
    )
    assert states_of(replayed(*LIFE)) == {"free": 4, "used": 2}
    assert states_of(replayed(*released)) == {"free": 5, "used": 1}
    kept = (*released, t("release", 0, request="b", why="cancelled"))
    assert states_of(replayed(*kept)) == {"free": 5, "evictable": 1}
    assert states_of(replayed(*kept, t("pin", 0))) == {"free": 5, "pinned": 1}
    assert states_of(replayed(*kept, t("pin", 0), t("unpin", 0))) == {"free": 5, "evictable": 1}
    assert states_of(replayed(*kept, t("share", 0, request="c"))) == {"free": 5, "used": 1}
    assert states_of(replayed(*kept, t("evict", 0, why="lru"))) == {"free": 6}
    assert states_of(replayed(*kept, t("unindex", 0))) == {"free": 6}
    assert states_of(replayed(*kept, t("clear"))) == {"free": 6}


def test_a_pinned_page_that_is_held_is_pinned_again_when_it_is_released() -> None:
    pinned = (*LIFE, t("pin", 0), t("release", 0, request="a"))
    assert states_of(replayed(*pinned)) == {"free": 4, "used": 2}
    assert states_of(replayed(*pinned, t("release", 0, request="b"))) == {
        "free": 4,
        "used": 1,
        "pinned": 1,
    }


def test_a_held_page_whose_content_is_forgotten_becomes_free_when_it_is_released() -> None:
    for forget in (t("unindex", 0), t("clear")):
        replay = replayed(*LIFE, t("pin", 0), forget, t("release", 0, request="a"))
        assert states_of(replay) == {"free": 4, "used": 2}
        replay.feed(t("release", 0, request="b"))
        assert states_of(replay) == {"free": 5, "used": 1}


def test_a_slot_without_holder_is_reserved_until_it_is_indexed_or_given_up() -> None:
    reserved = (*LIFE, t("reserve", 3, tier="host"), t("move", 0, targets=[3], target_tier="host"))
    filled = (*reserved, t("fill", 3, tier="host"))
    assert states_of(replayed(*filled), "host") == {"free": 5, "reserved": 1}
    assert states_of(replayed(*filled, t("index", 3, tier="host")), "host") == {
        "free": 5,
        "evictable": 1,
    }
    assert states_of(replayed(*reserved, t("release", 3, tier="host")), "host") == {"free": 6}


def test_a_page_reserved_for_a_request_becomes_used_when_it_is_filled() -> None:
    replay = replayed(t("reserve", 2, request="a"), t("fill", 2))
    assert states_of(replay) == {"free": 5, "used": 1}


def test_an_evicted_page_may_still_be_moved_down_until_it_is_filled_again() -> None:
    evicted = (
        t("create", 0, request="a"),
        t("index", 0),
        t("fill", 0),
        t("release", 0, request="a"),
        t("evict", 0, why="lru"),
        t("create", 0, request="b"),
        t("reserve", 5, tier="host"),
    )
    move = t("move", 0, targets=[5], target_tier="host")
    replayed(*evicted, move)
    assert fault_of(*evicted, t("fill", 0), t("release", 0, request="b"), move).page == 0


def test_copying_a_shared_page_hands_its_holder_the_target() -> None:
    copy = t("copy", 0, targets=[4], request="b")
    replay = replayed(*LIFE, t("append", 4, request="b"), copy)
    assert states_of(replay) == {"free": 3, "used": 3}
    replay.feed(t("release", 4, request="b"))
    replay.feed(t("release", 0, request="a"))
    assert states_of(replay) == {"free": 4, "used": 1, "evictable": 1}


@pytest.mark.parametrize(
    ("wrong", "page", "words"),
    [
        (t("create", 2, 0, request="c"), 0, "only a free page can be taken"),
        (t("append", 6, request="c"), 6, "the tier has 6 pages"),
        (t("append", -1, request="c"), -1, "the tier has 6 pages"),
        (t("reserve", 3, 3), 3, "only a free page can be taken"),
        (t("fill", 0), 0, "it is filled, but it is used"),
        (t("fill", 3), 3, "it is filled, but it is free"),
        (t("index", 0), 0, "indexed twice"),
        (t("unindex", 1), 1, "not indexed"),
        (t("share", 3, request="c"), 3, "it is shared, but it is free"),
        (t("release", 1, request="b"), 1, "b releases it, but it is used, held by a"),
        (t("release", 1, 1, request="a"), 1, "it is released, but it is free"),
        (t("release", 0), 0, "nobody releases it"),
        (t("evict", 0, why="lru"), 0, "it is evicted, but it is used, indexed, held by a, b"),
        (t("evict", 3, why="lru"), 3, "it is evicted, but it is free"),
        (t("pin", 3), 3, "it is pinned, but it is free"),
        (t("unpin", 0), 0, "not pinned"),
        (t("copy", 0, targets=[1], request="b"), 1, "it must be allocated and held by b"),
        (t("copy", 1, targets=[0], request="b"), 1, "it must be used and held by b"),
        (t("move", 0, targets=[2], target_tier="host"), 2, "it is to be reserved, but it is free"),
        (t("move", 3, targets=[2], target_tier="host"), 3, "its content is moved"),
    ],
)
def test_a_transition_that_cannot_be_true_names_the_page(
    wrong: Transition, page: int, words: str
) -> None:
    fault = fault_of(*LIFE, wrong)
    assert fault.page == page
    assert words in fault.message
    assert fault.message.startswith(f"{wrong.op}: page {page} of ")


def test_a_pinned_page_cannot_be_evicted() -> None:
    kept = (*LIFE, t("release", 0, request="a"), t("release", 0, request="b"), t("pin", 0))
    assert "it is evicted, but it is pinned" in fault_of(*kept, t("evict", 0, why="lru")).message


def test_a_slot_whose_content_is_on_its_way_cannot_be_shared() -> None:
    reserved = t("reserve", 3, tier="host")
    assert fault_of(reserved, t("share", 3, tier="host", request="a")).page == 3


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        (t("create", 0), "request"),
        (t("share", 0), "request"),
        (t("end", why="done"), "request"),
        (t("end", request="a"), "why"),
        (t("evict", 0), "why"),
        (t("create", request="a"), "pages"),
        (t("clear", 1), "pages"),
        (t("count", 1), "pages"),
        (t("copy", 0, request="a"), "targets"),
        (t("move", 0, targets=[1]), "target_tier"),
        (t("move", 0, targets=[1], target_tier="device"), "target_tier"),
        (t("count", totals={"attic": {"free": 1}}), "totals"),
        (t("count", tenants={"host": {}}), "totals"),
    ],
)
def test_a_field_that_is_missing_or_senseless_is_named(wrong: Transition, field: str) -> None:
    assert f"{wrong.op}: {field}: expected" in fault_of(wrong).message


def test_a_copy_goes_to_a_page_of_the_one_who_writes() -> None:
    theirs = t("create", 4, request="a")
    fault = fault_of(*LIFE, theirs, t("copy", 0, targets=[4], request="b"))
    assert (fault.page, fault.request) == (4, "b")
    assert "it must be allocated and held by b, but it is allocated, held by a" in fault.message


def test_a_request_that_ends_with_several_pages_is_named_with_the_first() -> None:
    taken = t("create", 5, 3, 4, request="a")
    assert fault_of(taken, t("end", request="a", why="failed")).page == 3


def test_a_request_that_ends_with_a_page_leaks_it() -> None:
    fault = fault_of(*LIFE, t("release", 0, request="a"), t("end", request="a", why="cancelled"))
    assert (fault.page, fault.tier, fault.request) == (1, "device", "a")
    assert "leaked" in fault.message


def test_a_request_that_ends_with_a_slot_of_a_lower_tier_leaks_it() -> None:
    fault = fault_of(
        t("reserve", 3, tier="host", request="a"), t("end", request="a", why="timed_out")
    )
    assert (fault.page, fault.tier, fault.request) == (3, "host", "a")


def test_pages_still_held_when_the_engine_has_stopped_have_leaked() -> None:
    replay = replayed(*LIFE, t("release", 1, 0, request="a"), t("end", request="a", why="done"))
    with pytest.raises(AuditFault) as caught:
        replay.check_stopped()
    assert (caught.value.page, caught.value.tier, caught.value.request) == (0, "device", "b")
    closing = t("count", why=CLOSED, totals=device(used=1))
    with pytest.raises(AuditFault, match="the engine has stopped"):
        replay.feed(closing)


def test_a_request_that_holds_nothing_must_end_before_the_engine_stops() -> None:
    preempted = (t("create", 0, request="a"), t("release", 0, request="a", why="preempted"))
    replay = replayed(*preempted, t("count", totals=device()))
    assert replay.summary().open_requests == ["a"]
    assert not replay.is_closed
    with pytest.raises(AuditFault, match="request a never ended"):
        replay.check_stopped()
    replay.feed(t("end", request="a", why="done"))
    replay.check_stopped()
    replay.feed(t("count", why=CLOSED, totals=device()))
    assert replay.is_closed


def test_a_slot_that_a_transfer_never_gave_back_has_leaked() -> None:
    replay = replayed(t("reserve", 2, tier="host"))
    with pytest.raises(AuditFault) as caught:
        replay.check_stopped()
    assert (caught.value.page, caught.value.tier, caught.value.request) == (2, "host", None)


@pytest.mark.parametrize(
    ("totals", "words"),
    [
        (device(used=1), "5 free pages, not 4"),
        (device(used=1, allocated=1), "1 allocated pages, not 0"),
        ({"device": {"used": 2, "free": 3}}, "= 5 pages, not 6"),
        ({"device": {"used": 2, "free": 5, "pinned": -1}}, "-1 pages are pinned"),
        ({"device": {"used": 2, "lost": 4}}, "lost is no state"),
        ({"disk": {"free": 1}}, "expected a snapshot of this tier"),
    ],
)
def test_a_count_of_the_pool_must_be_the_replays(
    totals: dict[str, dict[str, int]], words: str
) -> None:
    assert words in fault_of(*LIFE, t("count", totals=totals)).message
    replayed(*LIFE, t("count", totals=device(used=2)))


def test_the_five_states_of_the_tenants_add_up_to_the_tiers() -> None:
    two = (*LIFE, t("create", 2, request="c", tenant="y"))
    totals = device(used=2, allocated=1)
    right = {"x": {"used": 2}, "y": {"allocated": 1}}
    replay = replayed(*two, t("count", totals=totals, tenants={"device": right}))
    assert replay.tenant_pages("device")["x"]["used"] == 2
    missing = {"x": {"used": 2}}
    swapped = {"y": {"used": 2}, "x": {"allocated": 1}}
    for wrong in (missing, swapped):
        assert "of" in fault_of(*two, t("count", totals=totals, tenants={"device": wrong})).message


def test_conservation_says_in_words_what_does_not_add_up() -> None:
    assert conservation_fault({"free": 3, "used": 1}, 4) is None
    assert conservation_fault({"free": 3, "used": 1}, 5) == (
        "3 free + 0 allocated + 1 used + 0 reserved + 0 evictable + 0 pinned = 4 pages, not 5"
    )
    assert conservation_fault({"free": 3, "used": 1}, 4, {"x": {"used": 1}}) is None
    wrong = conservation_fault({"free": 3, "used": 1}, 4, {"x": {"pinned": 1}})
    assert wrong == "0 pages of all tenants are used, not 1"


def test_the_summary_counts_ends_evictions_and_peaks() -> None:
    replay = replayed(
        *LIFE,
        t("release", 1, 0, request="a"),
        t("release", 0, request="b"),
        t("evict", 0, why="benefit"),
        t("end", request="a", why="done"),
        t("end", request="b", why="cancelled"),
        t("end", request="never-admitted", why="cancelled"),
    )
    summary = replay.summary()
    assert summary.transitions == 11
    assert summary.ended_requests == {"cancelled": 2, "done": 1}
    assert summary.evicted_pages == {"benefit": 1}
    assert summary.total_pages == {"device": 6, "host": 6}
    assert summary.peak_pages["device"] == {
        "free": 6,
        "allocated": 2,
        "used": 2,
        "reserved": 0,
        "evictable": 1,
        "pinned": 0,
    }
    assert summary.open_requests == []


def test_a_transfer_that_holds_a_slot_is_no_request() -> None:
    replay = replayed(
        t("reserve", 0, tier="host", request="demotion"),
        t("fill", 0, tier="host"),
        t("index", 0, tier="host"),
        t("release", 0, tier="host", request="demotion", why="moved"),
    )
    assert replay.summary().open_requests == []
    replay.check_stopped()
