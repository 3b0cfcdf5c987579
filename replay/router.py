"""A router in virtual time: the real books, index, heat and policy on a clock that is told."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from policies.hot import NO_HEAT, HeatMap
from policies.model import RoutingRequest
from policies.prefill import PrefillCost
from policies.view import Facts, Warmth, view_of
from state.lease import LeaseBook, Outcome
from state.placement import Placements, tip_of, told_blocks
from state.prefix import cached_tokens
from state.speed import Speeds

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from policies.hot import Arrival
    from policies.model import Decision, Policy, ReplicaView
    from replay.setting import FleetSettings
    from replay.trace import TraceRequest
    from state.lease import Lease
    from state.model import BlockId, LeaseTotals, ReplicaId, ReplicaLoad
    from state.placement import Placement
    from state.residency import Residency

SETTLE_S: Final = 0.05
"""How often placements are compared with what engines told, as in the router's upkeep."""
TREE_TTL_S: Final = 1e9
PREFIX_KEYS: Final = 8


class Asked(NamedTuple):
    """A request on its way through the router, and what it showed when it came."""

    ordinal: int
    request: TraceRequest
    arrival: Arrival
    session: str | None


class Taken(NamedTuple):
    """What a routed request holds until it ends."""

    decision: Decision
    lease: Lease
    placement: Placement
    due_ms: float
    sent_s: float
    held_tokens: int


def cost_at_speed_one(settings: FleetSettings) -> PrefillCost:
    """Return what the router believes a prefill costs."""
    if settings.prefill is not None:
        return settings.prefill
    cost = settings.cost
    return PrefillCost(token_ms=cost.prefill_token_ms, attention_pair_ms=cost.attention_pair_ms)


