from __future__ import annotations

import pytest

from policies.baselines.llm_d import LlmD, LlmDPrecise, LlmDSticky
from policies.model import Policy, Reason, ReplicaView
from support.snapshot import asked, decide, drawn, scores, terms, view


def told(name: str, waiting: int | None, used: float | None, tokens: int) -> ReplicaView:
    """Return a replica that holds as much by events as by this router's placements."""
    return view(
        name,
        waiting=waiting,
        kv_used_fraction=used,
        cached_tokens=tokens,
        placed_tokens=tokens,
    )


def test_prefix_queue_and_memory_weigh_three_to_two_to_two() -> None:
    # Queue scores 0, 1, 0.5. a: -3*0.8 - 0 - 2*0.5.  b: -2*1 - 2*0.9.  c: -3*0.2 - 2*0.5 - 2*0.7.
    fleet = (told("a", 4, 0.5, 800), told("b", 0, 0.1, 0), told("c", 2, 0.3, 200))
    decision = decide(LlmD(), asked(1_000), *fleet)
    assert scores(decision) == pytest.approx({"a": -3.4, "b": -3.8, "c": -3.0})
    assert terms(decision, "c") == pytest.approx({"prefix": -0.6, "queue": -1.0, "kv": -1.4})
    assert (decision.replica, decision.reason) == ("b", Reason.SPILL)


def test_a_whole_prompt_outweighs_the_longest_queue() -> None:
    # a: -3*1 - 0 - 2*0.5 = -4.0 against b: -3.8.
    decision = decide(LlmD(), asked(1_000), told("a", 4, 0.5, 1_000), told("b", 0, 0.1, 0))
    assert (decision.replica, decision.reason) == ("a", Reason.PREFIX)


def test_the_precise_profile_weighs_two_to_one_to_one() -> None:
    # Queue scores 0, 1. a: -2*0.6 - 0 - 0.5 = -1.7.  b: -1 - 0.9 = -1.9.
    fleet = (told("a", 3, 0.5, 600), told("b", 0, 0.1, 0))
    decision = decide(LlmDPrecise(), asked(1_000), *fleet)
    assert scores(decision) == pytest.approx({"a": -1.7, "b": -1.9})
    warmer = (told("a", 3, 0.5, 800), told("b", 0, 0.1, 0))  # a: -1.6 - 0.5 = -2.1
    assert decide(LlmDPrecise(), asked(1_000), *warmer).replica == "a"


@pytest.mark.parametrize("waiting", [1, 100])
def test_one_waiting_request_more_weighs_as_much_as_a_hundred(waiting: int) -> None:
    """The weakness of the queue score: it is relative to the fleet's extremes."""
    # a: -3*0.6 - 0 - 2 = -3.8.  b: -2 - 2 = -4.
    fleet = (told("a", waiting, 0.0, 600), told("b", 0, 0.0, 0))
    assert scores(decide(LlmD(), asked(1_000), *fleet)) == pytest.approx({"a": -3.8, "b": -4.0})


@pytest.mark.parametrize("policy", [LlmD(), LlmDPrecise()])
def test_what_was_sent_since_the_last_report_does_not_count(policy: Policy) -> None:
    """The weakness of scraping: 500 leases, and the report says idle."""
    busy = view(
        "a", 500, waiting=0, kv_used_fraction=0.0, cached_tokens=64, placed_tokens=64, queued=0
    )
    assert decide(policy, asked(1_000), busy, told("b", 0, 0.0, 0)).replica == "a"


def test_the_approximate_record_is_the_routers_own_and_the_precise_one_the_events() -> None:
    evicted = view("a", waiting=0, kv_used_fraction=0.0, placed_tokens=1_000)
    resident = view("b", waiting=0, kv_used_fraction=0.0, cached_tokens=1_000)
    placing = view("c", waiting=0, kv_used_fraction=0.0, cached_tokens=1_000, pending_tokens=1_000)
    assert decide(LlmD(), asked(1_000), evicted, resident, placing).replica == "a"
    precise = decide(LlmDPrecise(), asked(1_000), evicted, resident, placing)
    assert scores(precise) == {"a": -2.0, "b": -4.0, "c": -2.0}
    assert precise.replica == "b"


