"""What a prefill costs: the one unit in which queues and cache hits are weighed."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

Cost = Annotated[float, Meta(ge=0, le=1e6)]


class PrefillCost(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Milliseconds at speed 1: ``token_ms`` per new token, and per (new, attended) pair of them.

    The default computes 8,000 tokens/s while the context is short; attention costs as much as the
    rest at about 28,000 tokens of context, as on Llama 3 models of 8B and 70B (roofline of their
    shapes, see ``sidecar.clock``). What a replica really needs is learned as its speed.
    """

    token_ms: Cost = 0.125
    attention_pair_ms: Cost = 4.4e-6

    def ms(self, new_tokens: float, context_tokens: float) -> float:
        """Return the time to compute ``new_tokens`` behind ``context_tokens`` that are there."""
        if new_tokens <= 0:
            return 0.0
        pairs = new_tokens * (context_tokens + 0.5 * new_tokens)
        return self.token_ms * new_tokens + self.attention_pair_ms * pairs
