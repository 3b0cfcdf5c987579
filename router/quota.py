"""Quotas of tenants: refused before any work is done, with the time after which to try again.

What is in flight is a set of open requests, so that it cannot drift. New blocks are an account that
is filled with time and charged with what a request is predicted to compute; a request that
overdraws it is served, and the next ones wait until it is filled again: that costs no estimate of a
request before it is read. A prompt whose tokens cannot be known counts by the bytes of its body,
until the engine tells how long it was.
"""

from __future__ import annotations

import math
import time
from functools import partial
from typing import TYPE_CHECKING, Final

from prompt.model import Unroutable
from router.error import RateLimitedError
from router.metrics import Counts
from router.outlook import BYTES_PER_TOKEN
from router.tally import Tally
from router.tenant import tenant_of
from state.placement import BLOCK_BYTES, Placements
from state.scope_placement import ScopedPlacements

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from prometheus_client import CollectorRegistry

    from policies.model import Decision
    from router.chooser import Routed
    from router.config import Config
    from router.observer import Usage
    from router.quota_setting import QuotaSettings
    from router.tenant import Tenant, TenantSettings

INFLIGHT: Final = "max_inflight"
NEW_BLOCKS: Final = "new_blocks_per_s"
LONGEST_RETRY_S: Final = 60


class _Account:
    """One tenant's open requests, and how many new blocks it may still bring."""

    __slots__ = ("_filled_s", "blocks", "open_slots", "settings")

    def __init__(self, settings: QuotaSettings, now_s: float) -> None:
        self.settings = settings
        self.open_slots: set[Slot] = set()
        self._filled_s = now_s
        self.blocks = (settings.new_blocks_per_s or 0.0) * settings.burst_s

    def fill(self, now_s: float) -> float:
        """Return what is there now; negative for a debt."""
        rate = self.settings.new_blocks_per_s or 0.0
        most = rate * self.settings.burst_s
        self.blocks = min(most, self.blocks + rate * (now_s - self._filled_s))
        self._filled_s = now_s
        return self.blocks


class Slot:
    """One open request of a tenant; ``end`` gives back what it takes, once."""

    __slots__ = ("_account", "_block_tokens", "_clock", "_guessed_tokens", "_is_charged")

    def __init__(self, account: _Account, clock: Callable[[], float]) -> None:
        self._account = account
        self._clock = clock
        self._is_charged = False
        self._guessed_tokens: int | None = None
        self._block_tokens = 1

    def charge(self, routed: Routed, decision: Decision, body_bytes: int = 0) -> None:
        """Note what the request is predicted to compute; a second try is no second prompt."""
        if self._is_charged or self._account.settings.new_blocks_per_s is None:
            return
        self._is_charged = True
        new_tokens = max(0, routed.prompt_tokens - decision.predicted_cached_tokens)
        why_unknown = routed.prompt.unroutable
        if why_unknown is not None:
            is_prompt = why_unknown is not Unroutable.LOAD_ONLY
            self._guessed_tokens = new_tokens = body_bytes // BYTES_PER_TOKEN * is_prompt
        self._block_tokens = routed.block_tokens
        self._account.fill(self._clock())
        self._account.blocks -= new_tokens / self._block_tokens

    def end(self, usage: Usage | None = None) -> None:
        """Give the place back; what was guessed becomes what the engine counted, if it told."""
        self._account.open_slots.discard(self)
        guessed_tokens, self._guessed_tokens = self._guessed_tokens, None
        if guessed_tokens is None or usage is None or usage.prompt_tokens is None:
            return
        new_tokens = max(0, usage.prompt_tokens - (usage.cached_tokens or 0))
        self._account.fill(self._clock())
        self._account.blocks += (guessed_tokens - new_tokens) / self._block_tokens


class Quotas:
    """The accounts of the tenants that have a quota."""

    def __init__(self, tenants: Iterable[TenantSettings], clock: Callable[[], float]) -> None:
        self._clock = clock
        self._accounts = {one.name: _Account(one.quota, clock()) for one in tenants}
        self._refused = Tally(
            "warmroute_quota_refusals", "Requests beyond a tenant's quota.", ["tenant", "quota"]
        )
        self.counts = Counts(self._refused)

    def enter(self, tenant: Tenant) -> Slot:
        """Return the place of one more request; raises RateLimitedError where there is none."""
        account = self._accounts[tenant.name]
        settings = account.settings
        if settings.max_inflight is not None and len(account.open_slots) >= settings.max_inflight:
            self._refused.add(1, (tenant.name, INFLIGHT))
            message = f"{INFLIGHT}: {settings.max_inflight} requests of this tenant are open"
            raise RateLimitedError(message)
        rate = settings.new_blocks_per_s
        if rate is not None and account.fill(self._clock()) < 0.0:
            self._refused.add(1, (tenant.name, NEW_BLOCKS))
            wait_s = min(LONGEST_RETRY_S, math.ceil(-account.blocks / rate))
            message = f"{NEW_BLOCKS}: this tenant brought more prompts that no cache has"
            raise RateLimitedError(message, retry_after_s=max(1, wait_s))
        slot = Slot(account, self._clock)
        account.open_slots.add(slot)
        return slot

    def inflight(self, tenant_name: str) -> int:
        """Return how many requests of a tenant are open."""
        return len(self._accounts[tenant_name].open_slots)


def open_quotas(config: Config, registry: CollectorRegistry) -> Quotas | None:
    """Return the quotas, where there are tenants; their refusals are among the metrics."""
    if not config.tenants:
        return None
    quotas = Quotas(config.tenants, time.monotonic)
    registry.register(quotas.counts)
    return quotas


def scope_bounds(tenants: Iterable[TenantSettings]) -> dict[str, int | None]:
    """Return how many placed blocks each scope may have: the sum over its tenants, or no bound."""
    bounds: dict[str, int | None] = {}
    for settings in tenants:
        scope, most_bytes = tenant_of(settings).scope, settings.quota.index_bytes
        known = bounds.get(scope, 0)
        is_bound = known is not None and most_bytes is not None
        bounds[scope] = (known or 0) + (most_bytes or 0) // BLOCK_BYTES if is_bound else None
    return bounds


def placements_of(config: Config) -> Callable[[float], Placements | ScopedPlacements]:
    """Return what makes a record of placements; with tenants one that keeps scopes apart."""
    if not config.tenants:
        return Placements
    return partial(ScopedPlacements, bounds=scope_bounds(config.tenants))
