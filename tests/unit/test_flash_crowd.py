"""A crowd that comes at once for one new prompt of 30,000 tokens, with half of all requests."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from policies.baselines.mooncake import Mooncake
from policies.expected_ttft import ExpectedTtft
from policies.hold import HoldSettings
from policies.model import Reason
from policies.weighted import Weighted
from replay.router import cost_at_speed_one
from replay.scenario import CROWD, flash_crowd, of_tenant, worst_crowding
from replay.setting import FleetSettings
from support.field_trace import BLOCK_TOKENS, prompt_at, random_times, replay

if TYPE_CHECKING:
    from collections.abc import Sequence

    from policies.model import Decision, Policy, ReplicaView, RoutingRequest
    from replay.outcome import Outcome, ReplayRun
    from replay.trace import TraceRequest

BEGIN_S = 8.0
END_S = 32.0
DIRECT = FleetSettings(hold=HoldSettings(enabled=False))
COST = cost_at_speed_one(DIRECT)
OURS = ExpectedTtft(prefill=COST)
COLD_S = COST.ms(30_200, 0) / 1e3
"""What computing the crowd's prompt takes an idle replica."""


class Recorder:
    """A policy that keeps what it was asked, shown and chose."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.log: list[tuple[RoutingRequest, tuple[ReplicaView, ...], Decision]] = []

    def pick(self, request: RoutingRequest, fleet: tuple[ReplicaView, ...]) -> Decision | None:
        decision = self._policy.pick(request, fleet)
        assert decision is not None
        self.log.append((request, fleet, decision))
        return decision


def plain(per_s: float = 30.0) -> list[TraceRequest]:
    """Return sessions of a few turns, most prompts short and some long."""
    draw = random.Random(5)
    asked = []
    for at_s in random_times(6, per_s, round(per_s * END_S)):
        session = f"s{draw.randrange(round(8 * per_s))}"
        tokens = min(8_000, round(draw.lognormvariate(6.8, 0.9)) + 100)
        parts = ((session, 512), (f"{at_s}", tokens))
        asked.append(prompt_at(at_s, *parts, output_tokens=draw.randint(50, 250)))
    return asked


def crowded(prefix_tokens: int = 30_000) -> list[TraceRequest]:
    return flash_crowd(plain(), BLOCK_TOKENS, from_s=BEGIN_S, prefix_tokens=prefix_tokens)


def times(outcomes: Sequence[Outcome]) -> list[float]:
    return sorted(one.ttft_s for one in outcomes if one.ttft_s is not None)


def mean(outcomes: Sequence[Outcome]) -> float:
    found = times(outcomes)
    return sum(found) / len(found)


def p99(outcomes: Sequence[Outcome]) -> float:
    found = times(outcomes)
    return found[int(0.99 * len(found))]


def others(run: ReplayRun) -> list[Outcome]:
    return [one for one in of_tenant(run, CROWD, is_other=True) if one.arrival_s >= BEGIN_S]


def crowd(run: ReplayRun, after_s: float = 0.0) -> list[Outcome]:
    return [one for one in of_tenant(run, CROWD) if one.arrival_s >= BEGIN_S + after_s]


def copies(run: ReplayRun) -> list[Outcome]:
    """Return those of the crowd whose prompt was computed."""
    return [one for one in of_tenant(run, CROWD) if (one.cached_tokens or 0) < 15_000]


def crowding(run: ReplayRun, after_s: float) -> float:
    """Return the worst ratio to the mean in flight, looked at each half second from then on."""
    first_s = BEGIN_S + after_s
    return worst_crowding(run, [first_s + tick / 2 for tick in range(round(2 * (END_S - first_s)))])


@pytest.fixture(scope="module")
def ours() -> ReplayRun:
    return replay(crowded(), OURS, DIRECT)


@pytest.fixture(scope="module")
def weighted() -> ReplayRun:
    return replay(crowded(), Weighted(), DIRECT)


@pytest.fixture(scope="module")
def pooled() -> ReplayRun:
    """Return the bound: one memory for all, where even what is being computed is shared."""
    return replay(crowded(), OURS, FleetSettings(hold=DIRECT.hold, is_pooled=True))


def test_a_few_replicas_compute_the_prompt_and_all_of_them_begin_at_once(ours: ReplayRun) -> None:
    begun_s = [one.arrival_s - BEGIN_S for one in copies(ours)]
    assert 3 <= len(begun_s) <= 6, "half of the traffic is too much for one, and not worth eight"
    assert max(begun_s) < 3.0


def test_nobody_has_much_more_than_its_share_although_the_first_holder_begins_alone(
    ours: ReplayRun,
) -> None:
    """It got the first dozen, and they wait there for its computation to end."""
    assert crowding(ours, 3.0) <= 1.7
    assert crowding(ours, 6.0) <= 1.5
    eager = replay(crowded(), Mooncake(prefill=COST), DIRECT)
    assert crowding(eager, 6.0) > 2.0


def test_the_others_hardly_notice(ours: ReplayRun, weighted: ReplayRun) -> None:
    calm = [one for one in replay(plain(), OURS, DIRECT).outcomes if one.arrival_s >= BEGIN_S]
    assert mean(others(ours)) < 2 * mean(calm)
    assert mean(others(ours)) < 0.5 * mean(others(weighted))
    assert p99(others(ours)) < 0.5 * p99(others(weighted))


def test_nobody_of_the_crowd_waits_much_longer_than_one_computation_takes(
    ours: ReplayRun, weighted: ReplayRun
) -> None:
    """The first have to wait for it wherever they go; p99 is theirs."""
    assert p99(crowd(ours)) <= 1.2 * COLD_S
    assert mean(crowd(ours)) < 0.9 * mean(crowd(weighted))


def test_once_it_is_computed_the_crowd_is_served_as_by_one_endless_cache(
    ours: ReplayRun, pooled: ReplayRun
) -> None:
    assert p99(crowd(ours, 8.0)) <= 1.5 * p99(crowd(pooled, 8.0))
    assert mean(crowd(ours, 8.0)) <= 1.5 * mean(crowd(pooled, 8.0))


def test_the_routers_queue_changes_none_of_this(weighted: ReplayRun, pooled: ReplayRun) -> None:
    queued = replay(crowded(), OURS, FleetSettings(hold=HoldSettings(enabled=True)))
    assert crowding(queued, 6.0) <= 1.5
    assert len(copies(queued)) <= 6
    assert mean(others(queued)) < 0.5 * mean(others(weighted))
    assert p99(crowd(queued)) <= 1.2 * COLD_S
    assert p99(crowd(queued, 8.0)) <= 1.5 * p99(crowd(pooled, 8.0))


def test_every_spill_says_so_and_shows_what_it_was_better_than() -> None:
    recorder = Recorder(OURS)
    run = replay(crowded(), recorder, DIRECT)
    spills = 0
    for outcome, (_, fleet, decision) in zip(run.outcomes, recorder.log, strict=True):
        assert outcome.reason == decision.reason.value
        held = {view.replica: view.cached_tokens for view in fleet}
        is_spill = held[decision.replica] < max(held.values())
        assert is_spill == (decision.reason is Reason.SPILL)
        if not is_spill:
            continue
        spills += 1
        scored = {one.replica: one for one in decision.candidates}
        chosen = scored[decision.replica]
        for one in decision.candidates:
            assert one.score == pytest.approx(sum(one.terms.values()))
            if one.cached_tokens > chosen.cached_tokens:
                assert chosen.score <= one.score + OURS.margin_ms
    assert spills >= 3


def test_a_crowd_for_a_short_prompt_finds_it_everywhere() -> None:
    run = replay(crowded(prefix_tokens=3_000), OURS, DIRECT)
    assert len({one.replica for one in crowd(run)}) == 8
    assert crowding(run, 3.0) <= 1.5


def test_eight_routers_which_do_not_see_what_the_others_began_keep_the_others_safe(
    weighted: ReplayRun,
) -> None:
    run = replay(crowded(), OURS, FleetSettings(hold=DIRECT.hold, routers=8))
    assert len({one.replica for one in copies(run)}) <= 6
    assert mean(others(run)) < 0.5 * mean(others(weighted))
