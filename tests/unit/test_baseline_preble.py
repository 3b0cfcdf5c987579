from __future__ import annotations

from policies.baselines.preble import Preble
from policies.model import Reason
from policies.prefill import PrefillCost
from support.snapshot import asked, decide, drawn, scores, terms, view

# A token to prefill is a millisecond.
POLICY = Preble(prefill=PrefillCost(token_ms=1.0, attention_pair_ms=0.0))


def test_a_match_of_over_half_goes_to_the_cheapest_holder_though_others_idle() -> None:
    # a: 10 * 180 + 1 * 45 * 150 = 8,550.  b: 20 * 180 = 3,600.  c holds nothing: no candidate.
    fleet = (
        view("a", 1, prefill_load=10.0, placed_tokens=501),
        view("b", prefill_load=20.0, placed_tokens=501),
        view("c"),
    )
    decision = decide(POLICY, asked(1_000), *fleet)
    assert scores(decision) == {"a": 8_550.0, "b": 3_600.0}
    assert (decision.replica, decision.reason) == ("b", Reason.PREFIX)


def test_a_match_of_half_explores_all() -> None:
    # a: 3,600 + 500.  b: 0 + 1,000.
    fleet = (view("a", prefill_load=20.0, placed_tokens=500), view("b"))
    decision = decide(POLICY, asked(1_000), *fleet)
    assert terms(decision, "a") == {"load": 3_600.0, "prefill": 500.0}
    assert scores(decision) == {"a": 4_100.0, "b": 1_000.0}
    assert (decision.replica, decision.reason) == ("b", Reason.SPILL)


def test_the_longest_match_alone_is_exploited() -> None:
    """The weakness of it: one token less is no holder, however idle."""
    busy = view("a", 50, placed_tokens=900)
    assert decide(POLICY, asked(1_000), busy, view("b", placed_tokens=899)).replica == "a"


def test_the_heaviest_hands_on_to_the_lightest_once_the_fleet_is_known() -> None:
    # Loads 4,500, 3,600 and 2,880; 4,500 > 1.5 * 2,880. 150 recent requests are 50 each.
    fleet = [
        view("a", prefill_load=25.0, placed_tokens=900, recent_assignments=100.0),
        view("b", prefill_load=20.0, recent_assignments=30.0),
        view("c", prefill_load=16.0, recent_assignments=20.0),
    ]
    decision = decide(POLICY, asked(1_000), *fleet)
    assert scores(decision) == {"c": 2_880.0}
    assert (decision.replica, decision.reason) == ("c", Reason.SPILL)
    fleet[2] = view("c", prefill_load=16.0, recent_assignments=19.0)
    assert decide(POLICY, asked(1_000), *fleet).replica == "a"
    fleet[2] = view("c", prefill_load=16.7, recent_assignments=20.0)  # 4,500 <= 1.5 * 3,006
    assert decide(POLICY, asked(1_000), *fleet).replica == "a"


def test_who_is_not_the_heaviest_keeps_its_prefix() -> None:
    fleet = (
        view("a", prefill_load=25.0, recent_assignments=150.0),
        view("b", prefill_load=20.0, placed_tokens=900),
        view("c", prefill_load=1.0),
    )
    assert decide(POLICY, asked(1_000), *fleet).replica == "b"


def test_equal_loads_are_drawn_and_a_silent_engine_changes_nothing() -> None:
    fleet = (view("a", queued=None), view("b", queued=9, waiting=9), view("c", 1))
    assert drawn(POLICY, 1_000, *fleet) == {"a", "b"}
    assert decide(POLICY, asked(1_000), *fleet).reason is Reason.LOAD
