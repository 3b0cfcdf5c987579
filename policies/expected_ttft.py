"""Expected time to first token: what each replica would cost, in ms of somebody's waiting.

    score = wait + X' + (w_active * n + w_prefilling * q + w_share * (rho / rho_mean - 1)) * X'
          + w_copy * n * f * A / (1 + k) + active_ms * n

``wait``   until the prompt's own prefill begins: the prefill ahead of it, at the replica's speed
``X``      its own prefill there: what the replica does not hold, with attention over the context;
           what only a lower tier holds is fetched or computed, whichever is less
``A``      the part of X that the best-matching replica would not need
``k``      how many more than two requests shared that part within the last half minute; of a hot
           prefix, by its rate, and over m^2 for its m copies: one more takes 1 / m^2 off each
``X'``     X - A * k / (1 + k): a second copy of what many will ask for again is no waste
``n``      requests that are active there: prefill stalls every stream that decodes beside it
``q``      requests without a first byte, the mean of the fleet: where there are many, whatever is
           computed makes others wait, and the least work is worth more than the shortest wait
``f``      how full its cache is: next to 0 up to one half, 1 at its end. What is copied into a full
           one drives out what others come back for
``rho``    decayed prefill work sent there, against the fleet's mean: long-run load stays apart even
           while nothing is queued

A new prefix that half of the traffic brings at once is worth a few copies, at once, and not one on
every replica: each stalls its replica for the whole of X. Copies still under way are counted, parts
as parts; the rate says how many will come while few have. Where a copy takes t < 1 s, m^2t counts:
short prefixes may be everywhere.

With ``inflight_bound`` a replica that has more than its part of the requests in flight costs 1e9 ms
more: a hard bound for fleets whose costs are not calibrated.

Where replicas can fetch pages from each other, X is at most pulling what the best match holds and
computing the rest. Unknown is unknown: an engine that reports no queue counts as the mean.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Final

from msgspec import Meta, Struct, structs

from policies.draw import draw_below
from policies.hot import POPULAR_S
from policies.load import assumed_queues, mean_of
from policies.model import Candidate, Decision, Reason
from policies.prefill import PrefillCost

if TYPE_CHECKING:
    from policies.model import Heat, ReplicaView, RoutingRequest
    from state.model import ReplicaId

PREFIX: Final = Reason.PREFIX
SPILL: Final = Reason.SPILL
LOAD: Final = Reason.LOAD
"""By names of their own: an enumeration's members are slow to reach."""
LONG_MS: Final = 1e3
"""A prefix that is computed in less is copied more freely."""
COMMON: Final = 2.0
"""So many requests for a prefix in half a minute are no sign of popularity."""

LEAST_FULL: Final = 0.05
"""So full counts a cache that has room: a copy takes its time in any case."""
ASSUMED_FULL: Final = 0.4
"""So full counts a cache of which nobody knows."""
HOT_FULL: Final = 0.4
"""So full counts a cache at least to which a hot prefix is copied: a crowd waits meanwhile."""

FULL_MS: Final = 1e9
"""What a replica beyond ``inflight_bound`` costs more than any other."""

Weight = Annotated[float, Meta(ge=0, le=100)]
Milliseconds = Annotated[float, Meta(ge=0, le=1e6)]


