from __future__ import annotations

from policies.baselines.kthena import Kthena
from policies.model import Reason
from support.snapshot import asked, decide, drawn, scores, terms, view


def test_the_highest_sum_of_requests_and_prefix_wins() -> None:
    # Bases 4 and 2 + 100 * (2 - 1) = 102. a: 100 * 98 / 102 = 96, and 50 %.  b: 0.
    fleet = (view("a", 4, running=4, placed_tokens=500), view("b", 2, running=1))
    decision = decide(Kthena(), asked(1_000), *fleet)
    assert terms(decision, "a") == {"least_request": -96.0, "prefix": -50.0}
    assert scores(decision) == {"a": -146.0, "b": 0.0}
    assert (decision.replica, decision.reason) == ("a", Reason.PREFIX)


def test_half_as_many_requests_outweigh_two_fifths_of_the_prompt() -> None:
    # Bases 4 and 2. a: 0 + 40.  b: 50 + 0.
    fleet = (view("a", 4, running=4, placed_tokens=400), view("b", 2, running=2))
    decision = decide(Kthena(), asked(1_000), *fleet)
    assert scores(decision) == {"a": -40.0, "b": -50.0}
    assert (decision.replica, decision.reason) == ("b", Reason.SPILL)


def test_one_request_in_flight_weighs_as_much_as_the_whole_prompt() -> None:
    """The weakness of it: requests are relative to the busiest, which has one."""
    # a: 0 + 100.  b: 100 + 0.
    fleet = (view("a", 1, running=1, placed_tokens=1_000), view("b", running=0))
    assert scores(decide(Kthena(), asked(1_000), *fleet)) == {"a": -100.0, "b": -100.0}
    assert drawn(Kthena(), 1_000, *fleet) == {"a", "b"}


def test_ten_waiting_requests_exclude_and_nine_do_not() -> None:
    fleet = (view("a", placed_tokens=1_000, waiting=10), view("b", 5, running=5, waiting=9))
    decision = decide(Kthena(), asked(1_000), *fleet)
    assert (set(scores(decision)), decision.reason) == ({"b"}, Reason.SPILL)


def test_where_all_wait_all_are_candidates() -> None:
    fleet = (view("a", placed_tokens=1_000, waiting=10), view("b", waiting=12))
    assert scores(decide(Kthena(), asked(1_000), *fleet)) == {"a": -200.0, "b": -100.0}


def test_an_engine_that_does_not_report_has_the_mean_excess_of_the_others() -> None:
    # Excess 3 and 1, so 2. Bases: a 304, b 102, c 4 + 200 = 204, of 304.
    fleet = (view("a", 4, running=1), view("b", 2, running=1), view("c", 4))
    decision = decide(Kthena(), asked(1_000), *fleet)
    assert scores(decision) == {"a": 0.0, "b": -66.0, "c": -32.0}
    assert (decision.replica, decision.reason) == ("b", Reason.LOAD)


def test_where_no_engine_reports_the_leases_count_alone() -> None:
    decision = decide(Kthena(), asked(1_000), view("a", 4), view("b", 3))
    assert scores(decision) == {"a": 0.0, "b": -25.0}


def test_an_engine_that_runs_more_than_our_leases_has_no_excess() -> None:
    decision = decide(Kthena(), asked(1_000), view("a", 1, running=9), view("b", 2, running=2))
    assert scores(decision) == {"a": -50.0, "b": 0.0}


def test_what_others_run_does_not_make_a_silent_engine_idle() -> None:
    # Excess 0, not -8, so bases 1 and 2.
    decision = decide(Kthena(), asked(1_000), view("a", 1, running=9), view("b", 2))
    assert scores(decision) == {"a": -50.0, "b": 0.0}


def test_only_the_first_2048_tokens_are_looked_at() -> None:
    fleet = (view("a", placed_tokens=2_048), view("b", placed_tokens=10_000), view("c"))
    decision = decide(Kthena(), asked(10_000), *fleet)
    assert scores(decision) == {"a": -200.0, "b": -200.0, "c": -100.0}


def test_only_the_five_longest_matches_count() -> None:
    fleet = tuple(view(name, placed_tokens=500) for name in "abcdef")
    left_out = set()
    for ordinal in range(64):
        decision = decide(Kthena(), asked(1_000, ordinal), *fleet)
        cold = [name for name, score in scores(decision).items() if score == -100.0]
        assert len(cold) == 1
        left_out.update(cold)
    assert left_out == set("abcdef")
    shorter = (*fleet[:5], view("f", placed_tokens=490))
    assert scores(decide(Kthena(), asked(1_000), *shorter))["f"] == -100.0


def test_the_weights_scale_their_scores() -> None:
    policy = Kthena(w_least_request=0.5, w_prefix=2.0)
    decision = decide(policy, asked(1_000), view("a", placed_tokens=300))
    assert terms(decision, "a") == {"least_request": -50.0, "prefix": -60.0}
