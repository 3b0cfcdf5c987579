"""Loads of a whole fleet in virtual time, for the default policy and the weighted one."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from policies.baselines.session_hash import SessionHash
from policies.expected_ttft import ExpectedTtft
from policies.least_loaded import LeastLoaded
from policies.weighted import Weighted
from replay.scenario import inflight_at, worst_crowding
from replay.score import score_run
from replay.setting import Fault, FleetSettings
from support.field_trace import (
    OURS,
    Polled,
    hit_ratio,
    prompt_at,
    random_times,
    replay,
    shares,
    switches,
)

if TYPE_CHECKING:
    from policies.model import Policy
    from replay.outcome import ReplayRun
    from replay.trace import TraceRequest

PACED_S = 3.0
"""So long after each other that nobody meets anybody."""
RESTARTED = FleetSettings(
    replicas=4, load_delay_s=5.0, faults=(Fault(at_s=24.5, replica=0, down_s=0.05),)
)


def imbalance(run: ReplayRun) -> float:
    found = score_run(run).imbalance_prefill
    assert found is not None
    return found


def mean_ttft_s(run: ReplayRun) -> float:
    return sum(one.ttft_s or 0.0 for one in run.outcomes) / len(run.outcomes)


@pytest.mark.parametrize("policy", OURS)
def test_paced_distinct_prompts_use_the_whole_fleet(policy: Policy) -> None:
    """A01: 100 requests, one at a time, on 4 idle replicas."""
    asked = [prompt_at(PACED_S * i, (f"p{i}", 2_000)) for i in range(100)]
    run = replay(asked, policy, FleetSettings(replicas=4))
    assert all(15 <= got <= 35 for got in shares(run))


@pytest.mark.parametrize("policy", OURS)
def test_paced_prompts_alternate_between_two_replicas(policy: Policy) -> None:
    """B32: 100 distinct prompts without overlap in time: about half each."""
    asked = [prompt_at(PACED_S * i, (f"p{i}", 500)) for i in range(100)]
    assert all(40 <= got <= 60 for got in shares(replay(asked, policy, FleetSettings(replicas=2))))


@pytest.mark.parametrize("policy", OURS)
def test_paced_prompts_shorter_than_a_block_spread(policy: Policy) -> None:
    """B31: 40 prompts without a block to know them by, on 4 idle replicas."""
    asked = [prompt_at(PACED_S * i, (f"p{i}", 30)) for i in range(40)]
    assert all(5 <= got <= 15 for got in shares(replay(asked, policy, FleetSettings(replicas=4))))


def paced_with_one_system_prompt() -> list[TraceRequest]:
    return [prompt_at(PACED_S * i, ("system", 600), (f"u{i}", 40)) for i in range(450)]


@pytest.mark.parametrize("policy", OURS)
def test_a_paced_client_with_a_shared_prompt_pins_no_replica(policy: Policy) -> None:
    """A02: 450 requests that share 600 tokens, 2 replicas."""
    run = replay(paced_with_one_system_prompt(), policy, FleetSettings(replicas=2))
    assert max(shares(run)) <= 0.75 * 450
    assert hit_ratio(run.outcomes) > 0.8


def test_without_its_share_of_the_work_a_paced_client_pins_one_replica() -> None:
    """A02: what ``w_share`` is for."""
    run = replay(
        paced_with_one_system_prompt(), ExpectedTtft(w_share=0.0), FleetSettings(replicas=2)
    )
    assert max(shares(run)) == 450


@pytest.mark.parametrize("gap_s", [0.0, 0.001])
@pytest.mark.parametrize("policy", OURS)
def test_a_burst_of_long_prompts_is_even_before_anyone_answers(
    policy: Policy, gap_s: float
) -> None:
    """A03: 32 prompts of 32,000 tokens at once; the first answer takes more than 4 s."""
    asked = [prompt_at(gap_s * i, (f"p{i}", 32_000), output_tokens=1) for i in range(32)]
    run = replay(asked, policy, FleetSettings(replicas=4))
    assert min(one.ttft_s or 0.0 for one in run.outcomes) > 4.0
    assert all(7 <= got <= 9 for got in shares(run))


@pytest.mark.parametrize("policy", OURS)
def test_noise_of_an_even_load_breaks_no_affinity_over_eight_routers(policy: Policy) -> None:
    """A06: each router has about 10 in flight per replica, and sees the others' leases."""
    draw = random.Random(2)
    asked = []
    for at_s in random_times(2, 24.0, 1_500):
        session = f"s{draw.randrange(64)}"
        asked.append(prompt_at(at_s, (session, 4_000), output_tokens=1_000, session=session))
    run = replay(asked, policy, FleetSettings(replicas=8, routers=8))
    in_flight = inflight_at(run, 40.0).values()
    assert sum(in_flight) / len(in_flight) > 8 * 8
    settled = [one for one in run.outcomes if one.arrival_s > 25.0]
    assert sum(one.cached_tokens == 0 for one in settled) < 0.01 * len(settled)
    assert switches(settled) < 0.01 * len(settled)


