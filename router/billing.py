"""What each tenant got of the caches, and what it occupied there: for a bill, a quota or a talk.

Hits and saved tokens are those that engines reported for requests of this router: with several
routers they add up. What a scope holds is counted in the shared index, every ``interval_s``, and is
that of the whole fleet: every router tells the same. It is multiplied by the time since the last
count. Bytes are told where the bytes per token of the model are configured.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Final

from msgspec import Struct, structs
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from router.reply import json_response
from router.tenant import tenant_of
from state.client import STORE_ERRORS, RedisSettings, command_client, describe
from state.prefix import namespace_of
from state.rhythm import check_cancelled
from state.scope_held import held_blocks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from prometheus_client import CollectorRegistry, Metric

    from router.config import Config
    from router.epoch import ScopeEpochs
    from router.reply import Response
    from router.request import Request
    from router.trace import DecisionRecord
    from state.client import Client
    from state.model import ModelIdentity, NamespaceId
    from state.store import FleetReader

_log = logging.getLogger(__name__)

BILLING_PATH: Final = "/admin/billing"
LONGEST_COUNTED: Final = 3.0
"""Intervals that one count stands for at most: what was held while nobody counted is not billed."""
_STORE_TIMEOUT_S: Final = 1.0


class TenantUse(Struct, kw_only=True):
    """What one tenant's requests got, since the start of this router.

    ``hits`` are requests of which the engine had a part, ``saved_tokens`` the tokens of those
    parts, ``unreported`` requests whose engine told nothing of that.
    """

    tenant: str
    scope: str
    requests: int = 0
    hits: int = 0
    unreported: int = 0
    prompt_tokens: int = 0
    saved_tokens: int = 0


class ScopeHeld(Struct, kw_only=True):
    """What one scope holds in the whole fleet, and for how long it held how much.

    Bytes are None for a scope that holds blocks of a model whose bytes per token are not known, and
    byte seconds once that was so: their sum would leave out what nobody can say.
    """

    scope: str
    held_tokens: int = 0
    held_token_seconds: float = 0.0
    held_bytes: int | None = 0
    held_byte_seconds: float | None = 0.0


class BillingReport(Struct, frozen=True, kw_only=True):
    """The answer of ``GET /admin/billing``; ``held_age_s`` is None before the first count."""

    since_unix_s: float
    held_age_s: float | None
    tenants: list[TenantUse]
    scopes: list[ScopeHeld]


class _Named(Struct, frozen=True):
    """What one namespace counts for."""

    scope: str
    block_tokens: int
    bytes_per_token: int | None


class Billing(Collector):
    """Counts for the configured tenants and scopes, and for no others."""

    def __init__(
        self, config: Config, clock: Callable[[], float], unix_clock: Callable[[], float]
    ) -> None:
        self._settings = config.billing
        self._clock = clock
        self._since_unix_s = unix_clock()
        known = [tenant_of(settings) for settings in config.tenants]
        self._tenants = {one.name: TenantUse(tenant=one.name, scope=one.scope) for one in known}
        self._scopes = {one.scope: ScopeHeld(scope=one.scope) for one in known}
        self._named: dict[NamespaceId, _Named] = {}
        self._named_of: tuple[frozenset[ModelIdentity], frozenset[str]] | None = None
        self._counted_s: float | None = None
        self._last_fault = ""
        self.lock = asyncio.Lock()
        """Held while the store is asked: whoever ends ``run`` takes it first."""

    def add(self, record: DecisionRecord) -> None:
        """Count one request that ended."""
        use = self._tenants.get(record.tenant or "")
        if use is None or not record.attempts:
            return
        use.requests += 1
        cached = record.reported_cached_tokens
        if cached is None:
            use.unreported += 1
        else:
            use.hits += cached > 0
            use.saved_tokens += cached
        use.prompt_tokens += record.reported_prompt_tokens or record.prompt_tokens

    def prompt_amounts(self) -> list[int]:
        """Return the prompt tokens of each tenant so far."""
        return [use.prompt_tokens for use in self._tenants.values()]

    def report(self) -> BillingReport:
        """Return everything counted so far."""
        counted_s = self._counted_s
        return BillingReport(
            since_unix_s=self._since_unix_s,
            held_age_s=None if counted_s is None else self._clock() - counted_s,
            tenants=[structs.replace(use) for use in self._tenants.values()],
            scopes=[structs.replace(held) for held in self._scopes.values()],
        )

    async def answer(self, _: Request) -> Response:
        """Answer the report as JSON."""
        return json_response(self.report())

    def collect(self) -> Iterable[Metric]:
        """Yield the counts with one label, a configured tenant or scope."""
        for field, text in (
            ("requests", "Requests that were sent to a replica."),
            ("hits", "Requests of which the engine had a part."),
            ("unreported", "Requests whose engine told nothing of that."),
            ("prompt_tokens", "Prompt tokens."),
            ("saved_tokens", "Prompt tokens that the engine had."),
        ):
            counter = CounterMetricFamily(f"warmroute_cache_{field}", text, labels=["tenant"])
            for use in self._tenants.values():
                counter.add_metric([use.tenant], float(getattr(use, field)))
            yield counter
        held = GaugeMetricFamily(
            "warmroute_held_tokens", "Tokens in the caches of the fleet.", labels=["scope"]
        )
        seconds = CounterMetricFamily(
            "warmroute_held_token_seconds", "Tokens held, times seconds.", labels=["scope"]
        )
        byte_seconds = CounterMetricFamily(
            "warmroute_held_byte_seconds", "Bytes held, times seconds.", labels=["scope"]
        )
        for one in self._scopes.values():
            held.add_metric([one.scope], float(one.held_tokens))
            seconds.add_metric([one.scope], one.held_token_seconds)
            if one.held_byte_seconds is not None:
                byte_seconds.add_metric([one.scope], one.held_byte_seconds)
        yield from (held, seconds, byte_seconds)

    async def run(
        self,
        reader: FleetReader,
        scopes: ScopeEpochs,
        identities: Callable[[], Iterable[ModelIdentity]],
        state_url: str,
    ) -> None:
        """Count what is held, for ever; a store that does not answer is asked again."""
        client = command_client(
            RedisSettings(
                url=state_url,
                command_timeout_s=_STORE_TIMEOUT_S,
                connect_timeout_s=_STORE_TIMEOUT_S,
            )
        )
        try:
            while True:
                check_cancelled()
                async with self.lock:
                    await self._count(client, reader, self._namespaces(scopes, identities()))
                await asyncio.sleep(self._settings.interval_s)
        finally:
            await client.aclose()

    def _namespaces(
        self, scopes: ScopeEpochs, identities: Iterable[ModelIdentity]
    ) -> dict[NamespaceId, _Named]:
        """Return what each namespace of a live epoch counts for."""
        digests = {digest: scope for scope in self._scopes for digest in scopes.live_digests(scope)}
        made_of = frozenset(identities), frozenset(digests)
        if made_of == self._named_of:
            return self._named
        per_token = self._settings.kv_bytes_per_token
        self._named_of = made_of
        self._named = {
            namespace_of(structs.replace(identity, scope=digest)): _Named(
                scope, identity.block_tokens, per_token.get(identity.model)
            )
            for identity in made_of[0]
            for digest, scope in digests.items()
        }
        return self._named

    async def _count(
        self, client: Client, reader: FleetReader, namespaces: Mapping[NamespaceId, _Named]
    ) -> None:
        generations = {
            replica: state.record.generation for replica, state in reader.replicas().items()
        }
        try:
            held = await held_blocks(client, generations, namespaces)
        except STORE_ERRORS as error:
            if describe(error) != self._last_fault:
                _log.warning("what scopes hold is not counted for now: %s", describe(error))
            self._last_fault = describe(error)
            return
        self._last_fault = ""
        self.note_held(held)

    def note_held(self, held: Mapping[_Named, int]) -> None:
        """Take one count of blocks for what was held since the last one."""
        now_s = self._clock()
        longest_s = LONGEST_COUNTED * self._settings.interval_s
        since_s = 0.0 if self._counted_s is None else min(now_s - self._counted_s, longest_s)
        self._counted_s = now_s
        tokens: dict[str, int] = {}
        sizes: dict[str, int | None] = {}
        for named, blocks in held.items():
            count = blocks * named.block_tokens
            tokens[named.scope] = tokens.get(named.scope, 0) + count
            size = sizes.get(named.scope, 0)
            per_token = named.bytes_per_token
            is_known = size is not None and (per_token is not None or not count)
            sizes[named.scope] = (size or 0) + count * (per_token or 0) if is_known else None
        for one in self._scopes.values():
            one.held_tokens, one.held_bytes = tokens.get(one.scope, 0), sizes.get(one.scope, 0)
            one.held_token_seconds += one.held_tokens * since_s
            if one.held_bytes is None or one.held_byte_seconds is None:
                one.held_byte_seconds = None
            else:
                one.held_byte_seconds += one.held_bytes * since_s


def open_billing(config: Config, registry: CollectorRegistry) -> Billing:
    """Return the counts of the configured tenants, which are among the router's metrics."""
    billing = Billing(config, time.monotonic, time.time)
    registry.register(billing)
    return billing
