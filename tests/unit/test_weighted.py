from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from policies.model import Decision, Heat, Reason, ReplicaView, RoutingRequest
from policies.union import AnyPolicy
from policies.weighted import Weighted
from state.model import ReplicaId


def view(
    name: str,
    inflight: int = 0,
    *,
    cached: int = 0,
    lower: int = 0,
    queued: int | None = 0,
    recent: float = 0.0,
) -> ReplicaView:
    return ReplicaView(
        replica=ReplicaId(name),
        inflight=inflight,
        queued=queued,
        recent_assignments=recent,
        cached_tokens=cached,
        lower_tier_tokens=lower,
    )


def request(prompt_tokens: int, *, ordinal: int = 0, heat: Heat | None = None) -> RoutingRequest:
    return RoutingRequest(ordinal=ordinal, seed=7, prompt_tokens=prompt_tokens, heat=heat)


def decide(
    fleet: tuple[ReplicaView, ...], asked: RoutingRequest, policy: Weighted | None = None
) -> Decision:
    decision = (policy or Weighted()).pick(asked, fleet)
    assert decision is not None
    return decision


def terms_of(decision: Decision, name: str) -> dict[str, float]:
    return next(c.terms for c in decision.candidates if c.replica == name)


def test_the_score_is_the_published_formula() -> None:
    fleet = (view("a", 3, queued=1, cached=1_500, recent=2.0), view("b", 1, queued=1, recent=6.0))
    policy = Weighted(w_queue=2.0, w_prefix=3.0, w_recent=0.5, tokens_scale=1_000.0)
    decision = decide(fleet, request(2_000), policy)
    assert terms_of(decision, "a") == pytest.approx(
        {"queue": 2 * 4 / 3, "prefix": 3 * 0.5, "recent": 0.5 * 2 / 4}
    )
    assert terms_of(decision, "b") == pytest.approx(
        {"queue": 2 * 2 / 3, "prefix": 3 * 2.0, "recent": 0.5 * 6 / 4}
    )
    assert decision.replica == "a"
    assert decision.predicted_cached_tokens == 1_500


def test_a_fleet_mean_below_one_request_counts_as_one() -> None:
    decision = decide((view("a", 1), view("b"), view("c"), view("d")), request(100))
    assert terms_of(decision, "a")["queue"] == 1.0


def test_the_last_token_is_always_computed() -> None:
    decision = decide((view("a", cached=100), view("b")), request(100))
    assert terms_of(decision, "a")["prefix"] == pytest.approx(1 / 2_000)


def test_an_unknown_queue_counts_as_the_mean_of_the_known_ones() -> None:
    fleet = (view("silent", 2, queued=None), view("b", 2, queued=6), view("c", 2, queued=2))
    decision = decide(fleet, request(100))
    assert terms_of(decision, "silent")["queue"] == pytest.approx(6 / 6)
    assert decision.replica == "c"


def test_without_any_known_queue_the_leases_decide() -> None:
    decision = decide((view("a", 2, queued=None), view("b", 1, queued=None)), request(100))
    assert decision.replica == "b"
    assert terms_of(decision, "a")["queue"] == pytest.approx(2 / 1.5)


def test_the_holder_wins_although_another_replica_is_a_little_less_loaded() -> None:
    """B38: loads 10, 2, 3 with the prefix on the third."""
    decision = decide((view("a", 10), view("b", 2), view("c", 3, cached=2_000)), request(2_100))
    assert decision.replica == "c"
    assert decision.reason is Reason.PREFIX


def test_a_saturated_holder_is_left_and_found_again_at_the_mean() -> None:
    """A05: owner at 40 in flight, the others idle, a full match of 2,000 tokens."""
    saturated = (view("owner", 40, cached=1_999), view("b"), view("c"), view("d"))
    decision = decide(saturated, request(2_000))
    assert decision.replica != "owner"
    assert decision.reason is Reason.SPILL
    level = (view("owner", 11, cached=1_999), view("b", 10), view("c", 10), view("d", 10))
    assert decide(level, request(2_000)).replica == "owner"


def test_one_outlier_does_not_disable_affinity_for_the_rest() -> None:
    """C38: one replica with 400 in flight, its peers nearly idle."""
    fleet = (view("outlier", 400), view("b", 1), view("c", 3, cached=1_024), view("d", 2))
    decision = decide(fleet, request(1_100))
    assert decision.replica == "c"
    assert decision.reason is Reason.PREFIX


def test_on_a_miss_requests_in_flight_count_and_not_how_often_it_was_chosen() -> None:
    """B36, C36: B runs 20 long requests and was chosen rarely; A has 3 short ones."""
    decision = decide((view("a", 3, recent=9.0), view("b", 20, recent=1.0)), request(500))
    assert decision.replica == "a"
    assert decision.reason is Reason.LOAD


def test_a_miss_goes_to_the_idle_replica_whatever_it_holds_of_others() -> None:
    """C37: on a miss only the load decides."""
    assert decide((view("busy", 5), view("idle")), request(4_000)).replica == "idle"


def test_a_long_agent_session_stays_although_its_replica_was_chosen_most() -> None:
    fleet = (view("home", cached=10_000, recent=40.0), *(view(f"r{i}") for i in range(31)))
    decision = decide(fleet, request(10_300))
    assert decision.replica == "home"
    assert decision.reason is Reason.PREFIX


def test_a_short_shared_prefix_does_not_pin_a_replica_that_gets_everything() -> None:
    """A02: 600 shared tokens weigh less than being chosen always."""
    decision = decide((view("a", cached=576, recent=10.0), view("b")), request(640))
    assert decision.replica == "b"
    assert decision.reason is Reason.SPILL