def test_a_quarter_of_the_traffic_on_one_prefix_overloads_nobody_in_a_large_fleet() -> None:
    """A07: nobody gets twice the mean, also while a replica's share goes to the others."""
    draw = random.Random(5)
    asked = []
    for index, at_s in enumerate(random_times(5, 100.0, 1_500)):
        is_hot = draw.random() < 0.25
        parts = (("hot", 3_000), (f"u{index}", 50)) if is_hot else ((f"p{index}", 1_500),)
        asked.append(prompt_at(at_s, *parts))
    gone = Fault(at_s=5.0, replica=0, down_s=60.0)
    run = replay(asked, ExpectedTtft(), FleetSettings(replicas=100, faults=(gone,)))
    assert max(shares(run)) <= 2 * 15
    late = [one for one in run.outcomes if one.arrival_s > 5.0]
    assert max(shares(run, late)) <= 2 * len(late) / 99


@pytest.mark.parametrize("policy", OURS)
def test_loads_that_are_polled_seldom_draw_no_herd(policy: Policy) -> None:
    """A09, B35: polls every 5 s, 200 requests between two of them, 100 ms each."""
    asked = [
        prompt_at(at_s, (f"p{i}", 500), output_tokens=200)
        for i, at_s in enumerate(random_times(5, 40.0, 800))
    ]
    seldom = FleetSettings(replicas=8, load_delay_s=5.0)
    times_s = [second / 2 for second in range(4, 40)]
    run = replay(asked, policy, seldom)
    for start in range(0, 800, 200):
        assert max(shares(run, run.outcomes[start : start + 200])) <= 1.3 * 200 / 8
    assert worst_crowding(run, times_s) <= 1.3
    herd = replay(asked, Polled(), seldom)
    assert max(shares(herd, herd.outcomes[:200])) > 3 * 200 / 8
    assert worst_crowding(herd, times_s) > 3


def restart_amid_long_answers(requests_per_s: float) -> list[TraceRequest]:
    """30 long answers on each of 4 replicas; from 24.6 s on 100 more requests come."""
    running = [prompt_at(0.2 * i, (f"p{i}", 1_000), output_tokens=4_000) for i in range(120)]
    coming = [
        prompt_at(24.6 + i / requests_per_s, (f"q{i}", 1_000), output_tokens=200)
        for i in range(100)
    ]
    return [*running, *coming]


@pytest.mark.parametrize("requests_per_s", [10.0, 50.0])
@pytest.mark.parametrize("policy", OURS)
def test_a_restarted_replica_is_filled_up_to_the_others_and_not_beyond(
    policy: Policy, requests_per_s: float
) -> None:
    """A10: it reports 0, and that is true; what it is sent counts at once."""
    run = replay(restart_amid_long_answers(requests_per_s), policy, RESTARTED)
    assert min(count for name, count in inflight_at(run, 24.5).items() if name != "r00") >= 30
    assert 25 <= shares(run, run.outcomes[120:])[0] <= 65
    for tick in range(1, 20):
        mine, *others = inflight_at(run, 24.6 + tick * 5 / requests_per_s).values()
        assert mine <= 1.15 * max(others) + 2


def test_where_only_polls_count_a_restarted_replica_gets_everything() -> None:
    """A10: what the limits above would catch."""
    run = replay(restart_amid_long_answers(50.0), Polled(), RESTARTED)
    assert shares(run, run.outcomes[120:])[0] == 100