class VirtualRouter:
    """One router of a fleet. ``residency`` is the shared view of caches, as late as events are."""

    def __init__(
        self,
        names: Sequence[ReplicaId],
        policy: Policy,
        settings: FleetSettings,
        block_tokens: int,
        residency: Residency,
    ) -> None:
        self._names = tuple(names)
        self._policy = policy
        self._settings = settings
        self._block_tokens = block_tokens
        self._residency = residency
        own = settings.prefill or getattr(policy, "prefill", None)
        self._cost: PrefillCost = own or cost_at_speed_one(settings)
        self._heat = HeatMap(settings.hot) if settings.hot is not None else None
        self._pending = Placements()
        self._tree = Placements(TREE_TTL_S, 2 * settings.capacity_tokens // block_tokens)
        self._uses_tree = getattr(policy, "uses_placements", False)
        self._settled_s = 0.0
        self._held: dict[ReplicaId, int] = dict.fromkeys(self._names, 0)
        self.leases = LeaseBook()
        self.speeds = Speeds()
        self.foreign: Mapping[ReplicaId, LeaseTotals] = {}
        self.loads: Mapping[ReplicaId, ReplicaLoad] = {}
        self.down: set[ReplicaId] = set()

    def arrive(self, index: int, request: TraceRequest, session: str | None, now_s: float) -> Asked:
        """Count an arrival."""
        heat = NO_HEAT
        if self._heat is not None and request.chain:
            heat = self._heat.observe(
                request.chain, request.prompt_tokens, self._names, now_s, self._block_tokens
            )
        return Asked(index, request, heat, session)

    def decide(self, asked: Asked, now_s: float) -> Decision | None:
        """Return the policy's decision on the view of now; nothing is taken."""
        if now_s - self._settled_s >= SETTLE_S:
            self._settled_s = now_s
            self._pending.settle(self._holds, now_s)
        request = asked.request
        routing = RoutingRequest(
            ordinal=asked.ordinal,
            seed=self._settings.seed,
            prompt_tokens=request.prompt_tokens,
            heat=asked.arrival.heat,
            popularity=asked.arrival.popularity,
            session=asked.session,
            prefix_keys=tuple([int.from_bytes(block[:8]) for block in request.chain[:PREFIX_KEYS]]),
            block_tokens=self._block_tokens,
        )
        return self._policy.pick(routing, self._views(request, now_s))

    def work_ms(self, request: TraceRequest, uncached_tokens: int) -> float:
        """Return what computing the uncached rest takes at speed 1."""
        return self._cost.ms(uncached_tokens, request.prompt_tokens - uncached_tokens)

    def take(self, asked: Asked, decision: Decision, now_s: float) -> Taken:
        """Take a lease on the chosen replica, and note the prompt as on its way there."""
        request, replica = asked.request, decision.replica
        warm = decision.predicted_cached_tokens + decision.predicted_lower_tier_tokens
        uncached = max(1, request.prompt_tokens - warm)
        work_ms = self.work_ms(request, uncached)
        ahead_ms = self.leases.load(replica, now_s, self.speeds.of(replica)).backlog_ms
        if replica in self.foreign:
            ahead_ms += self.foreign[replica].backlog_ms
        lease = self.leases.acquire(
            replica, uncached, now_s, prefill_ms=work_ms, tip=tip_of((request.chain,))
        )
        placement = self._pending.place(self._holder(replica), request.chain, now_s)
        if self._uses_tree:
            self._tree.place(replica, request.chain, now_s)
        held_tokens = request.prompt_tokens + request.output_tokens
        self._held[replica] += held_tokens
        return Taken(decision, lease, placement, ahead_ms + work_ms, now_s, held_tokens)

    def first_token(self, taken: Taken, now_s: float) -> None:
        """Note a first token."""
        taken.lease.first_byte(now_s)
        self._pending.await_news(taken.placement, now_s)
        observed_ms = 1e3 * (now_s - taken.sent_s)
        self.speeds.observe(taken.lease.replica, taken.due_ms, observed_ms)

    def end(self, taken: Taken, now_s: float) -> None:
        """Give back what the request held."""
        taken.lease.finish(Outcome.DONE, now_s)
        self._held[taken.lease.replica] -= taken.held_tokens

    def lose(self, taken: Taken) -> None:
        """Give back what a request held on a replica that failed."""
        if taken.lease.finish(Outcome.FAILED):
            self._pending.withdraw(taken.placement)
            self._held[taken.lease.replica] -= taken.held_tokens

    def forget(self, replica: ReplicaId) -> None:
        """Begin a new life of a replica."""
        self.leases.forget(replica)
        self._pending.forget(replica)
        self._tree.forget(replica)

    def _holder(self, replica: ReplicaId) -> ReplicaId:
        """Return under whose name the memory of ``replica`` is known."""
        return self._names[0] if self._settings.is_pooled else replica

    def _holds(self, replica: ReplicaId, block: BlockId) -> bool:
        overlap = self._residency.overlap((block,)).get(replica)
        return overlap is not None and overlap.gpu_blocks > 0

    def _views(self, request: TraceRequest, now_s: float) -> tuple[ReplicaView, ...]:
        chain, tokens, size = request.chain, request.prompt_tokens, self._block_tokens
        resident = self._residency.overlap(chain)
        pending = self._pending.overlap(chain, now_s)
        placed = self._tree.overlap(chain, now_s) if self._uses_tree else {}
        settings = self._settings
        holders = len(self._names) if settings.is_pooled else 1
        views = []
        for replica in self._names:
            if replica in self.down:
                continue
            holder = self._holder(replica)
            overlap = resident.get(holder)
            known = overlap.gpu_blocks if overlap is not None else 0
            most = max(known, pending.get(holder, 0))
            others = self.foreign.get(replica)
            if others is not None and others.tips:
                most = max(most, told_blocks(others.tips, chain))
            held = cached_tokens(most, size, tokens)
            reach = overlap.any_tier_blocks if overlap is not None else 0
            warmth = Warmth(
                held,
                held - cached_tokens(known, size, tokens) if most > known else 0,
                cached_tokens(reach, size, tokens) - held if reach > most else 0,
                cached_tokens(placed.get(replica, 0), size, tokens) if placed else 0,
            )
            speed = self.speeds.of(replica)
            facts = Facts(
                self.loads.get(replica),
                speed,
                self._held[replica],
                settings.capacity_tokens,
                settings.pull_token_ms is not None,
                self._residency.gpu_blocks(holder) * size // holders,
            )
            work = self.leases.load(replica, now_s, speed)
            views.append(view_of(replica, work, others, warmth, facts))
        return tuple(views)
