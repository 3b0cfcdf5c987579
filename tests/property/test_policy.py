from __future__ import annotations

import math

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.least_loaded import LeastLoaded
from policies.model import Heat, Policy, Reason, ReplicaView, RoutingRequest
from policies.power_of_two import PowerOfTwo
from policies.round_robin import RoundRobin
from policies.uniform import Uniform
from policies.weighted import Weighted
from state.model import ReplicaId

untimed = settings(deadline=None)  # a busy machine is no failure
NAMES = [ReplicaId(f"r{i}") for i in range(6)]
WEIGHT = st.floats(min_value=0, max_value=1_000)

weighted = st.builds(
    Weighted,
    w_queue=WEIGHT,
    w_prefix=WEIGHT,
    w_recent=WEIGHT,
    tokens_scale=st.floats(min_value=1e-3, max_value=1e9),
    tie_margin=st.floats(min_value=0, max_value=1),
    lower_tier_credit=st.floats(min_value=0, max_value=1),
)
policies: st.SearchStrategy[Policy] = st.one_of(
    weighted,
    st.sampled_from([RoundRobin(), Uniform(), LeastLoaded(), PowerOfTwo()]),
)
heats = st.builds(
    Heat,
    prefix_tokens=st.integers(1, 10_000),
    rate_per_s=st.floats(0, 1_000),
    holders=st.frozensets(st.sampled_from(NAMES)),
)
requests = st.builds(
    RoutingRequest,
    ordinal=st.integers(0, 2**40),
    seed=st.integers(0, 2**64 - 1),
    prompt_tokens=st.integers(0, 200_000),
    heat=st.none() | heats,
)


@st.composite
def fleets(draw: st.DrawFn, smallest: int = 1) -> tuple[ReplicaView, ...]:
    names = draw(st.lists(st.sampled_from(NAMES), unique=True, min_size=smallest))
    return tuple(
        ReplicaView(
            replica=name,
            inflight=draw(st.integers(0, 500)),
            queued=draw(st.none() | st.integers(0, 500)),
            recent_assignments=draw(st.just(0.0) | st.floats(0, 1e6)),
            cached_tokens=draw(st.just(0) | st.integers(0, 200_000)),
            lower_tier_tokens=draw(st.just(0) | st.integers(0, 200_000)),
        )
        for name in names
    )


@untimed
@given(policies, requests, fleets())
def test_a_decision_is_in_the_fleet_and_among_its_candidates(
    policy: Policy, request: RoutingRequest, fleet: tuple[ReplicaView, ...]
) -> None:
    decision = policy.pick(request, fleet)
    assert decision is not None
    by_name = {view.replica: view for view in fleet}
    chosen = by_name[decision.replica]
    assert decision.predicted_cached_tokens == chosen.cached_tokens
    assert decision.predicted_lower_tier_tokens == chosen.lower_tier_tokens
    for candidate in decision.candidates:
        view = by_name[candidate.replica]
        held = (candidate.cached_tokens, candidate.lower_tier_tokens)
        assert held == (view.cached_tokens, view.lower_tier_tokens)
    listed = [candidate.replica for candidate in decision.candidates]
    assert decision.replica in listed
    assert listed == [view.replica for view in fleet if view.replica in listed]


@untimed
@given(policies, requests, fleets())
def test_terms_sum_to_the_score_and_are_numbers(
    policy: Policy, request: RoutingRequest, fleet: tuple[ReplicaView, ...]
) -> None:
    decision = policy.pick(request, fleet)
    assert decision is not None
    for candidate in decision.candidates:
        assert sum(candidate.terms.values()) == candidate.score
        assert all(math.isfinite(term) and term >= 0 for term in candidate.terms.values())


@untimed
@given(weighted, requests, fleets())
def test_weighted_never_picks_beyond_its_tie_margin(
    policy: Weighted, request: RoutingRequest, fleet: tuple[ReplicaView, ...]
) -> None:
    decision = policy.pick(request, fleet)
    assert decision is not None
    scores = {candidate.replica: candidate.score for candidate in decision.candidates}
    assert scores[decision.replica] <= min(scores.values()) + policy.tie_margin


