"""What must be true of a fleet that was struck and is at rest again."""

from __future__ import annotations

import json
import random
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from chaos.evidence import End
from state.client import RedisSettings
from state.mirror import Mirror
from state.model import ReplicaId, RouterId
from state.prefix import cached_tokens, chain_of, chain_root
from support.chaos_load import CANARY, judge
from support.fleet import until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from support.chaos_load import Entry, Load, Script
    from support.fleet import LocalFleet, Replica, Router

REST_S: Final = 30.0
SETTLE_S: Final = 60.0
KEPT_DECISIONS: Final = 1_000
OUTCOMES: Final = {
    End.COMPLETE: {"done"},
    End.ERROR_EVENT: {"failed"},
    End.HTTP_ERROR: {"failed", "done"},
    End.CLOSED: {"failed"},
    End.LEFT: {"cancelled", "done", "failed"},
}
"""What a router may have noted of a request; an engine's own error is passed on as it is."""


async def assert_at_rest(fleet: LocalFleet) -> None:
    """Assert that nothing is in flight: no lease, no sequence, no page, no spare connection."""
    for router in fleet.routers:
        await fleet.all_up(router)
    await fleet.settled(REST_S)
    for router in fleet.routers:
        async with fleet.http.get(f"{router.url}/readyz") as answer:
            assert answer.status == 200, await answer.text()
        await until(partial(_has_let_go, fleet, router), "idle connections closed")


async def _has_let_go(fleet: LocalFleet, router: Router) -> bool:
    gauges = await fleet.gauges(router.admin_url)
    assert gauges["warmroute_inflight_requests"] == 0, gauges
    return gauges["warmroute_replica_connections"] <= 2 * len(fleet.replicas)


async def assert_told_truly(fleet: LocalFleet, ledger: Sequence[Entry], live_s: float) -> int:
    """Assert that requests since ``live_s`` are on record once, as they ended; return how many."""
    checked = 0
    for index, router in enumerate(fleet.routers):
        ids = [
            record["client_request_id"] for record in await fleet.decisions(KEPT_DECISIONS, router)
        ]
        for entry in ledger:
            if entry.router_index != index or entry.began_s < live_s or entry.request_id not in ids:
                continue
            record = await fleet.decision(entry.request_id, router)
            assert ids.count(entry.request_id) == 1, entry
            assert entry.end is not None
            assert record["outcome"] in OUTCOMES[entry.end], (str(entry), record)
            checked += 1
    return checked


async def assert_warmth_is_known(fleet: LocalFleet, load: Load, seed: int) -> None:
    """Assert that what a fresh router predicts is what each worker reports, within one block."""
    rng = random.Random(seed)
    wrong = []
    observer = RouterId("observer")
    settings = RedisSettings(url=fleet.state_url, command_timeout_s=10.0, connect_timeout_s=10.0)
    async with Mirror(settings, observer, clock=time.monotonic, rng=rng) as mirror:
        await until(partial(_knows_all, mirror, fleet), "every replica in the store", SETTLE_S)
        assert await mirror.settle(SETTLE_S)
        foreign = mirror.foreign_leases()
        assert not any(total.inflight or total.uncached_tokens for total in foreign.values())
        for replica in fleet.replicas:
            for entry in rng.sample(load.ledger, min(8, len(load.ledger))):
                predicted = _predicted_tokens(mirror, replica, load.script, entry.request)
                reported = await _reported_tokens(fleet, replica.url, entry.request)
                identity = mirror.replicas()[ReplicaId(replica.name)].record.identity
                if abs(predicted - reported) > identity.block_tokens:
                    wrong.append((replica.name, entry.request_id, predicted, reported))
    assert not wrong, wrong


async def _knows_all(mirror: Mirror, fleet: LocalFleet) -> bool:
    return set(mirror.replicas()) == {replica.name for replica in fleet.replicas}


def _predicted_tokens(
    mirror: Mirror, replica: Replica, script: Script, request: dict[str, Any]
) -> int:
    name = ReplicaId(replica.name)
    identity = mirror.replicas()[name].record.identity
    packed = script.packed(request)
    chain = chain_of(chain_root(identity, 0), packed, identity.block_tokens, 0)
    overlap = mirror.overlap(chain).get(name)
    blocks = overlap.gpu_blocks if overlap is not None else 0
    return cached_tokens(blocks, identity.block_tokens, len(packed) // 4)


async def _reported_tokens(fleet: LocalFleet, url: str, request: dict[str, Any]) -> int:
    body = {**request, "stream": False, "max_tokens": 1}
    body.pop("stream_options", None)
    async with fleet.http.post(f"{url}/v1/chat/completions", json=body) as answer:
        assert answer.status == 200, await answer.text()
        usage = (await answer.json())["usage"]
    return int((usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


async def assert_serving_well(fleet: LocalFleet, load: Load, count: int) -> None:
    """Assert that new requests succeed through every router, predicted right to a block."""
    for index in range(len(fleet.routers)):
        for _ in range(count):
            entry = await load.ask(fleet.http, index, is_stream=False)
            judge(entry, load.script.answer(entry.request))
            assert entry.end is End.COMPLETE, str(entry)
            assert not entry.fault, str(entry)
            predicted = int(entry.headers["x-warmroute-predicted-cached-tokens"])
            usage = json.loads(entry.body)["usage"]
            reported = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
            assert abs(predicted - reported) <= 64, (str(entry), predicted, reported)


async def assert_nothing_is_shown(fleet: LocalFleet) -> None:
    """Assert that no prompt text is in what operators see."""
    for router in fleet.routers:
        for path in ("/metrics", f"/debug/decisions?limit={KEPT_DECISIONS}", "/debug/replicas"):
            async with fleet.http.get(router.admin_url + path) as answer:
                assert CANARY not in await answer.text(), path
