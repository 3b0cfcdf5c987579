"""The cache-aware policies of SGLang's gateway and of SMG: longest match unless loads differ.

Both start with a gate over the whole fleet. When the busiest replica has over ``balance_abs``
requests more than the idlest, and over ``balance_rel`` times as many, *every* request goes to the
shortest queue, also one whose holder is idle. Else the longest match wins, however busy its holder.

Rules and defaults: smg-project/smg, ``cache_aware``, defaults of its command line (its library has
0.5, 32 and 1.1). The two triggers on KV occupancy, off by default, are left out. The load is the
gateway's count of requests in flight, here over all routers. It breaks ties of the load by requests
processed and then by index; here a draw does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from msgspec import Meta, Struct

from policies.baselines.ballot import by_load, candidate_of, decided
from policies.baselines.signal import confirmed_tokens

if TYPE_CHECKING:
    from policies.model import Decision, ReplicaView, RoutingRequest

Part = Annotated[float, Meta(ge=0, le=1)]
Requests = Annotated[float, Meta(ge=0)]
Ratio = Annotated[float, Meta(ge=0)]


class SmgTree(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="smg_tree"
):
    """The radix tree over what this router sent where (HTTP replicas, no KV events).

    When the longest match is over ``cache_threshold`` of the prompt, its replica gets it; below
    that the least loaded one does. The tree does not know what engines evicted, and each
    router has its own. Which of several equal holders it names is arbitrary: drawn here.
    """

    uses_placements: ClassVar[bool] = True
    """Knows caches by the placements of this router alone."""

    cache_threshold: Part = 0.3
    balance_abs: Requests = 64
    balance_rel: Ratio = 1.5

    def pick(self, request: RoutingRequest, fleet: tuple[ReplicaView, ...]) -> Decision | None:
        """Return the decision; None when the fleet is empty."""
        if not fleet:
            return None
        loads = [view.inflight for view in fleet]
        held = {view.replica: float(view.placed_tokens) for view in fleet}
        enough = self.cache_threshold * request.prompt_tokens
        if max(held.values()) <= enough or _is_gated(loads, self.balance_abs, self.balance_rel):
            return decided(request, by_load(fleet, loads), held)
        candidates = tuple(
            candidate_of(view, {"match": -float(view.placed_tokens)}) for view in fleet
        )
        return decided(request, candidates, held)


class SmgEvent(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="smg_event"
):
    """The positional index over the engines' KV events (replicas on gRPC).

    The most confirmed tokens win, equals by the lower load (``load`` counts for less than a
    token), and where nobody holds any the least loaded. There is no threshold: one block decides.
    """

    balance_abs: Requests = 64
    balance_rel: Ratio = 1.5

    def pick(self, request: RoutingRequest, fleet: tuple[ReplicaView, ...]) -> Decision | None:
        """Return the decision; None when the fleet is empty."""
        if not fleet:
            return None
        loads = [view.inflight for view in fleet]
        held = {view.replica: float(confirmed_tokens(view)) for view in fleet}
        if not any(held.values()) or _is_gated(loads, self.balance_abs, self.balance_rel):
            return decided(request, by_load(fleet, loads), held)
        scale = 1.0 + max(loads)
        candidates = tuple(
            candidate_of(view, {"match": -held[view.replica], "load": view.inflight / scale})
            for view in fleet
        )
        return decided(request, candidates, held)


def _is_gated(loads: list[int], balance_abs: float, balance_rel: float) -> bool:
    """Return whether the loads differ so much that the whole fleet stops looking at prefixes."""
    most, least = max(loads), min(loads)
    return most - least > balance_abs and most > balance_rel * least
