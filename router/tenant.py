"""Tenants: who may ask, and with whom they share cached prefixes.

A request belongs to the tenant whose API key it brings, and to nobody else: no header, no field of
a body and no path says anything about it. A tenant's *scope* is what decides which prefixes it may
meet: its own, or that of a group which the operator named. Keys are known by their SHA-256.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Final, Protocol

from msgspec import Meta, Struct

from router.admission_setting import Priority, RateSettings
from router.quota_setting import QuotaSettings
from state.model import NAME_PATTERN

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

OWN_SCOPE: Final = "tenant"
"""A ``share`` that means: with nobody."""
USER_SCOPE: Final = "user"
"""One that means: with nobody, and each of its users alone."""
_RESERVED: Final = frozenset({OWN_SCOPE, USER_SCOPE})

Label = Annotated[
    str,
    Meta(
        pattern=NAME_PATTERN,
        description="a name of up to 128 letters, digits and . _ : @ - without a sign in front",
    ),
]
Sha256Hex = Annotated[
    str,
    Meta(
        pattern=r"\A[0-9a-f]{64}\Z",
        description="the SHA-256 of an API key in 64 lower-case hex digits",
    ),
]
Instant = Annotated[datetime, Meta(tz=True, description="an RFC 3339 instant with its offset")]


class KeyDigest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One API key by the SHA-256 of its bytes; from ``until`` on it is unknown."""

    digest: Sha256Hex
    until: Instant | None = None


class TenantSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tenant of the configuration.

    ``key_digests``: several while keys are changed. ``share``: ``tenant`` for prefixes of its own,
    ``user`` where each user that its requests name has some of its own, or one of the configured
    ``groups``, whose tenants meet each other's. ``receipts``: answers have
    x-warmroute-* headers, which tell what is cached. ``quota``: what it may take of what is shared.
    ``priority``: who goes first where requests wait, and last where they are shed. ``rate``: what
    it may ask for on average. ``warm_up``: its hottest prefixes may be kept in the router's memory,
    see ``warm_up`` of the whole configuration.
    """

    name: Label
    key_digests: Annotated[tuple[Sha256Hex | KeyDigest, ...], Meta(min_length=1)]
    share: Label = OWN_SCOPE
    receipts: bool = False
    quota: QuotaSettings = QuotaSettings()
    priority: Priority = Priority.NORMAL
    rate: RateSettings = RateSettings()
    warm_up: bool = False


class Tenant(Struct, frozen=True, kw_only=True):
    """A tenant as requests know it. ``scope`` is the same for those that share prefixes.

    ``is_by_user``: its users do not share them with each other. ``may_keep``: its hottest prefixes
    may be kept in memory.
    """

    name: str
    scope: str
    receipts: bool = False
    priority: Priority = Priority.NORMAL
    is_by_user: bool = False
    may_keep: bool = False


class Epochs(Protocol):
    """Which life of a scope's prefixes is the present one.

    Another epoch makes another salt, and nothing that was cached before is found any more. Asked
    once for each request: answered from memory, without a wait.
    """

    def of(self, scope: str) -> str:
        """Return the present epoch of ``scope``; empty for the first one."""
        ...


class FirstEpoch:
    """Epochs of a deployment in which no scope was ever renewed."""

    def of(self, scope: str) -> str:  # noqa: ARG002 - all scopes are in their first one
        """Return the empty epoch."""
        return ""


def tenant_of(settings: TenantSettings) -> Tenant:
    """Return the tenant that ``settings`` describe."""
    is_own = settings.share in _RESERVED
    kind, named = ("tenant", settings.name) if is_own else ("group", settings.share)
    return Tenant(
        name=settings.name,
        scope=f"{kind}:{named}",
        receipts=settings.receipts,
        priority=settings.priority,
        is_by_user=settings.share == USER_SCOPE,
        may_keep=settings.warm_up,
    )


def keys_of(settings: TenantSettings) -> Iterator[KeyDigest]:
    """Yield the tenant's keys, also those that were written as a digest alone."""
    for key in settings.key_digests:
        yield key if isinstance(key, KeyDigest) else KeyDigest(digest=key)


def tenant_fault(tenants: Sequence[TenantSettings], groups: Sequence[str]) -> str | None:
    """Return what is wrong with the tenants that types cannot say, naming the key; else None."""
    for index, group in enumerate(groups):
        if group in _RESERVED or group in groups[:index]:
            return f"groups[{index}]: expected another name than {group!r}"
    names: set[str] = set()
    owners: dict[str, int] = {}
    for index, tenant in enumerate(tenants):
        at = f"tenants[{index}]"
        if tenant.name in names:
            return f"{at}.name: {tenant.name!r} occurs twice; give each tenant its own name"
        names.add(tenant.name)
        if tenant.share not in _RESERVED and tenant.share not in groups:
            expected = f"{OWN_SCOPE!r}, {USER_SCOPE!r} or one of groups"
            return f"{at}.share: expected {expected}, got {tenant.share!r}"
        for number, key in enumerate(keys_of(tenant)):
            if key.digest in owners:
                owner = f"tenants[{owners[key.digest]}]"
                return f"{at}.key_digests[{number}]: expected one that is nobody's, {owner} has it"
            owners[key.digest] = index
    return None
