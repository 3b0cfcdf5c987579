"""The account of one request, from its first byte on, and the record that is made of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from router.admission_setting import Priority
from router.trace import Attempt, DecisionRecord

if TYPE_CHECKING:
    from router.chooser import Choice, Routed
    from router.observer import Usage
    from router.proxy import ProxyParts
    from router.quarantine import Key
    from router.quota import Slot
    from router.rate import RateSlot
    from router.relay import Relayed
    from router.retry import RetryReason
    from router.retry_budget import Claim
    from router.span import RequestSpans
    from router.tenant import Tenant
    from state.model import ReplicaId

CLIENT_CLOSED: Final = 499


@dataclass(slots=True)
class Call:
    """The mutable account of one request."""

    request_id: str
    client_request_id: str | None
    path: str
    started_s: float
    started_unix_s: float
    method: str = "POST"
    trace_id: str | None = None
    """Of the trace that it came with, or that begins with it."""
    spans: RequestSpans | None = None
    """Where it is traced."""
    body: bytes = b""
    """As it goes to replicas; empty before it came, and once its answer goes on for long."""
    key: Key | None = None
    """By what the quarantine knows it, where the body is gone."""
    body_bytes: int | None = None
    """Of its body as it went on; None where that did not come."""
    tenant: Tenant | None = None
    slot: Slot | None = None
    """Its place among its tenant's requests, where there are quotas."""
    priority: Priority = Priority.NORMAL
    rate: RateSlot | None = None
    """Its tenant's account, where there is a rate."""
    routed: Routed | None = None
    attempts: list[Attempt] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    """One for each attempt."""
    retry: Claim | None = None
    """Its part of the budget of second tries, while it waits for the answer of one."""
    retry_reason: RetryReason | None = None
    """Why another try was granted that has not gone out yet."""
    was_sent: bool = False
    """A replica had it, and it went to another one."""
    is_repeatable: bool = True
    is_suspect: bool = False
    """A replica died while it had it."""
    suspect_on: ReplicaId | None = None
    held_s: float = 0.0
    ttft_s: float | None = None
    relayed: Relayed | None = None
    status: int = CLIENT_CLOSED
    outcome: str = "cancelled"


def _model_of(parts: ProxyParts, call: Call) -> str | None:
    """Return the request's model, unless nobody serves it: clients may write anything there."""
    model = call.routed.prompt.model if call.routed is not None else ""
    is_served = bool(call.choices) or (model and model in parts.fleet.models(parts.health))
    return model if model and is_served else None


def record_of(parts: ProxyParts, call: Call, usage: Usage | None) -> DecisionRecord:
    """Return the record of a request that has ended."""
    routed, prompt, heat = call.routed, None, None
    if routed is not None:
        prompt, heat = routed.prompt, routed.arrival.heat
    rung, age_s = parts.reader.freshness()
    last = call.choices[-1].decided_by if call.choices else None
    decided_by = last or parts.chooser.decided_by
    return DecisionRecord(  # by place: by name it takes six times as long
        call.request_id,
        call.client_request_id,
        routed.ordinal if routed is not None else 0,
        parts.chooser.seed,
        call.started_unix_s,
        call.path,
        _model_of(parts, call),
        type(decided_by.policy).__name__,
        routed.prompt_tokens if routed is not None else 0,
        routed.is_exact if routed is not None else False,
        prompt.unroutable if prompt is not None else None,
        rung,
        age_s,
        heat.prefix_tokens if heat is not None else None,
        tuple(sorted(heat.holders)) if heat is not None else (),
        tuple(call.attempts),
        call.status,
        call.outcome,
        call.ttft_s,
        parts.clock() - call.started_s,
        usage.prompt_tokens if usage is not None else None,
        usage.cached_tokens if usage is not None else None,
        reported_output_tokens=usage.completion_tokens if usage is not None else None,
        held_s=call.held_s,
        tenant=call.tenant.name if call.tenant is not None else None,
        is_salted=bool(prompt.salt) if prompt is not None else False,
        trace_id=call.trace_id,
        settings_version=decided_by.settings_version,
        side=routed.assigned.side.value if routed is not None and routed.assigned else None,
    )
