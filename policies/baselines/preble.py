"""Preble's E2: exploit where most of the prompt is cached, else explore by load."""

from __future__ import annotations

from math import fsum
from typing import TYPE_CHECKING, Annotated, ClassVar

from msgspec import Meta, Struct

from policies.baselines.ballot import candidate_of, decided
from policies.prefill import PrefillCost

if TYPE_CHECKING:
    from policies.model import Candidate, Decision, ReplicaView, RoutingRequest

Amount = Annotated[float, Meta(ge=0, le=1e9)]


class Preble(
    Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag="preble"
):
    """E2 of Preble (ICLR 2025 and its public code), **in part**: no figure of it is Preble's.

        load = prefill_load * window_s + inflight * output_tokens * output_token_ms      [ms]

    When the longest match is over half of the prompt, the least loaded of those that hold so much
    gets it (exploit). Else the least load + own prefill of all replicas wins (explore).

    Approximated by what a view carries: the history of three minutes by the decayed prefill rate
    times ``window_s``; the outputs' median by ``output_tokens``, the constant of its code, and
    ``output_token_ms``, its first guess. Rebalancing steals prefix nodes there; here the lightest
    replica takes the request that the heaviest would get when their loads differ by over
    ``rebalance_ratio``, once the fleet has seen ``rebalance_after`` recent requests per replica.
    Left out, as they need histories per prefix: the cost of what the prompt evicts, and the
    replication of prefixes whose TTFT doubles.
    """

    uses_placements: ClassVar[bool] = True
    """Knows caches by the placements of this router alone."""

    prefill: PrefillCost = PrefillCost()
    window_s: Amount = 180.0
    output_tokens: Amount = 45.0
    output_token_ms: Amount = 150.0
    rebalance_ratio: Annotated[float, Meta(ge=1)] = 1.5
    rebalance_after: Amount = 50.0

    def pick(self, request: RoutingRequest, fleet: tuple[ReplicaView, ...]) -> Decision | None:
        """Return the decision; None when the fleet is empty."""
        if not fleet:
            return None
        prompt_tokens = request.prompt_tokens
        held = {view.replica: float(min(view.placed_tokens, prompt_tokens)) for view in fleet}
        loads = {view.replica: self._load_ms(view) for view in fleet}
        most = max(held.values())
        if prompt_tokens - most < most:
            candidates = tuple(
                candidate_of(view, {"load": loads[view.replica]})
                for view in fleet
                if held[view.replica] == most
            )
        else:
            candidates = tuple(
                self._explored(view, loads[view.replica], held[view.replica], prompt_tokens)
                for view in fleet
            )
        decision = decided(request, candidates, held)
        least, heaviest = min(loads.values()), max(loads.values())
        if loads[decision.replica] < heaviest or not self._is_skewed(fleet, least, heaviest):
            return decision
        lightest = tuple(
            candidate_of(view, {"load": least}) for view in fleet if loads[view.replica] == least
        )
        return decided(request, lightest, held)

    def _explored(
        self, view: ReplicaView, load_ms: float, held_tokens: float, prompt_tokens: int
    ) -> Candidate:
        prefill_ms = self.prefill.ms(prompt_tokens - held_tokens, held_tokens)
        return candidate_of(view, {"load": load_ms, "prefill": prefill_ms})

    def _is_skewed(
        self, fleet: tuple[ReplicaView, ...], least_ms: float, heaviest_ms: float
    ) -> bool:
        """Return whether loads differ too much, and enough was sent to tell."""
        if heaviest_ms <= self.rebalance_ratio * least_ms:
            return False
        recent = fsum(view.recent_assignments for view in fleet)
        return recent >= self.rebalance_after * len(fleet)

    def _load_ms(self, view: ReplicaView) -> float:
        decode_ms = view.inflight * self.output_tokens * self.output_token_ms
        return view.prefill_load * self.window_s + decode_ms
