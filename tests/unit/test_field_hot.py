"""Popular prefixes: what spreads them, and that they are forgotten again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from policies.expected_ttft import ExpectedTtft
from policies.hot import HeatMap, HotSettings
from policies.model import Reason, ReplicaView, RoutingRequest
from replay.scenario import CROWD, flash_crowd, of_tenant
from replay.setting import FleetSettings
from state.model import ReplicaId
from support.field_trace import (
    BLOCK_TOKENS,
    OURS,
    hit_ratio,
    prompt_at,
    random_times,
    replay,
    shares,
)

if TYPE_CHECKING:
    from policies.hot import Arrival
    from policies.model import Decision, Policy

NAMES = [ReplicaId(f"r{place}") for place in range(8)]


@pytest.mark.parametrize("policy", OURS)
def test_being_popular_is_what_spreads_a_system_prompt_over_an_idle_fleet(policy: Policy) -> None:
    """A14: four requests a second, which one or two replicas could do."""
    asked = [
        prompt_at(0.25 * i, ("system", 3_000), (f"u{i}", 50), output_tokens=10) for i in range(400)
    ]
    blind = replay(asked, policy, FleetSettings(replicas=8, hot=None))
    assert max(shares(blind)) > 3 * 400 / 8
    run = replay(asked, policy, FleetSettings(replicas=8))
    assert max(shares(run, run.outcomes[100:])) <= 1.5 * 300 / 8
    assert hit_ratio(run.outcomes[100:]) >= 0.9


@pytest.mark.parametrize("policy", OURS)
def test_a_crowd_for_one_new_prompt_is_shared_and_computed_once_each(policy: Policy) -> None:
    """A07, B34: from 20 s on half of the traffic wants one prefix of 10,000 tokens."""
    plain = [
        prompt_at(at_s, (f"p{i}", 1_500), output_tokens=50)
        for i, at_s in enumerate(random_times(4, 20.0, 1_000))
    ]
    asked = flash_crowd(plain, BLOCK_TOKENS, from_s=20.0, prefix_tokens=10_000)
    run = replay(asked, policy, FleetSettings(replicas=8))
    crowd = of_tenant(run, CROWD)
    assert len(crowd) > 250
    assert max(shares(run, crowd)) <= 2 * len(crowd) / 8
    assert sum((one.cached_tokens or 0) < 5_000 for one in crowd) <= 8


def seen(told: HeatMap, name: str, now_s: float) -> Arrival:
    asked = prompt_at(now_s, (name, 2_048), (f"u{now_s}", 64))
    return told.observe(asked.chain, asked.prompt_tokens, NAMES, now_s, BLOCK_TOKENS)


def by_turns(told: HeatMap, until_s: float) -> dict[str, list[Arrival]]:
    """Let A and B take turns of 10 s, 8 requests a second."""
    found: dict[str, list[Arrival]] = {"A": [], "B": []}
    for index in range(int(until_s * 8)):
        name = "AB"[index // 80 % 2]
        found[name].append(seen(told, name, index / 8))
    return found


def spill(arrival: Arrival) -> Decision:
    """Return what becomes of a prompt whose holder is behind while another replica decodes."""
    asked = RoutingRequest(
        ordinal=1, seed=1, prompt_tokens=2_112, popularity=arrival.popularity, heat=arrival.heat
    )
    holder = ReplicaView(replica=NAMES[0], cached_tokens=2_048, backlog_ms=300.0, inflight=4)
    decision = ExpectedTtft().pick(asked, (holder, ReplicaView(replica=NAMES[1], inflight=4)))
    assert decision is not None
    return decision


def test_a_hotspot_is_copied_while_it_lasts_and_not_when_it_is_over() -> None:
    """A17: its requests of the last half minute count, and none of before."""
    told = HeatMap(HotSettings())
    hot = by_turns(told, 60.0)["A"][-1]
    assert (spill(hot).replica, spill(hot).reason) == (NAMES[1], Reason.SPILL)
    for tick in range(8 * 180):
        seen(told, "B", 60.0 + tick / 8)
    cold = seen(told, "A", 240.0)
    assert (spill(cold).replica, spill(cold).reason) == (NAMES[0], Reason.PREFIX)


def test_taking_turns_for_five_minutes_makes_neither_more_popular_than_three_did() -> None:
    """A17: no growth of the holder set, nor of the count that spreads copies."""
    found = by_turns(HeatMap(HotSettings()), 300.0)
    for arrivals in found.values():
        counts = [max(count for _, count in arrival.popularity) for arrival in arrivals]
        holders = [len(one.heat.holders) if one.heat is not None else 1 for one in arrivals]
        assert max(counts[960:]) <= 1.05 * max(counts[480:720])
        assert min(counts[960:]) < 0.9 * max(counts[960:]), "it cools down between its turns"
        assert max(holders[720:]) <= max(holders[:720])
