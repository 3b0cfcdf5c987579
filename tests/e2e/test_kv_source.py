"""A whole router in front of scripted engines that can fetch KV pages: what each one is told."""

from __future__ import annotations

import contextlib
import json
import random
import time
from typing import TYPE_CHECKING, Any

import pytest

from state.client import RedisSettings, command_client
from state.model import ChangeBatch, Generation, ModelIdentity, ReplicaId, ReplicaRecord, Tier
from state.prefix import chain_of, chain_root, namespace_of, pack_tokens
from state.redis_writer import RedisWriter
from support.fleet import MODEL, until
from support.stage import Actor, Stage, post_to, staged_router
from support.state_backend import LASTING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from support.raw import Reply

WARM, COLD = Actor("warm"), Actor("cold")
TOKENS = [random.Random(5).randrange(100, 200) for _ in range(1_280)]
IDENTITY = ModelIdentity(model=MODEL)
EVIL = b"http://10.6.6.6:1"


async def announce(state_url: str, *, can_fetch: bool, tier: Tier) -> None:
    """Register both actors; the warm one holds the whole prompt in ``tier``."""
    client = command_client(RedisSettings(url=state_url))
    writer = RedisWriter(client, clock=time.monotonic, rng=random.Random(1), timing=LASTING)
    for actor in (WARM, COLD):
        await writer.register(
            ReplicaRecord(
                replica=ReplicaId(actor.name),
                endpoint=actor.url,
                generation=Generation("g"),
                identity=IDENTITY,
                page_tokens=16,
                sidecar=actor.name,
                can_fetch=can_fetch,
            )
        )
    chain = chain_of(chain_root(IDENTITY, 0), pack_tokens(TOKENS), IDENTITY.block_tokens, 0)
    batch = ChangeBatch(
        replica=ReplicaId(WARM.name),
        generation=Generation("g"),
        namespace=namespace_of(IDENTITY),
        sequence=1,
        tier=tier,
        stored=chain,
    )
    await writer.apply([batch])
    await client.aclose()


@contextlib.asynccontextmanager
async def engines(
    folder: Path, *, can_fetch: bool = True, tier: Tier = Tier.GPU, **config: Any
) -> AsyncIterator[Stage]:
    """Start a router that gives the actors turns; both are registered and the prompt is known."""
    for actor in (WARM, COLD):
        actor.replica.requests.clear()
    settings = {"policy": {"kind": "round_robin"}, "placements": {"pending_s": 0.001}, **config}
    async with staged_router(folder, [WARM, COLD], **settings) as stage:
        await announce(stage.fleet.state_url, can_fetch=can_fetch, tier=tier)

        async def is_known() -> bool:
            seen = await stage.fleet.seen()
            return bool(seen["warm"]["resident_blocks"] == 20 and seen["cold"]["has_events"])

        await until(is_known, "what the engines hold")
        yield stage


async def ask(stage: Stage) -> Reply:
    """Send the prompt, with a source of the client's own choice."""
    body = json.dumps({"model": MODEL, "prompt": TOKENS, "max_tokens": 1}).encode()
    headers = {"X_Warmroute_Kv_Source": EVIL.decode(), "Connection": "X-Warmroute-Kv-Source"}
    reply = await stage.ask(post_to(body, "/v1/completions", **headers))
    assert reply.status == 200
    return reply


def told(actor: Actor) -> list[list[bytes]]:
    """Return the sources that each request to ``actor`` named."""
    return [received.all(b"x-warmroute-kv-source") for received in actor.posts()]


async def test_a_request_that_misses_the_warm_engine_names_it(tmp_path: Path) -> None:
    async with engines(tmp_path) as stage:
        replies = [await ask(stage) for _ in range(4)]
        assert told(WARM) == [[], []]
        assert told(COLD) == [[WARM.url.encode()]] * 2
        for reply in replies:
            [request_id] = reply.all(b"x-warmroute-request-id")
            [attempt] = (await stage.fleet.decision(request_id.decode()))["attempts"]
            is_cold = attempt["decision"]["replica"] == "cold"
            assert attempt["kv_source"] == ("warm" if is_cold else None)
            assert not reply.all(b"x-warmroute-kv-source")
        gauges = await stage.fleet.gauges(stage.fleet.router.url)
        assert gauges["warmroute_kv_sources_total"] == 2
        assert (await stage.fleet.seen())["warm"]["can_fetch"]


@pytest.mark.parametrize(
    "changes",
    [
        {"can_fetch": False},
        {"kv_transfer": {"enabled": False}},
        {"kv_transfer": {"min_tokens": 1_280}},
    ],
)
async def test_engines_that_cannot_or_shall_not_fetch_are_told_nothing(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """1,279 tokens of the prompt can be held: its last one is always computed."""
    async with engines(tmp_path, **changes) as stage:
        for _ in range(2):
            await ask(stage)
        assert told(WARM) == told(COLD) == [[]]
        gauges = await stage.fleet.gauges(stage.fleet.router.url)
        assert gauges["warmroute_kv_sources_total"] == 0


async def test_a_receipt_tells_gpu_and_lower_tiers_apart(tmp_path: Path) -> None:
    """B23: what was offloaded is no hit on the GPU, and not nothing."""
    policy = {"kind": "weighted"}
    async with engines(tmp_path, tier=Tier.HOST, policy=policy, can_fetch=False) as stage:
        reply = await ask(stage)
        assert reply.all(b"x-warmroute-replica") == [b"warm"]
        assert reply.all(b"x-warmroute-reason") == [b"prefix"]
        assert reply.all(b"x-warmroute-predicted-cached-tokens") == [b"0"]
        assert reply.all(b"x-warmroute-predicted-lower-tier-tokens") == [b"1279"]
