"""A block that every prompt begins with, as in the Mooncake conversation trace, fools nobody.

Sessions fork right behind it, so it is by far the most popular prefix, and says nothing.
"""

from __future__ import annotations

import random
from functools import cache
from typing import TYPE_CHECKING, Final

import pytest
from msgspec import structs

from policies.baselines.aibrix import AIBrix
from policies.baselines.bounded_hash import BoundedHash
from policies.baselines.dynamo import Dynamo
from policies.baselines.kthena import Kthena
from policies.baselines.llm_d import LlmD, LlmDPrecise
from policies.baselines.loadaware import LoadAware
from policies.baselines.mooncake import Mooncake
from policies.baselines.preble import Preble
from policies.baselines.smg import SmgEvent, SmgTree
from policies.hot import HeatMap, HotSettings
from policies.model import Reason, ReplicaView, RoutingRequest
from replay.score import score_run
from replay.setting import FleetSettings
from replay.sharing import Sharing
from state.model import ReplicaId
from support.field_trace import OURS, hit_ratio, prompt_at, replay, switches

if TYPE_CHECKING:
    from policies.model import Decision, Heat, Policy
    from policies.union import AnyPolicy
    from replay.outcome import ReplayRun
    from replay.trace import TraceRequest

BLOCK: Final = 512
REPLICAS: Final = 8
EIGHT: Final = FleetSettings(replicas=REPLICAS)
NAMES: Final = [ReplicaId(f"r{place:02d}") for place in range(REPLICAS)]
QUIET_PER_S: Final = 4.0
BUSY_PER_S: Final = 16.0
"""Work enough in the common block alone to be hot: 8,192 tokens/s."""


@cache
def sessions_behind(common: str, requests_per_s: float) -> tuple[TraceRequest, ...]:
    """Sessions of 5 turns that grow; with ``common`` "" each has a first block of its own."""
    draw = random.Random(1)
    sessions = 160 if requests_per_s == QUIET_PER_S else 320
    asked = []
    for number in range(sessions):
        first = (common or f"own{number}", BLOCK)
        at_s = draw.random() * 5 * sessions / requests_per_s
        tokens = 2_000 + draw.randrange(4_000)
        for _ in range(5):
            turn = prompt_at(
                at_s,
                first,
                (f"s{number}", tokens),
                output_tokens=draw.randrange(50, 200),
                session=f"s{number}",
                block_tokens=BLOCK,
            )
            asked.append(turn)
            tokens += draw.randrange(500, 2_500)
            at_s += 4.0 + draw.expovariate(1 / 8)
    return tuple(sorted(asked, key=lambda request: request.arrival_s))


@cache
def served(policy: AnyPolicy, requests_per_s: float, common: str = "common") -> ReplayRun:
    return replay(sessions_behind(common, requests_per_s), policy, EIGHT, BLOCK)


def imbalance(run: ReplayRun) -> float:
    found = score_run(run).imbalance_prefill
    assert found is not None
    return found


def best_of_sessions_at_home(requests_per_s: float) -> float:
    """Return the hit ratio where every session has one replica: only the common block is copied."""
    asked = sessions_behind("common", requests_per_s)
    copies = (REPLICAS - 1) * BLOCK / sum(request.prompt_tokens for request in asked)
    return Sharing(asked).possible_hit_ratio(asked, BLOCK) - copies


@pytest.mark.parametrize("requests_per_s", [QUIET_PER_S, BUSY_PER_S])
@pytest.mark.parametrize("policy", OURS)
def test_sessions_behind_it_spread_and_stay_where_they_are(
    policy: AnyPolicy, requests_per_s: float
) -> None:
    """Prefill is even, and hits are what one replica per session allows."""
    run = served(policy, requests_per_s)
    assert imbalance(run) < 1.15
    assert hit_ratio(run.outcomes) > 0.97 * best_of_sessions_at_home(requests_per_s)
    assert switches(run.outcomes) < 0.06 * len(run.outcomes)


@pytest.mark.parametrize("requests_per_s", [QUIET_PER_S, BUSY_PER_S])
def test_the_default_policy_moves_hardly_a_session(requests_per_s: float) -> None:
    """It weighs the common block by the time it takes, which is little."""
    run = served(OURS[0], requests_per_s)
    assert hit_ratio(run.outcomes) > 0.985 * best_of_sessions_at_home(requests_per_s)
    assert switches(run.outcomes) < 0.02 * len(run.outcomes)


