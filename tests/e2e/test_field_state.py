"""State that forgets or lies, names that clients make up: under a whole router with requests."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from state.client import command_client
from state.model import ChangeBatch, Generation, ReplicaId, ReplicaRecord
from state.prefix import chain_of, chain_root, namespace_of, pack_tokens
from state.redis_writer import RedisWriter
from state.schema import ReplicaKeys
from support.conversation import ask, at_once, sdk
from support.dials import Dials
from support.fleet import MODEL, LocalFleet, until
from support.port import free_port
from support.raw import RawClient
from support.stage import chat_body, post_to

if TYPE_CHECKING:
    from support.conversation import Answered
    from support.valkey import ValkeyProcess

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = "quick brown foxes jump over lazy dogs " * 60


async def test_a_flush_under_load_fails_nothing_and_the_hits_come_back(
    fleet: LocalFleet, valkey: ValkeyProcess
) -> None:
    """A85: no error, nothing negative, and what the engines hold is known again."""
    sessions = [f"flush {number} " for number in range(6)]
    lows = []
    async with sdk(fleet.router.url) as client:

        async def turn(name: str) -> Answered:
            return await ask(client, MODEL, [("user", name + TEXT)], output_tokens=8)

        async def session(name: str) -> list[Answered]:
            return [await turn(name) for _ in range(12)]

        async def flush() -> None:
            for _ in range(4):
                await valkey.command("FLUSHALL")
                seen = await fleet.seen()
                lows.append(min(one["inflight"] for one in seen.values()))
                lows.append(min(one["inflight_elsewhere"] for one in seen.values()))
                await asyncio.sleep(0.1)

        flushing = asyncio.create_task(flush())
        answers = await at_once(sessions, len(sessions), session)
        await flushing
        assert all(one.text for many in answers for one in many)
        assert min(lows) >= 0

        async def is_back() -> bool:
            again = [await turn(name) for name in sessions]
            return all(one.predicted_tokens > one.prompt_tokens - 65 for one in again) and all(
                abs(one.error_tokens) < 64 for one in again
            )

        await until(is_back, "every session is warm and known to be")
    await fleet.settled()
    await fleet.all_up(fleet.router)


async def test_a_sidecar_with_a_wrong_event_port_says_so(fleet: LocalFleet) -> None:
    """B50: a real worker, real requests, no hit will ever be seen; the operator is told."""
    port, nobody = free_port(), f"tcp://127.0.0.1:{free_port()}"
    flags = ("--metrics", f"127.0.0.1:{port}", "--events", nobody, "--event-silence-s", "0.5")
    sidecar = await fleet.start_sidecar("deaf", fleet.replicas[0].url, *flags).ready()
    try:
        await fleet.all_up(fleet.router, 3)
        dials = Dials(port)
        assert (await dials.read())["events_missing"] == 0
        async with sdk(fleet.router.url) as client:

            async def is_missing() -> bool:
                await ask(client, MODEL, [("user", TEXT)])
                return (await dials.read())["events_missing"] == 1

            await until(is_missing, "the gauge")
        assert sidecar.log.read_text().count("no KV events: replica=deaf") == 1
        assert MODEL not in await dials.text()
    finally:
        await asyncio.to_thread(fleet.processes.stop, sidecar)
        await fleet.all_up(fleet.router)


async def record_of(valkey: ValkeyProcess, name: str) -> ReplicaRecord:
    found: list[bytes] = []

    async def is_there() -> bool:
        value = await valkey.command("HGET", ReplicaKeys(ReplicaId(name)).record, "value")
        found.append(value)
        return value is not None

    await until(is_there, f"a record of {name}")
    return msgspec.json.decode(found[-1], type=ReplicaRecord)


async def complete(fleet: LocalFleet, prompt: list[int], model: str = MODEL) -> dict[str, Any]:
    """Complete a prompt of token ids; return its receipt and what the engine had of it."""
    body = {"model": model, "prompt": prompt, "max_tokens": 2}
    async with fleet.http.post(f"{fleet.router.url}/v1/completions", json=body) as answer:
        told = msgspec.json.decode(await answer.read())
        assert answer.status == 200, told
        headers = answer.headers
    return {
        "replica": headers["x-warmroute-replica"],
        "predicted": int(headers["x-warmroute-predicted-cached-tokens"]),
        "cached": (told["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0,
    }


@pytest.mark.parametrize("endpoint", ["nobody-knows-where", "http://0.0.0.0:1"])
async def test_an_index_that_names_a_replica_nobody_can_reach_is_no_use_and_no_harm(
    fleet: LocalFleet, valkey: ValkeyProcess, endpoint: str
) -> None:
    """B44: it holds the whole prompt, and is passed over; it is counted and told once."""
    prompt = [random.Random(endpoint).randrange(100, 200) for _ in range(650)]
    known = await record_of(valkey, "w0")
    ghost = msgspec.structs.replace(
        known,
        replica=ReplicaId("ghost"),
        endpoint=endpoint,
        generation=Generation("g"),
        sidecar="s",
    )
    identity = ghost.identity
    chain = chain_of(chain_root(identity, 0), pack_tokens(prompt), identity.block_tokens, 0)
    client = command_client(valkey.settings)
    writer = RedisWriter(client, clock=time.monotonic, rng=random.Random(1))
    try:
        await writer.register(ghost)
        await writer.apply(
            [
                ChangeBatch(
                    replica=ghost.replica,
                    generation=ghost.generation,
                    namespace=namespace_of(identity),
                    sequence=1,
                    stored=tuple(chain),
                )
            ]
        )

        async def counted(wanted: int) -> None:
            async def is_so() -> bool:
                gauges = await fleet.gauges(fleet.router.url)
                return gauges["warmroute_unusable_records"] == wanted

            await until(is_so, f"{wanted} unusable records")

        await counted(1)
        told = await complete(fleet, prompt)
        assert told["replica"] in {"w0", "w1"}
        assert (told["predicted"], told["cached"]) == (0, 0)
        assert "ghost" not in await fleet.seen()
        log = fleet.router.child.log.read_text()
        await writer.deregister(ghost.replica, ghost.generation)
        await counted(0)
        assert log.count("replica ghost is ignored") >= 1
        assert log.count("replica ghost is ignored") <= 2
    finally:
        await client.aclose()


async def test_two_models_share_no_block_of_the_same_prompt(fleet: LocalFleet) -> None:
    """A73: neither predicted nor cached; and each is warm for itself."""
    prompt = [random.Random(73).randrange(100, 200) for _ in range(650)]
    worker = await fleet.start_worker("other", "--model", "other-model").ready()
    sidecar = await fleet.start_sidecar("w2", worker.words[0]).ready()
    try:
        await fleet.all_up(fleet.router, 3)
        cold = await complete(fleet, prompt)
        warm = await complete(fleet, prompt)
        assert (cold["predicted"], cold["cached"]) == (0, 0)
        assert warm["predicted"] == warm["cached"] > 500
        other_cold = await complete(fleet, prompt, "other-model")
        assert other_cold == {"replica": "w2", "predicted": 0, "cached": 0}
        other_warm = await complete(fleet, prompt, "other-model")
        assert other_warm["predicted"] == other_warm["cached"] > 500
        assert (await complete(fleet, prompt))["replica"] == warm["replica"]
    finally:
        for child in (sidecar, worker):
            await asyncio.to_thread(fleet.processes.stop, child)
        await fleet.all_up(fleet.router)


async def test_a_prompt_without_known_tokens_is_routed_by_load_and_counted(
    fleet: LocalFleet,
) -> None:
    """B42, A70: an image; no tokens are made up for its text, and an operator can see how often."""
    image = {"type": "image_embeds", "image_embeds": "AAAA"}
    messages = [{"role": "user", "content": [{"type": "text", "text": TEXT}, image]}]
    body = chat_body(messages=messages, stream=False)
    counter = "warmroute_unroutable_prompts_total"
    before = (await fleet.gauges(fleet.router.url))[counter]
    for _ in range(2):
        async with fleet.http.post(f"{fleet.router.url}/v1/chat/completions", data=body) as answer:
            assert answer.headers["x-warmroute-reason"] == "load"
            assert answer.headers["x-warmroute-predicted-cached-tokens"] == "0"
            record = await fleet.decision(answer.headers["x-warmroute-request-id"])
            assert (record["unroutable"], record["prompt_tokens"]) == ("non-text content", 0)
    assert (await fleet.gauges(fleet.router.url))[counter] == before + 2


async def series(fleet: LocalFleet) -> set[str]:
    """Return every series that the router exports, without its value."""
    async with fleet.http.get(f"{fleet.router.url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return {line.rpartition(" ")[0] for line in lines if not line.startswith("#")}


async def test_names_that_clients_make_up_make_no_series(fleet: LocalFleet) -> None:
    """A93, B51: paths, models, adapters, users, ids, salts; after one of each, no new series."""
    rng = random.Random(93)

    def odd_requests() -> bytes:
        name = f"made-up-{rng.randrange(10**9)}"
        bodies = [
            (post_to(chat_body(model=name, max_tokens=1)), 1),
            (post_to(chat_body(model=f"{MODEL}:{name}", user=name, max_tokens=1)), 1),
            (post_to(b"{}", f"/v1/{name}"), 1),
            (post_to(b"{}", f"/{name}/chat/completions?x={name}"), 1),
            (post_to(b"{", "/v1/completions", x_request_id=name), 1),
        ]
        return b"".join(data for data, _ in bodies)

    async def send(rounds: int) -> Counter[int]:
        client = await RawClient.connect(fleet.router.port)
        statuses: Counter[int] = Counter()
        for _ in range(rounds):
            client.send(odd_requests())
            for _ in range(5):
                statuses[(await client.reply()).status] += 1
        await client.close()
        return statuses

    assert set(await send(1)) == {400, 404}
    async with sdk(fleet.router.url) as client:
        await ask(client, MODEL, [("user", "hello")], user="one", cache_salt="one")
        before = await series(fleet)
        statuses = await send(2_000)
        assert statuses == {400: 2_000, 404: 8_000}
        for number in range(20):
            await ask(client, MODEL, [("user", "hello")], user=f"u{number}", cache_salt=f"{number}")
    assert await series(fleet) == before
    assert not [one for one in before if "made-up" in one]


async def test_a_flag_is_used_and_told(fleet: LocalFleet) -> None:
    """A94: what the command line says is what the router does, and what its records say."""
    words = ["--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", "--redis", fleet.state_url]
    words += ["--policy", "round_robin", "--seed", "4242", "--receipts"]
    child = await fleet.processes.start("router-flags", "serve", *words).ready()
    url, admin = child.words[0], child.words[2]

    async def asked() -> bool:
        async with fleet.http.post(f"{url}/v1/chat/completions", data=chat_body()) as answer:
            await answer.read()
            return answer.status == 200 and answer.headers["x-warmroute-reason"] == "rule"

    await until(asked, "an answer of the round robin")
    [record] = await fleet.get(f"{admin}/debug/decisions?limit=1")
    assert (record["policy"], record["seed"]) == ("RoundRobin", 4242)
    assert await asyncio.to_thread(fleet.processes.stop, child) == 0
