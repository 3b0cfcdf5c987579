"""S-08: quotas are kept before any work is done, and each refusal says when to come again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from policies.model import Decision, Reason
from prompt.model import ReadPrompt, Unroutable
from router.chooser import Routed
from router.error import RateLimitedError, error_headers
from router.observer import Usage
from router.quota import Quotas, scope_bounds
from router.quota_setting import QuotaSettings
from router.tenant import Tenant, TenantSettings, tenant_of
from state.model import ReplicaId
from state.placement import BLOCK_BYTES

if TYPE_CHECKING:
    from router.quota import Slot


def settings(name: str, share: str = "tenant", **quota: Any) -> TenantSettings:
    return TenantSettings(
        name=name, key_digests=("0" * 64,), share=share, quota=QuotaSettings(**quota)
    )


class Stand:
    """Quotas of tenants ``a`` (bounded) and ``b`` (not), with a clock that tests move."""

    def __init__(self, **quota: Any) -> None:
        self.now_s = 100.0
        tenants = [settings("a", **quota), settings("b")]
        self.quotas = Quotas(tenants, lambda: self.now_s)
        self.a, self.b = map(tenant_of, tenants)

    def enter(self, tenant: Tenant) -> Slot:
        return self.quotas.enter(tenant)

    def refused(self, tenant: Tenant) -> RateLimitedError:
        with pytest.raises(RateLimitedError) as refusal:
            self.quotas.enter(tenant)
        return refusal.value


def routed(tokens: int) -> Routed:
    prompt = ReadPrompt(model="m", is_stream=False)
    return Routed(prompt=prompt, ordinal=1, is_exact=True, prompt_tokens=tokens)


def decision(cached_tokens: int) -> Decision:
    return Decision(
        replica=ReplicaId("r"),
        reason=Reason.LOAD,
        predicted_cached_tokens=cached_tokens,
        candidates=(),
    )


def test_no_more_requests_are_open_than_the_quota_says() -> None:
    """A place is given back once, however often its request says that it ended."""
    stand = Stand(max_inflight=2)
    first, second = stand.enter(stand.a), stand.enter(stand.a)
    refusal = stand.refused(stand.a)
    assert refusal.status == 429
    assert error_headers(refusal) == {"Retry-After": "1"}
    assert "max_inflight: 2" in refusal.message
    stand.enter(stand.b)
    first.end()
    first.end()
    third = stand.enter(stand.a)
    stand.refused(stand.a)
    for slot in (second, third, third):
        slot.end()
    assert stand.quotas.inflight("a") == 0
    assert stand.quotas.inflight("b") == 1


def test_new_blocks_are_an_account_that_time_fills() -> None:
    """10 a second, 5 s ahead: the one that overdraws is served, the next one is told when."""
    stand = Stand(new_blocks_per_s=10.0, burst_s=5.0)
    stand.enter(stand.a).charge(routed(64 * 80), decision(0))
    refusal = stand.refused(stand.a)
    assert error_headers(refusal) == {"Retry-After": "3"}
    assert refusal.status == 429
    stand.enter(stand.b)
    stand.now_s += 2.9
    stand.refused(stand.a)
    stand.now_s += 0.2
    stand.enter(stand.a).charge(routed(64 * 1), decision(0))
    stand.now_s += 1_000.0
    stand.enter(stand.a).charge(routed(64 * 51), decision(0))
    stand.refused(stand.a)


def test_what_a_cache_has_costs_nothing_and_a_second_try_is_no_second_prompt() -> None:
    """Only what has to be computed is charged, once a request."""
    stand = Stand(new_blocks_per_s=1.0, burst_s=10.0)
    for _ in range(50):
        stand.enter(stand.a).charge(routed(6_400), decision(6_400))
    slot = stand.enter(stand.a)
    for _ in range(50):
        slot.charge(routed(64), decision(0))
    stand.enter(stand.a)


def unread(why: Unroutable) -> Routed:
    prompt = ReadPrompt(model="m", is_stream=False, unroutable=why)
    return Routed(prompt=prompt, ordinal=1, is_exact=True, prompt_tokens=0)


def test_a_prompt_that_cannot_be_read_counts_by_its_bytes_until_its_length_is_told() -> None:
    """S-08: a template of one's own is no way around the quota."""
    stand = Stand(new_blocks_per_s=1.0, burst_s=10.0)
    slot = stand.enter(stand.a)
    slot.charge(unread(Unroutable.REQUEST_TEMPLATE), decision(0), 4 * 64 * 40)
    assert error_headers(stand.refused(stand.a)) == {"Retry-After": "30"}
    slot.end(Usage(prompt_tokens=64 * 25, completion_tokens=1, cached_tokens=64 * 10))
    assert error_headers(stand.refused(stand.a)) == {"Retry-After": "5"}
    slot.end(Usage(prompt_tokens=0, completion_tokens=0, cached_tokens=0))
    stand.refused(stand.a)
    stand.now_s += 6.0
    slot = stand.enter(stand.a)
    slot.charge(unread(Unroutable.REQUEST_TEMPLATE), decision(0), 4 * 64 * 3)
    slot.end()  # the engine told nothing
    assert error_headers(stand.refused(stand.a)) == {"Retry-After": "2"}


def test_a_path_whose_prompts_are_not_read_costs_what_the_engine_counts() -> None:
    """S-08: asking for tokens costs nothing, an embedding costs its prompt."""
    stand = Stand(new_blocks_per_s=1.0, burst_s=10.0)
    for _ in range(50):
        slot = stand.enter(stand.a)
        slot.charge(unread(Unroutable.LOAD_ONLY), decision(0), 1 << 20)
        slot.end()
    slot = stand.enter(stand.a)
    slot.charge(unread(Unroutable.LOAD_ONLY), decision(0), 8)
    slot.end(Usage(prompt_tokens=64 * 12, completion_tokens=None, cached_tokens=None))
    assert error_headers(stand.refused(stand.a)) == {"Retry-After": "2"}


def test_a_long_debt_is_told_as_a_minute() -> None:
    """A client that comes again by then is told again."""
    stand = Stand(new_blocks_per_s=0.1, burst_s=1.0)
    stand.enter(stand.a).charge(routed(64_000), decision(0))
    assert error_headers(stand.refused(stand.a)) == {"Retry-After": "60"}


def test_refusals_are_counted_by_tenant_and_quota() -> None:
    """G-03: from closed sets."""
    stand = Stand(max_inflight=1)
    registry = CollectorRegistry()
    registry.register(stand.quotas.counts)
    stand.enter(stand.a)
    for _ in range(3):
        stand.refused(stand.a)
    text = generate_latest(registry).decode()
    assert 'warmroute_quota_refusals_total{quota="max_inflight",tenant="a"} 3.0' in text


def test_the_bound_of_a_group_is_the_sum_of_its_tenants() -> None:
    """One without a bound makes the group one without."""
    bounds = scope_bounds(
        [
            settings("a", index_bytes=1 << 20),
            settings("b"),
            settings("c", "blue", index_bytes=1 << 20),
            settings("d", "blue", index_bytes=1 << 20),
            settings("e", "red", index_bytes=1 << 20),
            settings("f", "red"),
            settings("g", "red", index_bytes=1 << 20),
        ]
    )
    assert bounds == {
        "tenant:a": (1 << 20) // BLOCK_BYTES,
        "tenant:b": None,
        "group:blue": (1 << 20) // BLOCK_BYTES * 2,
        "group:red": None,
    }
