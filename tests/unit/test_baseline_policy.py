from __future__ import annotations

from collections import Counter
from itertools import combinations

import msgspec
import pytest

from policies.least_loaded import LeastLoaded
from policies.model import Decision, Policy, Reason, ReplicaView, RoutingRequest
from policies.power_of_two import PowerOfTwo
from policies.round_robin import RoundRobin
from policies.uniform import Uniform
from policies.union import AnyPolicy
from state.model import ReplicaId

BASELINES: tuple[Policy, ...] = (RoundRobin(), Uniform(), LeastLoaded(), PowerOfTwo())


def fleet_of(*loads: tuple[int, int | None]) -> tuple[ReplicaView, ...]:
    return tuple(
        ReplicaView(replica=ReplicaId(f"r{i}"), inflight=inflight, queued=queued, cached_tokens=64)
        for i, (inflight, queued) in enumerate(loads)
    )


def decide(policy: Policy, fleet: tuple[ReplicaView, ...], ordinal: int = 0) -> Decision:
    decision = policy.pick(RoutingRequest(ordinal=ordinal, seed=3, prompt_tokens=100), fleet)
    assert decision is not None
    return decision


IDLE_4 = fleet_of((0, 0), (0, 0), (0, 0), (0, 0))


def test_round_robin_takes_turns() -> None:
    turns = [decide(RoundRobin(), IDLE_4, ordinal).replica for ordinal in range(8)]
    assert turns == ["r0", "r1", "r2", "r3"] * 2


def test_round_robin_keeps_its_turns_when_the_fleet_is_listed_in_another_order() -> None:
    for ordinal in range(4):
        straight = decide(RoundRobin(), IDLE_4, ordinal)
        assert decide(RoundRobin(), IDLE_4[::-1], ordinal).replica == straight.replica


@pytest.mark.parametrize("policy", [Uniform(), LeastLoaded(), PowerOfTwo()])
def test_an_idle_fleet_is_used_uniformly(policy: Policy) -> None:
    """B39: 1,000 equal decisions over 4 replicas stay within 3 sigma."""
    got = Counter(decide(policy, IDLE_4, ordinal).replica for ordinal in range(1_000))
    sigma = (1_000 * 0.25 * 0.75) ** 0.5
    assert len(got) == 4
    assert all(abs(count - 250) <= 3 * sigma for count in got.values())


def test_least_loaded_counts_leases_and_the_engines_queue() -> None:
    decision = decide(LeastLoaded(), fleet_of((3, 0), (1, 4), (2, 0)))
    assert decision.replica == "r2"
    assert decision.candidates[1].terms == {"inflight": 1.0, "queued": 4.0}


def test_least_loaded_does_not_take_silence_for_idleness() -> None:
    decision = decide(LeastLoaded(), fleet_of((1, None), (1, 4), (1, 2)))
    assert decision.replica == "r2"
    assert decision.candidates[0].score == 4.0


def test_power_of_two_takes_the_less_loaded_of_two_distinct_replicas() -> None:
    fleet = fleet_of((4, 0), (3, 0), (2, 0), (1, 0))
    pairs: Counter[tuple[str, ...]] = Counter()
    for ordinal in range(1_200):
        decision = decide(PowerOfTwo(), fleet, ordinal)
        pairs[tuple(candidate.replica for candidate in decision.candidates)] += 1
        assert decision.replica == max(candidate.replica for candidate in decision.candidates)
    assert set(pairs) == set(combinations(["r0", "r1", "r2", "r3"], 2))
    sigma = (1_200 * (1 / 6) * (5 / 6)) ** 0.5
    assert all(abs(count - 200) <= 3.5 * sigma for count in pairs.values())


@pytest.mark.parametrize("policy", BASELINES)
def test_a_fleet_of_one_is_chosen_and_an_empty_one_is_not(policy: Policy) -> None:
    assert decide(policy, fleet_of((9, None))).replica == "r0"
    assert policy.pick(RoutingRequest(ordinal=0, seed=3, prompt_tokens=100), ()) is None


@pytest.mark.parametrize("policy", BASELINES)
def test_a_baseline_says_that_its_rule_decided_and_what_is_cached(policy: Policy) -> None:
    decision = decide(policy, IDLE_4)
    assert decision.reason is Reason.RULE
    assert decision.predicted_cached_tokens == 64


@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        ("round_robin", RoundRobin()),
        ("random", Uniform()),
        ("least_loaded", LeastLoaded()),
        ("power_of_two", PowerOfTwo()),
    ],
)
def test_a_baseline_is_named_by_its_kind(kind: str, policy: Policy) -> None:
    assert msgspec.convert({"kind": kind}, type=AnyPolicy) == policy
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"kind": kind, "w_queue": 1}, type=AnyPolicy)