class ExpectedTtft(
    Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="kind",
    tag="expected_ttft",
):
    """Least expected time to first token, counting what the choice costs others.

    ``kv_wait``: count the time until enough KV memory is free. ``fetch_token_ms`` is what a token
    costs from the replica's own host memory or disk, ``pull_token_ms`` from another replica (None:
    choices do not count on that). Scores within ``margin_ms`` are equal: the fewest active requests
    decide, then a draw. ``inflight_bound``: a replica takes no request with which it had over so
    many times the fleet's mean in flight, and one, whatever it holds; None: costs alone decide.
    """

    prefill: PrefillCost = PrefillCost()
    w_active: Weight = 0.02
    w_prefilling: Weight = 0.3
    w_share: Weight = 0.4
    w_copy: Weight = 0.5
    active_ms: Milliseconds = 16.0
    kv_wait: bool = False
    fetch_token_ms: Milliseconds = 0.0375
    pull_token_ms: Milliseconds | None = None
    margin_ms: Milliseconds = 1.0
    inflight_bound: Annotated[float, Meta(ge=1, le=100)] | None = None

    def pick(self, request: RoutingRequest, fleet: tuple[ReplicaView, ...]) -> Decision | None:
        """Return the decision; None when the fleet is empty."""
        if not fleet:
            return None
        most_tokens = max([view.cached_tokens for view in fleet])
        source = _source(fleet) if self.pull_token_ms is not None else None
        candidates = self._candidates(request, fleet, most_tokens, source)
        if self.inflight_bound is not None:
            candidates = _bounded(candidates, fleet, self.inflight_bound)
        return self._decided(request, fleet, candidates, most_tokens, source)

    def _candidates(
        self,
        request: RoutingRequest,
        fleet: tuple[ReplicaView, ...],
        most_tokens: int,
        source: ReplicaView | None,
    ) -> tuple[Candidate, ...]:
        """Return every replica with what it would cost."""
        heat = _covering_heat(request, most_tokens)
        repeats = self._repeats(request, fleet, most_tokens, heat)
        loads = [view.prefill_load / view.speed for view in fleet]
        mean_load = mean_of(loads)
        crowd = self.w_prefilling * mean_of([view.prefilling for view in fleet])
        least_full = LEAST_FULL if heat is None else HOT_FULL
        tokens, cost_ms = request.prompt_tokens, self.prefill.ms
        best_ms = cost_ms(max(1, tokens - most_tokens), most_tokens)
        alone = {most_tokens: best_ms}
        candidates = []
        for view, load, others_ms in zip(
            fleet, loads, self._queued_ms(request, fleet), strict=True
        ):
            held, speed, n = view.cached_tokens, view.speed, view.inflight
            alone_ms = alone.get(held)
            if alone_ms is None:  # those that hold as much share it
                alone_ms = alone[held] = cost_ms(max(1, tokens - held), held)
            own_ms = alone_ms / speed
            if view.lower_tier_tokens:
                own_ms = min(own_ms, self._fetch_ms(tokens, view))
            copy_ms = 0.0
            if held < most_tokens:
                if source is not None and view.can_fetch:
                    own_ms = min(own_ms, self._pull_ms(request, view, source))
                avoidable_ms = max(0.0, own_ms - best_ms / speed)
                own_ms -= avoidable_ms * repeats / (1 + repeats)
                full = max(least_full, _fullness(view))
                copy_ms = self.w_copy * n * full * avoidable_ms / (1 + repeats)
            wait_ms = (view.backlog_ms + others_ms) / speed
            if self.kv_wait:
                wait_ms = max(wait_ms, _kv_wait_ms(request, view))
            share = load / mean_load - 1 if mean_load > 0 else 0.0
            stall_ms = (self.w_active * n + crowd + self.w_share * share) * own_ms
            active_ms = self.active_ms * n
            candidates.append(
                Candidate(
                    view.replica,
                    wait_ms + own_ms + stall_ms + copy_ms + active_ms,
                    {
                        "wait": wait_ms,
                        "prefill": own_ms,
                        "stall": stall_ms,
                        "copy": copy_ms,
                        "active": active_ms,
                    },
                    held,
                    view.lower_tier_tokens,
                )
            )
        return tuple(candidates)

    def _decided(
        self,
        request: RoutingRequest,
        fleet: tuple[ReplicaView, ...],
        candidates: tuple[Candidate, ...],
        most_tokens: int,
        source: ReplicaView | None,
    ) -> Decision:
        index = self._winner(request, fleet, candidates)
        winner, view = candidates[index], fleet[index]
        reach = [one.cached_tokens + one.lower_tier_tokens for one in fleet]
        most_reach = max(reach)
        if reach[index] < most_reach:
            reason = SPILL
        elif most_reach == min(reach) and min([v.cached_tokens for v in fleet]) == most_tokens:
            reason = LOAD
        else:
            reason = PREFIX
        pulled: ReplicaId | None = None
        if source is not None and view.can_fetch and self._pulls(request, view, source):
            pulled = source.replica
        return Decision(
            winner.replica,
            reason,
            winner.cached_tokens,
            candidates,
            winner.lower_tier_tokens,
            winner.terms["wait"],
            pulled,
        )

    def _winner(
        self,
        request: RoutingRequest,
        fleet: tuple[ReplicaView, ...],
        candidates: tuple[Candidate, ...],
    ) -> int:
        limit = min([candidate.score for candidate in candidates]) + self.margin_ms
        near = [i for i, candidate in enumerate(candidates) if candidate.score <= limit]
        if len(near) == 1:
            return near[0]
        fewest = min([fleet[i].inflight for i in near])
        near = [i for i in near if fleet[i].inflight == fewest]
        near.sort(key=lambda i: fleet[i].replica)
        return near[draw_below(len(near), request)] if len(near) > 1 else near[0]

    def _repeats(
        self,
        request: RoutingRequest,
        fleet: tuple[ReplicaView, ...],
        most_tokens: int,
        heat: Heat | None,
    ) -> float:
        """Return how many more than a few requests another copy of the best match would serve.

        ``heat`` is that of the prompt, where nobody holds more than its hot prefix.
        """
        if heat is not None:
            parts = [min(view.cached_tokens, heat.prefix_tokens) for view in fleet]
            copies = max(1.0, sum(parts) / heat.prefix_tokens)
            length = min(1.0, self.prefill.ms(heat.prefix_tokens, 0) / LONG_MS)
            return max(0.0, POPULAR_S * heat.rate_per_s - COMMON) / math.pow(copies, 2 * length)
        return _shared_by_more(request, most_tokens)

    def _fetch_ms(self, tokens: int, view: ReplicaView) -> float:
        """Return the time to fetch what lower tiers hold, and to compute the rest."""
        reach = view.cached_tokens + view.lower_tier_tokens
        fetched_ms = self.fetch_token_ms * view.lower_tier_tokens
        return fetched_ms + self.prefill.ms(max(1, tokens - reach), reach) / view.speed

    def _pull_ms(self, request: RoutingRequest, view: ReplicaView, source: ReplicaView) -> float:
        """Return the time to pull what ``source`` holds more, and to compute the rest."""
        reach = source.cached_tokens - source.pending_tokens
        pulled_tokens = reach - view.cached_tokens
        if pulled_tokens <= 0 or self.pull_token_ms is None or view.replica == source.replica:
            return float("inf")
        rest_ms = self.prefill.ms(max(1, request.prompt_tokens - reach), reach) / view.speed
        return self.pull_token_ms * pulled_tokens + rest_ms

    def _pulls(self, request: RoutingRequest, view: ReplicaView, source: ReplicaView) -> bool:
        held = view.cached_tokens
        alone_ms = self.prefill.ms(max(1, request.prompt_tokens - held), held) / view.speed
        return self._pull_ms(request, view, source) < alone_ms

    def _queued_ms(self, request: RoutingRequest, fleet: tuple[ReplicaView, ...]) -> list[float]:
        """Return the prefill that waits on engines beyond what leases explain: a guess per head."""
        queues = assumed_queues(fleet)
        if not any(queues):
            return queues
        known = sum([view.prefilling for view in fleet])
        each_ms = (
            sum([view.backlog_ms for view in fleet]) / known
            if known
            else 0.5 * self.prefill.ms(request.prompt_tokens, 0)
        )
        return [queue * each_ms for queue in queues]


