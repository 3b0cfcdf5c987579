"""Claims on warm-ups on every kind of store: one router at a time, one budget for all of them."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from state import warm_claim
from state.client import RedisSettings
from state.model import ReplicaId, RouterId
from state.store import StateError
from state.warm_claim import (
    Answer,
    Claimed,
    MemoryWarmClaims,
    RedisWarmClaims,
    Subject,
    key_base,
)
from support.fleet import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from state.warm_claim import WarmClaims
    from support.state_backend import StateServer

SERVERS = {
    "redis": "valkey",
    "cluster": "valkey_cluster",
    "sentinel": "valkey_sentinel",
    "acl": "valkey_acl",
}
SUBJECT = Subject(ReplicaId("w0"), "warm_up", "life")
BUDGET = 1_000


@pytest_asyncio.fixture(params=["memory", *SERVERS])
async def rivals(request: pytest.FixtureRequest) -> AsyncIterator[tuple[WarmClaims, WarmClaims]]:
    """Two routers with one store."""
    names = (RouterId("one"), RouterId("two"))
    if request.param == "memory":
        book: dict[Subject, tuple[RouterId | None, float, int]] = {}
        first, second = (MemoryWarmClaims(name, time.monotonic, book) for name in names)
        yield first, second
        return
    server: StateServer = request.getfixturevalue(SERVERS[request.param])
    await server.flush()
    async with AsyncExitStack() as stack:
        made = [RedisWarmClaims(RedisSettings(url=server.url), name) for name in names]
        for claims in made:
            stack.push_async_callback(claims.aclose)
        yield made[0], made[1]
        assert not await server.keys_without_ttl()


async def test_one_router_has_a_claim_until_it_gives_it_back(
    rivals: tuple[WarmClaims, WarmClaims],
) -> None:
    one, two = rivals
    assert await one.take(SUBJECT, 0, BUDGET) == Claimed(Answer.GRANTED, 0)
    assert await two.take(SUBJECT, 10, BUDGET) == Claimed(Answer.TAKEN, 0)
    assert await one.take(SUBJECT, 400, BUDGET) == Claimed(Answer.GRANTED, 400)
    await two.give_back(SUBJECT)
    assert await two.take(SUBJECT, 0, BUDGET) == Claimed(Answer.TAKEN, 400)
    await one.give_back(SUBJECT)
    assert await two.take(SUBJECT, 0, BUDGET) == Claimed(Answer.GRANTED, 400)
    other = SUBJECT._replace(life="another life")
    assert await one.take(other, 0, BUDGET) == Claimed(Answer.GRANTED, 0)


async def test_a_budget_is_spent_once_whoever_spends_it(
    rivals: tuple[WarmClaims, WarmClaims],
) -> None:
    one, two = rivals
    assert await one.take(SUBJECT, 700, BUDGET) == Claimed(Answer.GRANTED, 700)
    assert await one.take(SUBJECT, 301, BUDGET) == Claimed(Answer.SPENT, 700)
    await one.give_back(SUBJECT)
    assert await two.take(SUBJECT, 300, BUDGET) == Claimed(Answer.GRANTED, BUDGET)
    assert await two.take(SUBJECT, 1, BUDGET) == Claimed(Answer.SPENT, BUDGET)
    assert await two.take(SUBJECT, 0, BUDGET) == Claimed(Answer.GRANTED, BUDGET)
    assert await two.take(SUBJECT, 500, 2**53) == Claimed(Answer.GRANTED, 1_500)


async def test_a_claim_of_a_router_that_is_gone_ends_and_what_it_spent_stays(
    rivals: tuple[WarmClaims, WarmClaims], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = rivals
    monkeypatch.setattr(warm_claim, "CLAIM_S", 0.05)
    await one.take(SUBJECT, 700, BUDGET)

    async def is_free() -> bool:
        return await two.take(SUBJECT, 0, BUDGET) == Claimed(Answer.GRANTED, 700)

    await until(is_free, "the end of the claim")


@pytest.mark.parametrize("server", ["valkey"])
async def test_keys_of_another_type_are_replaced_and_no_server_is_a_state_error(
    request: pytest.FixtureRequest, server: str
) -> None:
    store: StateServer = request.getfixturevalue(server)
    await store.flush()
    base = key_base(SUBJECT)
    await store.command("SADD", f"{base}:owner", "x")
    await store.command("SADD", f"{base}:account", "x")
    claims = RedisWarmClaims(RedisSettings(url=store.url), RouterId("one"))
    try:
        assert await claims.take(SUBJECT, 5, BUDGET) == Claimed(Answer.GRANTED, 5)
        await store.command("SET", f"{base}:account", "no number", "PX", 60_000)
        assert await claims.take(SUBJECT, 7, BUDGET) == Claimed(Answer.GRANTED, 7)
    finally:
        await claims.aclose()
    away = RedisWarmClaims(RedisSettings(url="redis://127.0.0.1:1/0"), RouterId("one"))
    with pytest.raises(StateError):
        await away.take(SUBJECT, 0, BUDGET)
    await away.aclose()