def test_equal_scores_are_drawn_uniformly() -> None:
    """B39, C49: 1,000 equal decisions over 4 replicas stay within 3 sigma."""
    fleet = tuple(view(f"r{i}") for i in range(4))
    got = Counter(decide(fleet, request(100, ordinal=i)).replica for i in range(1_000))
    sigma = (1_000 * 0.25 * 0.75) ** 0.5
    assert len(got) == 4
    assert all(abs(count - 250) <= 3 * sigma for count in got.values())


def test_near_ties_are_drawn_and_clear_differences_are_not() -> None:
    near = (view("a", cached=30), view("b"), view("c", 1))
    got = {decide(near, request(500, ordinal=i)).replica for i in range(64)}
    assert got == {"a", "b"}


@pytest.mark.parametrize("prompt_tokens", [0, 1, 30])
def test_prompts_shorter_than_a_block_spread(prompt_tokens: int) -> None:
    """B31: 10 prompts below one block on 4 idle replicas."""
    fleet = tuple(view(f"r{i}") for i in range(4))
    got = {decide(fleet, request(prompt_tokens, ordinal=i)).replica for i in range(10)}
    assert len(got) >= 3


def test_among_the_holders_of_a_hot_prefix_the_load_decides() -> None:
    heat = Heat(
        prefix_tokens=2_944, rate_per_s=20.0, holders=frozenset({ReplicaId("a"), ReplicaId("b")})
    )
    fleet = (view("a", 4, cached=2_944), view("b", 2), view("c", 3))
    decision = decide(fleet, request(3_050, heat=heat))
    assert decision.replica == "b"
    assert decision.reason is Reason.SPILL
    assert decision.predicted_cached_tokens == 0
    assert terms_of(decision, "b")["prefix"] == terms_of(decision, "a")["prefix"]
    assert terms_of(decision, "c")["prefix"] == pytest.approx(3_050 / 2_000)
    assert decide(fleet, request(3_050)).replica == "a"


def test_a_hot_prefix_takes_nothing_from_a_replica_that_holds_more() -> None:
    heat = Heat(prefix_tokens=1_024, rate_per_s=20.0, holders=frozenset({ReplicaId("b")}))
    decision = decide((view("a", cached=9_000), view("b")), request(9_100, heat=heat))
    assert decision.replica == "a"


def test_what_a_lower_tier_holds_counts_by_its_fraction() -> None:
    """A82: an offloaded prefix is no lost one, and no free one."""
    fleet = (view("gpu", cached=3_000), view("host", cached=1_000, lower=2_000), view("cold"))
    decision = decide(fleet, request(3_050), Weighted(lower_tier_credit=0.25))
    terms = [terms_of(decision, name)["prefix"] for name in ("gpu", "host", "cold")]
    assert terms == pytest.approx([50 / 2_000, (50 + 0.75 * 2_000) / 2_000, 3_050 / 2_000])
    assert decision.replica == "gpu"
    assert [one.lower_tier_tokens for one in decision.candidates] == [0, 2_000, 0]


def test_a_replica_that_can_fetch_the_prompt_is_better_than_one_without_it() -> None:
    fleet = (view("cold"), view("host", lower=3_000))
    decision = decide(fleet, request(3_050))
    assert (decision.replica, decision.reason) == ("host", Reason.PREFIX)
    assert decision.predicted_cached_tokens == 0
    assert decision.predicted_lower_tier_tokens == 3_000
    busy = (view("cold"), view("host", 3, lower=3_000))
    assert decide(busy, request(3_050)).reason is Reason.SPILL


def test_without_credit_a_lower_tier_is_worth_nothing() -> None:
    fleet = (view("cold"), view("host", lower=3_000))
    blind = Weighted(lower_tier_credit=0.0)
    decisions = [decide(fleet, request(3_050, ordinal=i), blind) for i in range(32)]
    assert {decision.replica for decision in decisions} == {"cold", "host"}
    assert {decision.reason for decision in decisions} == {Reason.LOAD}


def test_a_holder_of_a_hot_prefix_counts_what_it_holds_or_is_to_hold_but_not_both() -> None:
    heat = Heat(prefix_tokens=1_000, rate_per_s=20.0, holders=frozenset({ReplicaId("a")}))
    asked = request(4_000, heat=heat)
    policy = Weighted(lower_tier_credit=0.5)
    for lower, held in ((1_000, 1_000), (3_000, 1_500)):
        decision = decide((view("a", lower=lower), view("b")), asked, policy)
        assert terms_of(decision, "a")["prefix"] == pytest.approx((4_000 - held) / 2_000)


def test_the_policy_is_its_configuration() -> None:
    text = b'{"kind": "weighted", "w_prefix": 2, "tokens_scale": 500}'
    assert msgspec.json.decode(text, type=AnyPolicy) == Weighted(w_prefix=2.0, tokens_scale=500.0)


@pytest.mark.parametrize(
    "text",
    [
        '{"kind": "weighted", "w_queue": -1}',
        '{"kind": "weighted", "tokens_scale": 0}',
        '{"kind": "weighted", "tie_margin": -0.1}',
        '{"kind": "weighted", "lower_tier_credit": -0.1}',
        '{"kind": "weighted", "lower_tier_credit": 1.1}',
        '{"kind": "weighted", "w_cache": 1}',
        '{"kind": "unheard_of"}',
        "{}",
    ],
)
def test_a_wrong_configuration_is_refused(text: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(text, type=AnyPolicy)