def _bounded(
    candidates: tuple[Candidate, ...], fleet: tuple[ReplicaView, ...], bound: float
) -> tuple[Candidate, ...]:
    """Return the candidates with what puts those last that have no room; one always has some."""
    room = bound * (sum([view.inflight for view in fleet]) + 1) / len(fleet) + 1
    found = []
    for one, view in zip(candidates, fleet, strict=True):
        full_ms = FULL_MS if view.inflight + 1 > room else 0.0
        terms = {**one.terms, "full": full_ms}
        found.append(structs.replace(one, score=one.score + full_ms, terms=terms))
    return tuple(found)


def _covering_heat(request: RoutingRequest, most_tokens: int) -> Heat | None:
    """Return the hot prefix of the prompt, if nobody holds more of the prompt than that."""
    heat = request.heat
    return heat if heat is not None and heat.prefix_tokens >= most_tokens > 0 else None


def _shared_by_more(request: RoutingRequest, most_tokens: int) -> float:
    """Return how many more than a few requests shared the longest prefix that anybody holds."""
    if most_tokens == 0:
        return 0.0
    shared = 0.0
    for prefix_tokens, arrivals in request.popularity:
        shared = arrivals
        if prefix_tokens >= most_tokens:
            break
    return max(0.0, shared - COMMON)


def _fullness(view: ReplicaView) -> float:
    """Return how full a cache is beyond one half, 0 to 1."""
    if view.resident_tokens is None or not view.capacity_tokens:
        return ASSUMED_FULL
    return min(1.0, max(0.0, 2.0 * view.resident_tokens / view.capacity_tokens - 1.0))


def _source(fleet: tuple[ReplicaView, ...]) -> ReplicaView | None:
    """Return who can give most of the prompt: what is still being computed cannot be fetched."""
    able = [view for view in fleet if view.can_fetch]
    if not able:
        return None
    return max(able, key=lambda v: (v.cached_tokens - v.pending_tokens, -v.inflight))


def _kv_wait_ms(request: RoutingRequest, view: ReplicaView) -> float:
    """Return the time until the requests that end in the mean leave room for the prompt."""
    if view.capacity_tokens is None or not view.hold_s or not view.held_tokens:
        return 0.0
    wanted = view.held_tokens + request.prompt_tokens - view.cached_tokens - view.capacity_tokens
    return max(0.0, 1e3 * wanted * view.hold_s / view.held_tokens)