@pytest.mark.parametrize("requests_per_s", [QUIET_PER_S, BUSY_PER_S])
@pytest.mark.parametrize("policy", OURS)
def test_without_it_nothing_is_placed_better(policy: AnyPolicy, requests_per_s: float) -> None:
    """The same sessions, each with a first block of its own."""
    with_it, without = (served(policy, requests_per_s, common) for common in ("common", ""))
    assert imbalance(with_it) < 1.15 * imbalance(without)
    tokens = sum(one.prompt_tokens for one in with_it.outcomes)
    first_turns = len({one.session for one in with_it.outcomes})
    shared = (first_turns - REPLICAS) * BLOCK / tokens
    assert hit_ratio(with_it.outcomes) > hit_ratio(without.outcomes) + 0.5 * shared


def test_a_rule_that_goes_by_the_first_block_is_fooled() -> None:
    """What the limits above would catch."""
    run = served(BoundedHash(prefix_blocks=1), QUIET_PER_S)
    assert imbalance(run) > 1.5
    assert hit_ratio(run.outcomes) < 0.5 * best_of_sessions_at_home(QUIET_PER_S)


@pytest.mark.parametrize("requests_per_s", [QUIET_PER_S, BUSY_PER_S])
@pytest.mark.parametrize("policy", OURS)
def test_it_is_no_reason_once_everybody_holds_it(policy: AnyPolicy, requests_per_s: float) -> None:
    """A new session goes by load, and its reason says so."""
    run = served(policy, requests_per_s)
    first_uses: dict[str, float] = {}
    for one in run.outcomes:
        first_uses.setdefault(one.replica, one.arrival_s + (one.ttft_s or 0.0))
    assert len(first_uses) == REPLICAS
    new = [
        one
        for one in run.outcomes
        if one.arrival_s > max(first_uses.values()) and (one.predicted_cached_tokens or 0) <= BLOCK
    ]
    assert len(new) > 100
    reasons = [one.reason for one in new]
    assert Reason.PREFIX not in reasons
    assert reasons.count(Reason.LOAD) > 0.75 * len(new), "the others left their session's replica"


def heats(requests_per_s: float) -> list[Heat | None]:
    told = HeatMap(HotSettings())
    return [
        told.observe(one.chain, one.prompt_tokens, NAMES, one.arrival_s, BLOCK).heat
        for one in sessions_behind("common", requests_per_s)
    ]


def test_in_quiet_traffic_nothing_is_hot() -> None:
    """A popular block that costs little needs nobody to hold it on purpose."""
    assert not any(heats(QUIET_PER_S))


def test_where_it_is_hot_everybody_holds_it_and_no_session_is_a_unit() -> None:
    """Whoever brings all of the traffic gets all of the fleet."""
    found = [heat for heat in heats(BUSY_PER_S) if heat is not None]
    assert len(found) > 1_000
    assert {heat.prefix_tokens for heat in found} == {BLOCK}
    assert {heat.holders for heat in found} == {frozenset(NAMES)}


class Witness:
    """Asks a policy twice, with and without the heat, and counts what it changed."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.hot = 0
        self.bent = 0

    def pick(self, request: RoutingRequest, fleet: tuple[ReplicaView, ...]) -> Decision | None:
        decision = self._policy.pick(request, fleet)
        if request.heat is not None and all(view.cached_tokens >= BLOCK for view in fleet):
            self.hot += 1
            cool = self._policy.pick(structs.replace(request, heat=None), fleet)
            self.bent += decision != cool
        return decision


@pytest.mark.parametrize("policy", OURS)
def test_its_heat_changes_no_decision_where_everybody_holds_it(policy: Policy) -> None:
    """Not even by a rounding error."""
    witness = Witness(policy)
    replay(sessions_behind("common", BUSY_PER_S), witness, EIGHT, BLOCK)
    assert witness.hot > 1_000
    assert witness.bent == 0


BASELINES: Final[tuple[AnyPolicy, ...]] = (
    AIBrix(),
    Dynamo(),
    Kthena(),
    LlmD(),
    LlmDPrecise(),
    LoadAware(),
    Mooncake(),
    Preble(),
    SmgEvent(),
    SmgTree(),
)


@pytest.mark.parametrize("policy", [*OURS, *BASELINES])
def test_what_everybody_holds_is_nobodys_reason(policy: AnyPolicy) -> None:
    """A reason means the same whatever the policy, or runs could not be compared."""
    fleet = tuple(
        ReplicaView(replica=name, cached_tokens=BLOCK, placed_tokens=BLOCK) for name in NAMES
    )
    asked = RoutingRequest(ordinal=1, seed=1, prompt_tokens=6_000, block_tokens=BLOCK)
    decision = policy.pick(asked, fleet)
    assert decision is not None
    assert decision.reason is Reason.LOAD
    assert decision.predicted_cached_tokens == BLOCK
