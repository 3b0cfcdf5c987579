"""kthena's scheduler: scores of 0 to 100 from several plugins, summed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Final

from msgspec import Meta, Struct

from policies.baselines.ballot import candidate_of, decided
from policies.draw import draw_below

if TYPE_CHECKING:
    from policies.model import Decision, ReplicaView, RoutingRequest
    from state.model import ReplicaId

Weight = Annotated[float, Meta(ge=0, le=1_000)]
_FULL: Final = 100
_SHUFFLE: Final = 16
"""First stream of the draws that order equal matches."""


class Kthena(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="kthena"
):
    """The default plugins of volcano-sh/kthena (2026), each with weight 1, negated.

    ``least_request``: with base = on-flight + 100 * (on-flight - running), at least 0, the score is
    the whole part of ``100 * (max - base) / max``. On-flight are the routers' leases, running is
    the engine's report; an engine that does not report has the mean excess of the others.
    ``prefix``: the whole percentage of the prompt's first ``max_prefix_tokens`` that this router
    placed there, for the ``top_matches`` longest only. Its hashes are of 64 bytes, at most 128:
    about 2,048 tokens, so longer shared prefixes look equal. kthena records a placement after the
    response, here it counts at once.

    Replicas that report ``max_waiting`` requests or more are no candidates. Where all do, kthena
    answers with an error; here all are candidates. ``least-latency`` needs measured TTFT
    and TPOT per replica, which a view does not carry: left out, as if none were known (all 100).
    """

    uses_placements: ClassVar[bool] = True
    """Knows caches by the placements of this router alone."""

    w_least_request: Weight = 1.0
    w_prefix: Weight = 1.0
    max_waiting: Annotated[int, Meta(ge=1)] = 10
    max_prefix_tokens: Annotated[int, Meta(ge=1)] = 2_048
    top_matches: Annotated[int, Meta(ge=1)] = 5

    def pick(self, request: RoutingRequest, fleet: tuple[ReplicaView, ...]) -> Decision | None:
        """Return the decision; None when the fleet is empty."""
        if not fleet:
            return None
        free = tuple(view for view in fleet if (view.waiting or 0) < self.max_waiting) or fleet
        bases = _bases(free)
        most = max(bases)
        seen_tokens = max(1, min(request.prompt_tokens, self.max_prefix_tokens))
        percents = {
            view.replica: _FULL * min(view.placed_tokens, seen_tokens) // seen_tokens
            for view in fleet
        }
        counted = self._longest(free, percents, request)
        candidates = tuple(
            candidate_of(
                view,
                {
                    "least_request": -self.w_least_request
                    * int(_FULL * (most - base) / most if most else _FULL),
                    "prefix": -self.w_prefix
                    * (percents[view.replica] if view.replica in counted else 0),
                },
            )
            for view, base in zip(free, bases, strict=True)
        )
        held = {replica: float(percent) for replica, percent in percents.items()}
        return decided(request, candidates, held)

    def _longest(
        self,
        free: tuple[ReplicaView, ...],
        percents: dict[ReplicaId, int],
        request: RoutingRequest,
    ) -> set[ReplicaId]:
        """Return who is among the longest matches, in no particular order among equals."""
        matching = [view.replica for view in free if percents[view.replica]]
        if len(matching) <= self.top_matches:
            return set(matching)
        bar = sorted((percents[replica] for replica in matching), reverse=True)[
            self.top_matches - 1
        ]
        longest = {replica for replica in matching if percents[replica] > bar}
        equals = sorted(replica for replica in matching if percents[replica] == bar)
        room = self.top_matches - len(longest)
        while room and equals:
            longest.add(equals.pop(draw_below(len(equals), request, _SHUFFLE + room)))
            room -= 1
        return longest


def _bases(fleet: tuple[ReplicaView, ...]) -> list[float]:
    """Return what ``least-request`` compares: on-flight, and each that does not run as 100."""
    known = [max(view.inflight - view.running, 0) for view in fleet if view.running is not None]
    unknown = sum(known) / len(known) if known else 0.0
    return [
        view.inflight
        + 100 * (unknown if view.running is None else max(view.inflight - view.running, 0))
        for view in fleet
    ]
