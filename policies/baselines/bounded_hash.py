"""Bounded-load consistent hash: a prefix goes to its place on a ring, or on from there if full."""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, ClassVar, Final

import xxhash
from msgspec import Meta, Struct

from policies.baselines.ballot import candidate_of, decided
from policies.baselines.prefix_name import prefix_name
from policies.draw import draw_below

if TYPE_CHECKING:
    from policies.model import Decision, ReplicaView, RoutingRequest
    from state.model import ReplicaId

_HASHES: Final = 2**64
_PLACE: Final = 1
_FLEETS: Final = 64
"""Rings kept; a fleet is whoever may be chosen, so models and tenants have their own."""


class BoundedHash(
    Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="kind",
    tag="bounded_hash",
):
    """KubeAI's ``PrefixHash`` (CHWBL): its load factor, xxh64 ring and points per replica.

    ``walk`` counts the replicas before this one on the ring, from the prompt's place on. A replica
    is full when ``inflight + 1 > load_factor * (all inflight + 1) / replicas``, which only an idle
    fleet escapes, and has ``full`` = fleet size added: where all are full, the first one takes it.
    That is so until the fleet has about ``1 / (load_factor - 1)`` requests per replica in flight,
    and with one prefix in a large fleet the walks are long and end on the first one all the same.

    KubeAI hashes the adapter and 100 characters of the first user message, the system prompt left
    out. Tokens do not say where that starts: here it is the prompt's first ``prefix_blocks``
    blocks, which have to reach beyond what all prompts share. A prompt shorter than a block has
    any place. KubeAI counts its own requests only, here the leases of all routers count.
    """

    hashes_prefix: ClassVar[bool] = True
    """Places by the ids of the first blocks."""

    load_factor: Annotated[float, Meta(ge=1)] = 1.25
    points: Annotated[int, Meta(ge=1, le=4_096)] = 256
    prefix_blocks: Annotated[int, Meta(ge=1)] = 4

    def pick(self, request: RoutingRequest, fleet: tuple[ReplicaView, ...]) -> Decision | None:
        """Return the decision; None when the fleet is empty."""
        if not fleet:
            return None
        walk = self._walk(request, fleet)
        total = sum(view.inflight for view in fleet)
        room = self.load_factor * (total + 1) / len(fleet)
        candidates = tuple(
            candidate_of(
                view,
                {
                    "walk": float(walk[view.replica]),
                    "full": float(len(fleet)) if total and view.inflight + 1 > room else 0.0,
                },
            )
            for view in fleet
        )
        return decided(request, candidates)

    def _walk(
        self, request: RoutingRequest, fleet: tuple[ReplicaView, ...]
    ) -> dict[ReplicaId, int]:
        """Return how many other replicas come before each, from the prompt's place on."""
        hashes, owners = _ring(tuple(sorted(view.replica for view in fleet)), self.points)
        name = prefix_name(request, self.prefix_blocks)
        if name is None:
            place = draw_below(_HASHES, request, _PLACE)
        else:
            place = xxhash.xxh64_intdigest(name)
        point = bisect_left(hashes, place)
        walk: dict[ReplicaId, int] = {}
        while len(walk) < len(fleet):
            walk.setdefault(owners[point % len(owners)], len(walk))
            point += 1
        return walk


@lru_cache(maxsize=_FLEETS)
def _ring(
    names: tuple[ReplicaId, ...], points: int
) -> tuple[tuple[int, ...], tuple[ReplicaId, ...]]:
    """Return the ring's hashes, ascending, and who owns each."""
    ring = sorted(
        (xxhash.xxh64_intdigest(f"{name}{point}".encode()), name)
        for name in names
        for point in range(points)
    )
    return tuple(place for place, _ in ring), tuple(name for _, name in ring)
