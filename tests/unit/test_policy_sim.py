"""What the policies do to balance and hits in a small fleet in virtual time."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from math import exp

import pytest

from policies.hot import HeatMap, HotSettings
from policies.least_loaded import LeastLoaded
from policies.model import Policy, Reason, ReplicaView, RoutingRequest
from policies.power_of_two import PowerOfTwo
from policies.round_robin import RoundRobin
from policies.uniform import Uniform
from policies.weighted import Weighted
from state.model import ReplicaId
from support.fleet_model import (
    ModelPrompt,
    Served,
    counts,
    fleet_model,
    imbalance,
    model_prompt,
    token_hit_ratio,
)


def mean_ttft_s(served: list[Served]) -> float:
    return sum(one.ttft_s for one in served) / len(served)


def p95_ttft_s(served: list[Served]) -> float:
    return sorted(one.ttft_s for one in served)[len(served) * 95 // 100]


def shared_system_prompt(requests: int) -> list[ModelPrompt]:
    return [model_prompt(("system", 3_000), (f"user{i}", 50)) for i in range(requests)]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_shared_system_prompt_is_spread_and_stays_warm(seed: int) -> None:
    """A14: 1,000 requests, 8 replicas, 32 at once; the first 100 are warm-up."""
    fleet = fleet_model(Weighted(), 8, heat=HeatMap(HotSettings()), seed=seed)
    fleet.closed_loop(shared_system_prompt(1_000), clients=32)
    assert imbalance(fleet, fleet.served[100:]) <= 1.5
    assert token_hit_ratio(fleet.served) > 0.9
    assert token_hit_ratio(fleet.served[100:]) > 0.95


def test_the_heat_is_what_spreads_a_shared_system_prompt_at_low_concurrency() -> None:
    """A14 with 4 clients: without heat two replicas would do for them all."""
    with_heat = fleet_model(Weighted(), 8, heat=HeatMap(HotSettings()))
    without = fleet_model(Weighted(), 8)
    for fleet in (with_heat, without):
        fleet.closed_loop(shared_system_prompt(1_000), clients=4)
    assert imbalance(with_heat, with_heat.served[100:]) <= 1.5
    assert imbalance(without, without.served[100:]) > 1.5


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_sequential_misses_use_the_whole_idle_fleet(seed: int) -> None:
    """A01: 4 idle replicas, 100 sequential distinct prompts."""
    fleet = fleet_model(Weighted(), 4, seed=seed)
    fleet.closed_loop([model_prompt((f"p{i}", 2_000)) for i in range(100)], clients=1)
    assert all(15 <= got <= 35 for got in counts(fleet))


@pytest.mark.parametrize("decode_s", [0.2, 1.0, 3.0])
def test_a_paced_client_with_a_short_shared_prompt_does_not_pin_one_replica(
    decode_s: float,
) -> None:
    """A02: 450 sequential requests that share 600 tokens, 2 replicas."""
    fleet = fleet_model(Weighted(), 2, decode_s=decode_s)
    prompts = [model_prompt(("system", 600), (f"user{i}", 40)) for i in range(450)]
    fleet.closed_loop(prompts, clients=1)
    assert max(counts(fleet)) <= 0.75 * 450
    assert token_hit_ratio(fleet.served) > 0.8


def test_without_the_recent_term_a_paced_client_pins_one_replica() -> None:
    """A02: what the recent term is for."""
    fleet = fleet_model(Weighted(w_recent=0.0), 2)
    prompts = [model_prompt(("system", 600), (f"user{i}", 40)) for i in range(450)]
    fleet.closed_loop(prompts, clients=1)
    assert max(counts(fleet)) == 450


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_burst_before_any_answer_is_spread_evenly(seed: int) -> None:
    """A03: 32 long prompts at once on 4 replicas; leases count at once."""
    fleet = fleet_model(Weighted(), 4, decode_s=5.0, seed=seed)
    fleet.open_loop([(0.0, model_prompt((f"p{i}", 32_000))) for i in range(32)])
    assert all(7 <= got <= 9 for got in counts(fleet))


def test_a_session_leaves_its_saturated_replica_and_returns_without_flapping() -> None:
    """A05: the owner starts with 40 in flight and drains; the client asks once a second."""
    prompt = model_prompt(("own", 2_000))
    fleet = fleet_model(Weighted(), 4)
    owner = fleet.replicas[0]
    owner.hold(prompt)
    owner.inflight = 40

    def drain() -> None:
        owner.inflight -= 1

    for second in range(40):
        fleet.at(second + 0.5, drain)
    fleet.open_loop([(float(second), prompt) for second in range(80)])
    assert fleet.served[0].reason is Reason.SPILL
    assert owner.name not in {one.replica for one in fleet.served if one.at_s < 20}
    assert owner.name in {one.replica for one in fleet.served if one.at_s > 40}
    switches = [
        after.at_s for before, after in pairwise(fleet.served) if before.reason != after.reason
    ]
    assert all(sum(start <= at < start + 30 for at in switches) <= 2 for start in switches)
    assert sum(one.cached_tokens == 0 for one in fleet.served) <= 2, "the prefix is not scattered"


def _poisson(draws: random.Random, mean: float) -> int:
    count, product = 0, draws.random()
    while product > exp(-mean):
        count, product = count + 1, product * draws.random()
    return count


@pytest.mark.parametrize(("mean", "match_tokens"), [(80, 2_000), (10, 4_000)])
def test_noise_of_an_even_load_does_not_break_affinity(mean: int, match_tokens: int) -> None:
    """A06: 8 routers with a mean of 10 each: seen together (shared leases), or only one's own."""
    draws = random.Random(6)
    broken = 0
    for ordinal in range(1_000):
        views = tuple(
            ReplicaView(
                replica=ReplicaId(f"r{i}"),
                inflight=_poisson(draws, mean),
                cached_tokens=match_tokens if i == 0 else 0,
            )
            for i in range(8)
        )
        asked = RoutingRequest(ordinal=ordinal, seed=1, prompt_tokens=match_tokens + 50)
        decision = Weighted().pick(asked, views)
        assert decision is not None
        broken += decision.replica != "r0"
    assert broken < 10


