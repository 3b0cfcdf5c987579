"""The account of one request, from its first byte on, and the record that is made of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from router.trace import Attempt, DecisionRecord

if TYPE_CHECKING:
    from router.chooser import Choice, Routed
    from router.observer import Usage
    from router.proxy import ProxyParts
    from router.quota import Slot
    from router.relay import Relayed
    from router.tenant import Tenant

CLIENT_CLOSED: Final = 499


@dataclass(slots=True)
class Call:
    """The mutable account of one request."""

    request_id: str
    client_request_id: str | None
    path: str
    started_s: float
    started_unix_s: float
    tenant: Tenant | None = None
    slot: Slot | None = None
    """Its place among its tenant's requests, where there are quotas."""
    routed: Routed | None = None
    attempts: list[Attempt] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    """One for each attempt."""
    held_s: float = 0.0
    ttft_s: float | None = None
    relayed: Relayed | None = None
    status: int = CLIENT_CLOSED
    outcome: str = "cancelled"


def record_of(parts: ProxyParts, call: Call, usage: Usage | None) -> DecisionRecord:
    """Return the record of a request that has ended."""
    routed = call.routed
    heat = routed.heat if routed is not None else None
    rung, age_s = parts.reader.freshness()
    return DecisionRecord(
        request_id=call.request_id,
        client_request_id=call.client_request_id,
        ordinal=routed.ordinal if routed is not None else 0,
        seed=parts.chooser.seed,
        started_unix_s=call.started_unix_s,
        path=call.path,
        tenant=call.tenant.name if call.tenant is not None else None,
        model=routed.prompt.model or None if routed is not None else None,
        policy=type(parts.config.policy).__name__,
        prompt_tokens=routed.prompt_tokens if routed is not None else 0,
        is_exact=routed.is_exact if routed is not None else False,
        unroutable=routed.prompt.unroutable if routed is not None else None,
        rung=rung,
        state_age_s=age_s,
        hot_prefix_tokens=heat.prefix_tokens if heat is not None else None,
        hot_holders=tuple(sorted(heat.holders)) if heat is not None else (),
        held_s=call.held_s,
        is_salted=bool(routed.prompt.salt) if routed is not None else False,
        attempts=tuple(call.attempts),
        status=call.status,
        outcome=call.outcome,
        ttft_s=call.ttft_s,
        duration_s=parts.clock() - call.started_s,
        reported_prompt_tokens=usage.prompt_tokens if usage is not None else None,
        reported_cached_tokens=usage.cached_tokens if usage is not None else None,
        reported_output_tokens=usage.completion_tokens if usage is not None else None,
    )
