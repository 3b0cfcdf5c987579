from __future__ import annotations

import pytest

from policies.baselines.mooncake import Mooncake
from policies.model import Reason
from policies.prefill import PrefillCost
from support.snapshot import asked, decide, drawn, scores, terms, view

# A token to prefill is a millisecond, one to copy a tenth of it.
POLICY = Mooncake(prefill=PrefillCost(token_ms=1.0, attention_pair_ms=0.0), transfer_token_ms=0.1)


@pytest.mark.parametrize(("backlog_ms", "winner"), [(799.0, "a"), (801.0, "b")])
def test_the_least_time_to_the_first_token_wins(backlog_ms: float, winner: str) -> None:
    # a: backlog + 200.  b: 1,000.
    fleet = (view("a", cached_tokens=800, backlog_ms=backlog_ms), view("b"))
    decision = decide(POLICY, asked(1_000), *fleet)
    assert scores(decision) == {"a": backlog_ms + 200.0, "b": 1_000.0}
    assert decision.replica == winner
    assert decision.reason is (Reason.PREFIX if winner == "a" else Reason.SPILL)
    assert decision.predicted_wait_ms == (backlog_ms if winner == "a" else 0.0)
    assert decision.kv_source is None


def test_a_cold_replica_copies_the_longest_prefix_and_is_told_from_whom() -> None:
    # a: 500 + 200.  b: 0.1 * 800 + 0 + 200.
    fleet = (
        view("a", cached_tokens=800, backlog_ms=500.0, can_fetch=True),
        view("b", can_fetch=True),
    )
    decision = decide(POLICY, asked(1_000), *fleet)
    assert terms(decision, "b") == {"transfer": 80.0, "queue": 0.0, "prefill": 200.0}
    assert scores(decision) == {"a": 700.0, "b": 280.0}
    assert (decision.replica, decision.reason) == ("b", Reason.SPILL)
    assert (decision.kv_source, decision.predicted_wait_ms) == ("a", 0.0)


def test_who_holds_the_longest_copies_nothing() -> None:
    fleet = (view("a", cached_tokens=800, can_fetch=True), view("b", can_fetch=True))
    decision = decide(POLICY, asked(1_000), *fleet)
    assert (decision.replica, decision.kv_source) == ("a", None)


@pytest.mark.parametrize(
    ("own_tokens", "expected"),
    [
        # 800 <= 1.25 * 640: computes the rest.
        (640, {"transfer": 0.0, "queue": 0.0, "prefill": 360.0}),
        # 800 > 1.25 * 639: copies 161 tokens.
        (639, {"transfer": 16.1, "queue": 0.0, "prefill": 200.0}),
    ],
)
def test_a_prefix_nearly_as_long_is_good_enough(
    own_tokens: int, expected: dict[str, float]
) -> None:
    fleet = (
        view("a", cached_tokens=800, backlog_ms=900.0, can_fetch=True),
        view("b", cached_tokens=own_tokens, can_fetch=True),
    )
    assert terms(decide(POLICY, asked(1_000), *fleet), "b") == pytest.approx(expected)


def test_only_replicas_that_fetch_copy_and_only_from_each_other() -> None:
    fleet = (
        view("a", cached_tokens=900, backlog_ms=5_000.0),
        view("b", cached_tokens=500, backlog_ms=5_000.0, can_fetch=True),
        view("c", can_fetch=True),
        view("d"),
    )
    decision = decide(POLICY, asked(1_000), *fleet)
    assert terms(decision, "c") == {"transfer": 50.0, "queue": 0.0, "prefill": 500.0}
    assert terms(decision, "d") == {"transfer": 0.0, "queue": 0.0, "prefill": 1_000.0}
    assert (decision.replica, decision.kv_source) == ("c", "b")


@pytest.mark.parametrize(("inflight", "source"), [(3, "a"), (2, "b")])
def test_of_equal_sources_the_least_busy_gives_and_then_the_first_by_name(
    inflight: int, source: str
) -> None:
    fleet = (
        view("b", inflight, cached_tokens=800, backlog_ms=5_000.0, can_fetch=True),
        view("a", 3, cached_tokens=800, backlog_ms=5_000.0, can_fetch=True),
        view("c", can_fetch=True),
    )
    assert decide(POLICY, asked(1_000), *fleet).kv_source == source
    assert decide(POLICY, asked(1_000), *fleet[::-1]).kv_source == source


def test_all_tiers_and_what_is_on_its_way_count_as_held() -> None:
    held = view("a", cached_tokens=500, pending_tokens=400, lower_tier_tokens=300)
    assert terms(decide(POLICY, asked(1_000), held), "a")["prefill"] == 200.0


def test_attention_over_the_context_is_paid() -> None:
    # 200 new tokens after 800: 200 * (800 + 100) = 180,000 pairs.
    policy = Mooncake(prefill=PrefillCost(token_ms=1.0, attention_pair_ms=1e-3))
    decision = decide(policy, asked(1_000), view("a", cached_tokens=800))
    assert scores(decision) == pytest.approx({"a": 380.0})


def test_a_hot_prefix_stays_on_one_replica_until_it_queues() -> None:
    """The weakness of it where nothing can be copied: there is no notion of popularity."""
    hot = view("a", 40, cached_tokens=900, held_tokens=50_000, backlog_ms=850.0)
    assert decide(POLICY, asked(1_000, popularity=((900, 400.0),)), hot, view("b")).replica == "a"


def test_equal_times_are_drawn_and_a_silent_engine_changes_nothing() -> None:
    fleet = (view("a", 9, queued=None), view("b", queued=9, waiting=9), view("c", backlog_ms=1.0))
    assert drawn(POLICY, 1_000, *fleet) == {"a", "b"}
    assert decide(POLICY, asked(1_000), *fleet).reason is Reason.LOAD
