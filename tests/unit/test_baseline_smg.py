from __future__ import annotations

import pytest

from policies.baselines.smg import SmgEvent, SmgTree
from policies.model import Policy, Reason, ReplicaView
from support.snapshot import asked, decide, drawn, scores, terms, view


def holder(name: str, inflight: int, tokens: int) -> ReplicaView:
    """Return a replica that holds as much by events as by this router's placements."""
    return view(name, inflight, cached_tokens=tokens, placed_tokens=tokens)


def test_the_tree_sends_a_long_match_to_its_replica_however_busy() -> None:
    decision = decide(SmgTree(), asked(1_000), holder("a", 60, 400), view("b"))
    assert scores(decision) == {"a": -400.0, "b": 0.0}
    assert (decision.replica, decision.reason) == ("a", Reason.PREFIX)
    assert decision.predicted_cached_tokens == 400


@pytest.mark.parametrize(("tokens", "winner"), [(300, "b"), (301, "a")])
def test_the_match_has_to_be_over_three_tenths_of_the_prompt(tokens: int, winner: str) -> None:
    assert decide(SmgTree(), asked(1_000), holder("a", 1, tokens), view("b")).replica == winner


def test_below_the_threshold_the_load_decides_alone() -> None:
    decision = decide(SmgTree(), asked(1_000), holder("a", 2, 300), view("b", 1))
    assert (scores(decision), decision.reason) == ({"a": 2.0, "b": 1.0}, Reason.SPILL)
    cold = decide(SmgTree(), asked(1_000), view("a", 2), view("b", 1))
    assert cold.reason is Reason.LOAD


def test_the_tree_knows_only_its_own_placements() -> None:
    told = view("a", 1, cached_tokens=1_000)
    evicted = view("b", 2, placed_tokens=1_000)
    assert decide(SmgTree(), asked(1_000), told, evicted).replica == "b"
    unaware = decide(SmgTree(), asked(1_000), told, view("b"))
    assert (unaware.replica, unaware.reason) == ("b", Reason.LOAD)


@pytest.mark.parametrize("policy", [SmgTree(), SmgEvent()])
@pytest.mark.parametrize(
    ("most", "least", "is_gated"),
    [
        (64, 0, False),  # 64 more, not over 64
        (65, 0, True),  # 65 more, and over 1.5 * 0
        (300, 210, False),  # 90 more, but 300 <= 1.5 * 210 = 315
        (316, 210, True),  # 316 > 315
    ],
)
def test_the_gate_needs_a_difference_and_a_ratio(
    policy: Policy, most: int, least: int, *, is_gated: bool
) -> None:
    decision = decide(policy, asked(1_000), holder("a", most, 1_000), view("b", least))
    assert decision.replica == ("b" if is_gated else "a")
    assert decision.reason is (Reason.SPILL if is_gated else Reason.PREFIX)


@pytest.mark.parametrize("policy", [SmgTree(), SmgEvent()])
def test_the_gate_is_of_the_whole_fleet(policy: Policy) -> None:
    """The weakness of it: one busy replica makes all prompts cold, also where the holder idles."""
    fleet = (view("a", 65), holder("b", 1, 1_000), view("c"))
    decision = decide(policy, asked(1_000), *fleet)
    assert scores(decision) == {"a": 65.0, "b": 1.0, "c": 0.0}
    assert (decision.replica, decision.reason) == ("c", Reason.SPILL)


def test_equal_matches_and_equal_loads_are_drawn() -> None:
    alike = (holder("a", 5, 900), holder("b", 9, 900), holder("c", 0, 899))
    assert drawn(SmgTree(), 1_000, *alike) == {"a", "b"}
    cold = (view("a", 1), view("b", 1), view("c", 2))
    assert drawn(SmgTree(), 1_000, *cold) == {"a", "b"}
    assert drawn(SmgEvent(), 1_000, *cold) == {"a", "b"}


def test_of_equal_overlaps_the_less_loaded_one_gets_it() -> None:
    fleet = (holder("a", 5, 900), holder("b", 4, 900), view("c"))
    decision = decide(SmgEvent(), asked(1_000), *fleet)
    assert decision.replica == "b"
    assert terms(decision, "b") == {"match": -900.0, "load": 4 / 6}


def test_no_load_outweighs_a_token_of_overlap() -> None:
    assert (
        decide(SmgEvent(), asked(2_000), holder("a", 64, 1_001), holder("b", 0, 1_000)).replica
        == "a"
    )


def test_one_block_is_enough_for_the_event_index() -> None:
    decision = decide(SmgEvent(), asked(100_000), holder("a", 60, 16), view("b"))
    assert decision.replica == "a"
    assert terms(decision, "a") == {"match": -16.0, "load": 60 / 61}


def test_the_event_index_waits_for_the_event() -> None:
    placed = view("a", 1, cached_tokens=900, pending_tokens=900, placed_tokens=900)
    decision = decide(SmgEvent(), asked(1_000), placed, view("b"))
    assert (decision.replica, decision.reason) == ("b", Reason.LOAD)


@pytest.mark.parametrize("policy", [SmgTree(), SmgEvent()])
def test_what_engines_report_or_not_changes_nothing(policy: Policy) -> None:
    fleet = (view("a", 1, queued=None), view("b", 2, queued=0, running=0, waiting=0))
    assert scores(decide(policy, asked(100), *fleet)) == {"a": 1.0, "b": 2.0}
