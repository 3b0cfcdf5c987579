"""Small generated traces of prompts with named parts, and what a replay made of them."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING

from policies.expected_ttft import ExpectedTtft
from policies.model import Decision, Reason
from policies.weighted import Weighted
from replay.scenario import named_chain
from replay.simulate import simulate
from replay.trace import TraceRequest

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from policies.model import Policy, ReplicaView, RoutingRequest
    from replay.outcome import Outcome, ReplayRun
    from replay.setting import FleetSettings
    from state.model import BlockId

BLOCK_TOKENS = 64
OURS = (ExpectedTtft(), Weighted())
"""The default policy, and the one that weighs loads and tokens."""


class Polled:
    """The rule that some routers had: whoever reports the fewest requests, as last polled."""

    def pick(self, request: RoutingRequest, fleet: tuple[ReplicaView, ...]) -> Decision | None:
        """Return the first of those that report the least."""
        del request
        least = min(fleet, key=lambda view: (view.running or 0) + (view.waiting or 0))
        return Decision(
            replica=least.replica,
            reason=Reason.RULE,
            predicted_cached_tokens=least.cached_tokens,
            candidates=(),
        )


def prompt_at(
    at_s: float,
    *parts: tuple[str, int],
    output_tokens: int = 20,
    session: str = "",
    block_tokens: int = BLOCK_TOKENS,
) -> TraceRequest:
    """Return a prompt of (label, tokens) parts: equal leading parts share their full blocks.

    The last part of a session may grow from turn to turn.
    """
    chain: tuple[BlockId, ...] = ()
    tokens, path = 0, ""
    for label, part_tokens in parts:
        tokens, path = tokens + part_tokens, f"{path}/{label}"
        chain += named_chain(path, tokens // block_tokens - len(chain))
    return TraceRequest(
        arrival_s=at_s,
        prompt_tokens=tokens,
        output_tokens=output_tokens,
        chain=chain,
        session=session,
    )


def random_times(seed: int, per_s: float, count: int) -> list[float]:
    """Return times of arrivals that know nothing of each other."""
    draw = random.Random(seed)
    now_s, times_s = 0.0, []
    for _ in range(count):
        now_s += draw.expovariate(per_s)
        times_s.append(now_s)
    return times_s


def replay(
    requests: Iterable[TraceRequest],
    policy: Policy,
    settings: FleetSettings,
    block_tokens: int = BLOCK_TOKENS,
) -> ReplayRun:
    """Return what a fleet in virtual time made of the requests; all of them were answered."""
    run = simulate(requests, block_tokens, policy, settings)
    assert all(outcome.error is None for outcome in run.outcomes)
    return run


def shares(run: ReplayRun, outcomes: Sequence[Outcome] | None = None) -> list[int]:
    """Return how many requests each replica got, in fleet order."""
    got = Counter(one.replica for one in (run.outcomes if outcomes is None else outcomes))
    return [got[replica] for replica in run.replicas]


def hit_ratio(outcomes: Sequence[Outcome]) -> float:
    """Return the part of the prompt tokens that was cached."""
    cached = sum(one.cached_tokens or 0 for one in outcomes)
    return cached / sum(one.prompt_tokens for one in outcomes)


def switches(outcomes: Iterable[Outcome]) -> int:
    """Return how often a session's next turn went to another replica than its last."""
    places: dict[str, list[str]] = {}
    for one in outcomes:
        places.setdefault(one.session, []).append(one.replica)
    return sum(a != b for turns in places.values() for a, b in pairwise(turns))