def test_a_quarter_of_the_traffic_on_one_prefix_overloads_nobody_in_a_large_fleet() -> None:
    """A07 at 100 replicas."""
    draws = random.Random(5)
    fleet = fleet_model(Weighted(), 100, heat=HeatMap(HotSettings()))
    at_s, arrivals = 0.0, []
    for index in range(2_000):
        at_s += draws.expovariate(150.0)
        is_hot = draws.random() < 0.25
        parts = (("hot", 3_000), (f"u{index}", 50)) if is_hot else ((f"p{index}", 1_500),)
        arrivals.append((at_s, model_prompt(*parts)))
    fleet.open_loop(arrivals)
    assert imbalance(fleet, fleet.served[1_000:]) < 2.0


def test_siblings_of_one_key_do_not_all_go_to_one_replica() -> None:
    """A13: 8 siblings at once, 2 replicas: 6:2 or better."""
    fleet = fleet_model(Weighted(), 2)
    siblings = [model_prompt(("parent", 1_500), (f"child{i}", 500)) for i in range(8)]
    fleet.open_loop([(i * 0.001, sibling) for i, sibling in enumerate(siblings)])
    assert max(counts(fleet)) <= 6


def test_alternating_hotspots_are_served_no_worse_than_by_least_loaded() -> None:
    """A17: A and B alternate every 10 s for 5 min in caches that hold both just so."""
    arrivals = [
        (i / 20, model_prompt(("AB"[int(i / 20 // 10) % 2], 2_000), (f"u{i}", 50)))
        for i in range(6_000)
    ]
    ours = fleet_model(Weighted(), 8, heat=HeatMap(HotSettings()), capacity_blocks=100)
    theirs = fleet_model(LeastLoaded(), 8, capacity_blocks=100)
    for fleet in (ours, theirs):
        fleet.open_loop(arrivals)
    assert p95_ttft_s(ours.served) <= 1.01 * p95_ttft_s(theirs.served)
    assert token_hit_ratio(ours.served) > 0.95


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_sequential_distinct_prompts_alternate_between_two_replicas(seed: int) -> None:
    """B32: 100 sequential distinct prompts, 2 replicas: about half each."""
    fleet = fleet_model(Weighted(), 2, seed=seed)
    fleet.closed_loop([model_prompt((f"p{i}", 500)) for i in range(100)], clients=1)
    assert all(40 <= got <= 60 for got in counts(fleet))


@pytest.mark.parametrize("heat", [None, HotSettings()])
@pytest.mark.parametrize("requests", [50, 64])
def test_a_burst_of_one_new_prompt_neither_scatters_nor_piles_up(
    heat: HotSettings | None, requests: int
) -> None:
    """A75, B34: one 4,000-token prompt in 100 ms, 8 cold replicas: each prefills it once."""
    fleet = fleet_model(Weighted(), 8, heat=None if heat is None else HeatMap(heat))
    prompt = model_prompt(("new", 4_000))
    fleet.open_loop([(i * 0.1 / requests, prompt) for i in range(requests)])
    got = counts(fleet)
    cold = sum(one.cached_tokens == 0 for one in fleet.served)
    assert cold == sum(count > 0 for count in got)
    assert 2 <= cold <= 8
    assert max(got) <= requests / 4


@pytest.mark.parametrize("replicas", [8, 32, 100])
def test_a_lone_agent_session_stays_on_one_replica_in_a_fleet_of_any_size(replicas: int) -> None:
    fleet = fleet_model(Weighted(), replicas, heat=HeatMap(HotSettings()), decode_s=0.2)
    turns = [model_prompt(("session", 4_000 + 128 * turn)) for turn in range(80)]
    fleet.closed_loop(turns, clients=1)
    assert Counter(counts(fleet))[0] == replicas - 1
    assert not any(one.has_heat for one in fleet.served)


@pytest.mark.parametrize("baseline", [RoundRobin(), Uniform(), LeastLoaded(), PowerOfTwo()])
def test_sessions_over_small_caches_are_served_sooner_than_by_a_baseline(baseline: Policy) -> None:
    draws = random.Random(3)
    turns: Counter[int] = Counter()
    at_s, arrivals = 0.0, []
    for _ in range(1_500):
        at_s += draws.expovariate(6.0)
        session = draws.randrange(60)
        turns[session] += 1
        parts = ((f"team{session % 5}", 2_000), (f"s{session}", 3_000 + 128 * turns[session]))
        arrivals.append((at_s, model_prompt(*parts)))
    ours = fleet_model(Weighted(), 8, heat=HeatMap(HotSettings()), capacity_blocks=4_000)
    theirs = fleet_model(baseline, 8, capacity_blocks=4_000)
    for fleet in (ours, theirs):
        fleet.open_loop(arrivals)
    assert mean_ttft_s(ours.served) < 0.5 * mean_ttft_s(theirs.served)
    assert imbalance(ours) < 1.3
