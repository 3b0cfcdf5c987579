from __future__ import annotations

import pytest

from policies.baselines.loadaware import LoadAware
from policies.model import Reason
from support.snapshot import asked, decide, drawn, scores, terms, view


def test_the_longest_match_wins_near_the_mean() -> None:
    # Mean 4. a: -0.8 + 1/4 = -0.55.  b: -1/4.  c: 0.
    fleet = (view("a", 5, cached_tokens=800), view("b", 3), view("c", 4))
    decision = decide(LoadAware(), asked(1_000), *fleet)
    assert terms(decision, "a") == pytest.approx({"match": -0.8, "load": 0.25})
    assert scores(decision) == pytest.approx({"a": -0.55, "b": -0.25, "c": 0.0})
    assert (decision.replica, decision.reason) == ("a", Reason.PREFIX)


def test_an_overloaded_holder_loses() -> None:
    # Mean 4. a: -0.8 + 2/4 = -0.3.  b: -2/4.  c: 0.
    fleet = (view("a", 6, cached_tokens=800), view("b", 2), view("c", 4))
    decision = decide(LoadAware(), asked(1_000), *fleet)
    assert scores(decision) == pytest.approx({"a": -0.3, "b": -0.5, "c": 0.0})
    assert (decision.replica, decision.reason) == ("b", Reason.SPILL)


@pytest.mark.parametrize("prompt_tokens", [100, 100_000])
def test_beta_has_no_unit_of_work(prompt_tokens: int) -> None:
    """The weakness of it: 2 requests more cost a short and a long prompt the same."""
    # Mean 2. a: -1 + 1 = 0.  b: 0 - 1.
    fleet = (view("a", 4, cached_tokens=prompt_tokens), view("b"))
    decision = decide(LoadAware(), asked(prompt_tokens), *fleet)
    assert scores(decision) == {"a": 0.0, "b": -1.0}
    assert decision.replica == "b"


def test_below_one_request_each_the_mean_counts_as_one() -> None:
    # Mean 0.5. a: -1 + 0.5 / 1.  b: 0 - 0.5 / 1.
    fleet = (view("a", 1, cached_tokens=100), view("b"))
    assert scores(decide(LoadAware(), asked(100), *fleet)) == {"a": -0.5, "b": -0.5}
    assert drawn(LoadAware(), 100, *fleet) == {"a", "b"}


def test_beta_zero_is_the_match_alone() -> None:
    fleet = (view("a", 500, cached_tokens=64), view("b"))
    assert decide(LoadAware(beta=0.0), asked(1_000), *fleet).replica == "a"


def test_only_what_is_confirmed_counts_and_a_silent_engine_does_not() -> None:
    fleet = (view("a", cached_tokens=900, pending_tokens=800, queued=None), view("b", waiting=9))
    decision = decide(LoadAware(), asked(1_000), *fleet)
    assert scores(decision) == {"a": -0.1, "b": 0.0}


def test_nobody_holds_more_than_the_whole_prompt() -> None:
    decision = decide(LoadAware(), asked(1_000), view("a", cached_tokens=2_000))
    assert scores(decision) == {"a": -1.0}


def test_a_cold_fleet_goes_by_load() -> None:
    decision = decide(LoadAware(), asked(1_000), view("a", 3), view("b", 1))
    assert (decision.replica, decision.reason) == ("b", Reason.LOAD)
