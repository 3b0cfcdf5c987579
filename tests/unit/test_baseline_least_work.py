from __future__ import annotations

from policies.baselines.least_work import LeastWork
from policies.model import Reason
from support.snapshot import asked, decide, drawn, scores, view


def test_the_fewest_tokens_to_compute_win_whatever_the_number_of_requests() -> None:
    fleet = (view("a", 1, backlog_tokens=5_000), view("b", 9, backlog_tokens=400))
    decision = decide(LeastWork(), asked(1_000), *fleet)
    assert scores(decision) == {"a": 5_000.0, "b": 400.0}
    assert (decision.replica, decision.reason) == ("b", Reason.RULE)


def test_it_is_blind_to_prefixes() -> None:
    warm = view("a", backlog_tokens=401, cached_tokens=999, placed_tokens=999)
    assert decide(LeastWork(), asked(1_000), warm, view("b", backlog_tokens=400)).replica == "b"


def test_equal_work_is_drawn() -> None:
    fleet = (view("a", 3), view("b"), view("c", backlog_tokens=1))
    assert drawn(LeastWork(), 100, *fleet) == {"a", "b"}


def test_a_silent_engine_changes_nothing() -> None:
    fleet = (view("a", backlog_tokens=1, queued=None), view("b", backlog_tokens=2, queued=0))
    assert scores(decide(LeastWork(), asked(100), *fleet)) == {"a": 1.0, "b": 2.0}
