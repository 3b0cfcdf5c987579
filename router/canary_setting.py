"""A canary: whose requests a candidate policy decides, for how long, and what stops it.

It is a part of the document of settings (``router.settings``): all routers split alike.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from policies.union import AnyPolicy
from state.model import NAME_PATTERN

if TYPE_CHECKING:
    from collections.abc import Mapping

MOST_TENANTS: Final = 256
EPOCH_BYTES: Final = 12
CanaryId = Annotated[
    str, Meta(pattern=r"\A[a-z0-9-]{1,32}\Z", description="up to 32 small letters, digits and -")
]
TenantName = Annotated[str, Meta(pattern=NAME_PATTERN, description="the name of a tenant")]
MinRequests = Annotated[int, Meta(ge=50, le=10_000_000)]
Percent = Annotated[float, Meta(gt=0, le=50)]
Duration = Annotated[float, Meta(ge=10, le=30 * 86_400)]
MaxRequests = Annotated[int, Meta(ge=100, le=1_000_000_000)]


class RatioGuardrail(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rolls back when the candidate's figure is surely over ``limit`` times the control's.

    Not before both sides have ``min_requests``.
    """

    enabled: bool = True
    limit: Annotated[float, Meta(ge=1, le=100)] = 1.1
    min_requests: MinRequests = 200


class ShareGuardrail(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Rolls back when a share is surely worse than the control's by over ``limit``, of 1 in all.

    Not before both sides have ``min_requests``.
    """

    enabled: bool = True
    limit: Annotated[float, Meta(ge=0, le=1)] = 0.02
    min_requests: MinRequests = 200


class Guardrails(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a candidate must not make worse.

    ``errors``: the share of requests that failed or were shed. ``token_hits``: the share of prompt
    tokens that engines reported as cached. ``imbalance``: the probability that two requests go to
    the same replica: over the control's, 1 is as even, and all to one of three evenly used is 3.
    """

    ttft_mean: RatioGuardrail = RatioGuardrail()
    ttft_p95: RatioGuardrail = RatioGuardrail(limit=1.25, min_requests=500)
    errors: ShareGuardrail = ShareGuardrail(limit=0.01)
    token_hits: ShareGuardrail = ShareGuardrail(limit=0.05)
    imbalance: RatioGuardrail = RatioGuardrail(limit=1.5)


class CanarySettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A candidate ``policy``, and who gets it.

    ``split``: ``percent`` of all conversations (``hash``) or of all tenants (``tenant``), by a hash
    with ``seed``; or the ``tenants`` that are named. It ends ``duration_s`` after
    ``started_unix_s``, or with ``max_requests`` on both sides together, whatever comes first. Then
    all requests are the control's again, and the candidate waits to be promoted or stopped; or,
    ``at_end: promote``, it is promoted where it is surely within every guardrail.
    ``ended_unix_s`` says that it has ended.
    """

    id: CanaryId
    started_unix_s: float
    policy: AnyPolicy
    split: Literal["hash", "tenant"] = "hash"
    percent: Percent | None = None
    tenants: Annotated[tuple[TenantName, ...], Meta(max_length=MOST_TENANTS)] = ()
    seed: Annotated[int, Meta(ge=0, lt=1 << 53)] = 0
    duration_s: Duration = 3_600.0
    max_requests: MaxRequests | None = None
    guardrails: Guardrails = Guardrails()
    at_end: Literal["wait", "promote"] = "wait"
    ended_unix_s: float | None = None

    @property
    def end_unix_s(self) -> float:
        """When its time is over."""
        return self.started_unix_s + self.duration_s

    def is_over(self, unix_s: float) -> bool:
        """Return whether it splits no more."""
        return self.ended_unix_s is not None or unix_s >= self.end_unix_s


def canary_fault(canary: CanarySettings, *, has_tenants: bool) -> str | None:
    """Return what is wrong with a canary, beginning with its key; else None."""
    by_hash, has_percent = canary.split == "hash", canary.percent is not None
    fault = None
    if by_hash and canary.tenants:
        fault = "tenants: expected none with split hash"
    elif by_hash and not has_percent:
        fault = "percent: expected the candidate's share, up to 50 %"
    elif not by_hash and not has_tenants:
        fault = "split: expected hash, as no tenants are configured"
    elif has_percent is bool(canary.tenants):
        fault = "percent: expected either a share of the tenants or canary.tenants"
    elif len(set(canary.tenants)) != len(canary.tenants):
        fault = "tenants: a tenant occurs twice"
    return None if fault is None else f"canary.{fault}"


def epoch_of(canary: CanarySettings, control: AnyPolicy) -> str:
    """Return what figures that may be added up have in common: who is split how, by which policies.

    Another one begins with each change of them: what was counted before says nothing about it.
    """
    fields: tuple[Any, ...] = (
        *(canary.id, canary.started_unix_s, canary.policy, control),
        *(canary.split, canary.percent, canary.tenants, canary.seed),
    )
    return blake2b(msgspec.json.encode(fields, order="sorted"), digest_size=EPOCH_BYTES).hexdigest()


def without_canary(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document without its canary."""
    return {key: value for key, value in settings.items() if key != "canary"}