def test_siblings_of_one_key_do_not_all_go_to_one_replica_but_where_a_hash_decides() -> None:
    """A13: 8 siblings, 2 replicas: 6:2 or better."""
    asked = [
        prompt_at(0.001 * i, ("parent", 1_500), (f"child{i}", 500), session="parent")
        for i in range(8)
    ]
    for policy in OURS:
        assert max(shares(replay(asked, policy, FleetSettings(replicas=2)))) <= 6
    assert max(shares(replay(asked, SessionHash(), FleetSettings(replicas=2)))) == 8


def half_speed(requests_per_s: float, policy: Policy) -> ReplayRun:
    """Two replicas at full speed, two at half of it, which nobody tells the router."""
    asked = [
        prompt_at(at_s, (f"p{i}", 2_000), output_tokens=100)
        for i, at_s in enumerate(random_times(1, requests_per_s, 600))
    ]
    return replay(asked, policy, FleetSettings(replicas=4, speeds=(1.0, 1.0, 0.5, 0.5)))


def test_a_busy_fleet_works_in_proportion_to_the_speeds_of_its_replicas() -> None:
    """A15: 2:1 in requests, and more than even in what is in flight."""
    run = half_speed(13.0, ExpectedTtft())
    got = shares(run)
    assert 1.7 <= (got[0] + got[1]) / (got[2] + got[3]) <= 2.4
    middle = [inflight_at(run, at_s).values() for at_s in range(15, 45)]
    fast, slow = (sum(sum(list(one)[at : at + 2]) for one in middle) for at in (0, 2))
    assert 1.3 <= fast / slow <= 2.4
    assert mean_ttft_s(run) < 0.75 * mean_ttft_s(half_speed(13.0, LeastLoaded()))


@pytest.mark.parametrize("policy", OURS)
def test_one_system_prompt_for_a_thousand_requests_is_everybodys(policy: Policy) -> None:
    """A14: 3,000 shared tokens and 50 of one's own, 8 replicas; 100 requests of warm-up."""
    asked = [
        prompt_at(0.05 * i, ("system", 3_000), (f"u{i}", 50), output_tokens=50)
        for i in range(1_000)
    ]
    run = replay(asked, policy, FleetSettings(replicas=8))
    assert max(shares(run, run.outcomes[100:])) <= 1.5 * 900 / 8
    assert hit_ratio(run.outcomes[100:]) >= 0.9


@pytest.mark.parametrize("policy", OURS)
def test_alternating_hotspots_are_served_as_soon_as_where_load_decides(policy: Policy) -> None:
    """A17: A and B by turns of 10 s for 5 min, in caches that hold both just so."""
    asked = [
        prompt_at(i / 10, ("AB"[i // 100 % 2], 2_000), (f"u{i}", 50), output_tokens=50)
        for i in range(3_000)
    ]
    small = FleetSettings(replicas=8, capacity_tokens=6_400)
    ours, theirs = (replay(asked, each, small) for each in (policy, LeastLoaded()))
    p95_s = [sorted(one.ttft_s or 0.0 for one in run.outcomes)[2_850] for run in (ours, theirs)]
    assert p95_s[0] <= 1.02 * p95_s[1]
    assert hit_ratio(ours.outcomes) > 0.9
    assert imbalance(ours) < 1.2


@pytest.mark.parametrize("policy", OURS)
def test_a_burst_of_one_new_prompt_is_computed_once_per_replica_that_it_uses(
    policy: Policy,
) -> None:
    """B34: 64 at once and cold on 8 replicas: neither all on one nor 64 cold prefills."""
    run = replay([prompt_at(0.0, ("new", 4_000)) for _ in range(64)], policy, FleetSettings())
    got = shares(run)
    cold = sum(one.cached_tokens == 0 for one in run.outcomes)
    assert cold == sum(count > 0 for count in got)
    assert 2 <= cold <= 8
    assert max(got) <= 16


def test_the_weighted_policy_gives_slow_replicas_less_without_knowing_speeds() -> None:
    """A15: what they still have in flight keeps further requests away."""
    got = shares(half_speed(8.0, Weighted()))
    assert got[2] + got[3] < got[0] + got[1]