def test_a_lower_tier_counts_four_fifths_unless_behind_a_gap() -> None:
    behind = view("a", cached_tokens=600, lower_tier_tokens=250)  # 600 + 0.8 * 250 = 800
    gap = view("b", cached_tokens=600, pending_tokens=64, lower_tier_tokens=250)  # 536
    decision = decide(LlmDPrecise(), asked(1_000), behind, gap)
    assert terms(decision, "a")["prefix"] == pytest.approx(-1.6)
    assert terms(decision, "b")["prefix"] == pytest.approx(-2 * 0.536)


def test_an_unknown_report_counts_as_the_mean_of_the_known_ones() -> None:
    # c: waiting (4 + 0) / 2 = 2, so 0.5; used (0.6 + 0.2) / 2 = 0.4.
    fleet = (told("a", 4, 0.6, 0), told("b", 0, 0.2, 0), told("c", None, None, 0))
    decision = decide(LlmD(), asked(1_000), *fleet)
    assert terms(decision, "c") == pytest.approx({"prefix": 0.0, "queue": -1.0, "kv": -1.2})
    assert (decision.replica, decision.reason) == ("b", Reason.LOAD)


def test_where_no_engine_reports_the_leases_stand_in() -> None:
    decision = decide(LlmD(), asked(1_000), view("a", 3), view("b", 1), view("c", 2))
    assert scores(decision) == {"a": -2.0, "b": -4.0, "c": -3.0}


def test_equal_queues_score_one_and_equals_are_drawn() -> None:
    fleet = (told("a", 5, 0.5, 0), told("b", 5, 0.5, 0))
    assert scores(decide(LlmD(), asked(100), *fleet)) == {"a": -3.0, "b": -3.0}
    assert drawn(LlmD(), 100, *fleet) == {"a", "b"}


# At 1,000 tokens/s a token is a millisecond.
STICKY = LlmDSticky(prefill_tokens_per_s=1_000.0)


@pytest.mark.parametrize(("tokens", "names"), [(800, {"a"}), (799, {"a", "b"})])
def test_who_holds_four_fifths_is_the_only_candidate(tokens: int, names: set[str]) -> None:
    busy = view("a", backlog_tokens=18_000, cached_tokens=tokens)
    decision = decide(STICKY, asked(1_000), busy, view("b"))
    assert set(scores(decision)) == names
    assert decision.replica == ("a" if tokens == 800 else "b")


def test_eighteen_seconds_of_queue_are_borne_for_a_fifth_of_a_second_of_prefill() -> None:
    """The weakness of it, and its bound: one token more and all are candidates."""
    # a: 18,001 + 200 ms.  b: 0 + 1,000 ms.
    busy = view("a", backlog_tokens=18_001, cached_tokens=800)
    decision = decide(STICKY, asked(1_000), busy, view("b"))
    assert scores(decision) == pytest.approx({"a": 18_201.0, "b": 1_000.0})
    assert (decision.replica, decision.reason) == ("b", Reason.SPILL)
    always = LlmDSticky(prefill_tokens_per_s=1_000.0, max_penalty_ms=0.0)
    assert decide(always, asked(1_000), busy, view("b")).replica == "a"


def test_the_penalty_is_against_the_best_of_the_others() -> None:
    fleet = (
        view("a", backlog_tokens=20_000, cached_tokens=900),
        view("b", backlog_tokens=1_999),
        view("c", backlog_tokens=50_000),
    )
    assert decide(STICKY, asked(1_000), *fleet).replica == "b"  # 18,001 ms apart


def test_the_penalty_is_of_the_best_of_the_sticky() -> None:
    fleet = (
        view("a", backlog_tokens=50_000, cached_tokens=900),
        view("b", backlog_tokens=18_000, cached_tokens=900),
        view("c"),
    )
    assert decide(STICKY, asked(1_000), *fleet).replica == "b"


def test_among_the_sticky_the_least_to_prefill_wins() -> None:
    # a: 300 + 200.  b: 350 + 100.  Both hold enough, c does not.
    fleet = (
        view("a", backlog_tokens=300, cached_tokens=800),
        view("b", backlog_tokens=350, cached_tokens=900),
        view("c"),
    )
    decision = decide(STICKY, asked(1_000), *fleet)
    assert scores(decision) == pytest.approx({"a": 500.0, "b": 450.0})
    assert (decision.replica, decision.reason) == ("b", Reason.PREFIX)


def test_equal_ttft_is_drawn_and_a_silent_engine_changes_nothing() -> None:
    fleet = (view("a", queued=None), view("b", queued=9, waiting=9), view("c", backlog_tokens=1))
    assert drawn(STICKY, 1_000, *fleet) == {"a", "b"}