@untimed
@given(policies, requests, st.data())
def test_the_order_of_the_fleet_does_not_matter(
    policy: Policy, request: RoutingRequest, data: st.DataObject
) -> None:
    fleet = data.draw(fleets())
    shuffled = tuple(data.draw(st.permutations(fleet)))
    one, other = policy.pick(request, fleet), policy.pick(request, shuffled)
    assert one is not None
    assert other is not None
    assert (one.replica, one.reason) == (other.replica, other.reason)
    assert {c.replica: c for c in one.candidates} == {c.replica: c for c in other.candidates}


@untimed
@given(policies, requests, fleets())
def test_the_same_question_has_the_same_answer(
    policy: Policy, request: RoutingRequest, fleet: tuple[ReplicaView, ...]
) -> None:
    frozen = msgspec.msgpack.encode((request, fleet))
    answer = policy.pick(request, fleet)
    assert policy.pick(request, fleet) == answer
    assert msgspec.msgpack.encode((request, fleet)) == frozen
    replayed = msgspec.msgpack.decode(frozen, type=tuple[RoutingRequest, tuple[ReplicaView, ...]])
    assert policy.pick(*replayed) == answer


@untimed
@given(policies, requests)
def test_nothing_is_picked_from_an_empty_fleet(policy: Policy, request: RoutingRequest) -> None:
    assert policy.pick(request, ()) is None


@untimed
@given(weighted, requests, fleets(smallest=2))
def test_the_reason_follows_from_who_holds_most(
    policy: Weighted, request: RoutingRequest, fleet: tuple[ReplicaView, ...]
) -> None:
    decision = policy.pick(request, fleet)
    assert decision is not None
    held = {
        view.replica: view.cached_tokens + policy.lower_tier_credit * view.lower_tier_tokens
        for view in fleet
    }
    most = max(held.values())
    if min(held.values()) == most:
        assert decision.reason is Reason.LOAD
    elif held[decision.replica] == most:
        assert decision.reason is Reason.PREFIX
    else:
        assert decision.reason is Reason.SPILL


@untimed
@given(requests, fleets())
def test_more_cached_tokens_never_cost_a_replica_the_choice(
    request: RoutingRequest, fleet: tuple[ReplicaView, ...]
) -> None:
    policy = Weighted(tie_margin=0.0)
    before = policy.pick(request, fleet)
    assert before is not None
    warmer = tuple(
        msgspec.structs.replace(view, cached_tokens=view.cached_tokens + 4_096)
        if view.replica == before.replica
        else view
        for view in fleet
    )
    after = policy.pick(request, warmer)
    assert after is not None
    scores = {candidate.replica: candidate.score for candidate in after.candidates}
    assert scores[before.replica] == min(scores.values())


@untimed
@given(weighted, requests, fleets())
def test_a_copy_in_a_lower_tier_is_worth_something_between_nothing_and_one_on_the_gpu(
    policy: Weighted, request: RoutingRequest, fleet: tuple[ReplicaView, ...]
) -> None:
    def prefix_terms(views: tuple[ReplicaView, ...]) -> list[float]:
        decision = policy.pick(request, views)
        assert decision is not None
        return [candidate.terms["prefix"] for candidate in decision.candidates]

    replace = msgspec.structs.replace
    gone = tuple(replace(view, lower_tier_tokens=0) for view in fleet)
    promoted = tuple(
        replace(
            view, cached_tokens=view.cached_tokens + view.lower_tier_tokens, lower_tier_tokens=0
        )
        for view in fleet
    )
    terms = zip(prefix_terms(promoted), prefix_terms(fleet), prefix_terms(gone), strict=True)
    assert all(best <= term <= worst for best, term, worst in terms)
