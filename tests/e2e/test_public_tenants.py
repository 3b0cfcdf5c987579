"""S-01: public prefixes of tenants through router, sidecar, worker and store: who hits what.

Every prediction is compared with what the engine reports.
"""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import msgspec
import pytest
import pytest_asyncio
from aiohttp import web
from msgspec import Struct

from prompt.codec import Codec, load_codec
from state.prefix import TOKEN_BYTES
from state.public import PUBLIC_PREFIX_HEADER, mark_of
from state.secret import engine_salt
from support.fleet import MODEL, FleetPlan, LocalFleet, Router, until
from support.tenant import SECRET, key_of, tenant_config
from support.tokenizer import write_tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

pytestmark = pytest.mark.asyncio(loop_scope="module")

BLOCK: Final = 64
PAGE: Final = 16
SYSTEM: Final = {"role": "system", "content": "You are the clerk of a small office. " * 24}
STRANGER: Final = {"role": "system", "content": "You are the clerk of a large office. " * 24}
TEXT: Final = "The quick brown fox jumps over the lazy dog, and then it does so again. " * 16
SECRET_TASK: Final = " the invoice of March is confidential, 4711 pieces at 12.50. " * 12
PUBLIC: Final = [
    {"name": "clerk", "messages": [SYSTEM]},
    {"name": "fox", "model": MODEL, "prompt": TEXT},
]
NAMES: Final = ("acme", "other", "left", "right")


class Got(Struct, frozen=True):
    """What a request got."""

    replica: str
    predicted_tokens: int
    cached_tokens: int
    prompt_tokens: int


class Stage(Struct, frozen=True):
    fleet: LocalFleet
    codec: Codec

    def messages(self, number: int, system: dict[str, str] = SYSTEM) -> list[dict[str, str]]:
        return [system, {"role": "user", "content": f"{number}:{SECRET_TASK}"}]

    def public_tokens(self) -> int:
        """Return the whole blocks of what two conversations of the clerk have in common."""
        one, other = (
            self.codec.chat_tokens([SYSTEM, {"role": "user", "content": task}], None, options={})
            for task in "ab"
        )
        size = TOKEN_BYTES
        pairs = zip(one, other, strict=False)
        return (
            next(at for at, pair in enumerate(pairs) if len({*pair}) > 1) // size // BLOCK * BLOCK
        )

    async def post(
        self,
        tenant: str,
        fields: Mapping[str, Any],
        headers: Mapping[str, str] | None = None,
        router: Router | None = None,
    ) -> Got:
        """Ask, and wait until the events have told what is new of it."""
        before = await self.resident_blocks()
        path = "chat/completions" if "messages" in fields else "completions"
        url = f"{(router or self.fleet.router).url}/v1/{path}"
        body = {"model": MODEL, "max_tokens": 1, **fields}
        sent = {"Authorization": f"Bearer {key_of(tenant)}", **(headers or {})}
        async with self.fleet.http.post(url, json=body, headers=sent) as answer:
            told = msgspec.json.decode(await answer.read())
            assert answer.status == 200, told
            usage = told["usage"]
            got = Got(
                answer.headers["x-warmroute-replica"],
                int(answer.headers["x-warmroute-predicted-cached-tokens"]),
                usage["prompt_tokens_details"]["cached_tokens"],
                usage["prompt_tokens"],
            )
        known = -(-got.cached_tokens // PAGE) * PAGE // BLOCK
        await self.told(before + got.prompt_tokens // BLOCK - known)
        return got

    async def chat(self, tenant: str, number: int, router: Router | None = None) -> Got:
        return await self.post(tenant, {"messages": self.messages(number)}, router=router)

    async def resident_blocks(self) -> int:
        seen = await self.fleet.seen()
        return sum(one["resident_blocks"] for one in seen.values())

    async def told(self, blocks: int) -> None:
        """Wait until the first router knows of so many blocks."""

        async def is_so() -> bool:
            return await self.resident_blocks() == blocks

        await until(is_so, f"{blocks} blocks are known")


@asynccontextmanager
async def running(folder: Path, replicas: int, **config: Any) -> AsyncIterator[Stage]:
    tokenizer = write_tokenizer(folder / "tokenizer")
    told = tenant_config(folder, **{name: {"receipts": True} for name in NAMES})
    told |= {"public_prefixes": PUBLIC, "tenants_state_file": str(folder / "epochs.json"), **config}
    flags = ("--deployment-key-file", told["deployment_key_file"])
    plan = FleetPlan(replicas=replicas, tokenizer=tokenizer, config=told, sidecar_flags=flags)
    async with LocalFleet(folder, plan) as fleet:
        yield Stage(fleet, load_codec(tokenizer))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    async with running(tmp_path_factory.mktemp("public"), 1) as made:
        yield made


async def test_tenants_share_the_whole_blocks_of_a_public_prefix_and_none_of_what_follows(
    stage: Stage,
) -> None:
    public = stage.public_tokens()
    assert public >= 3 * BLOCK
    first = await stage.chat("acme", 1)
    assert (first.predicted_tokens, first.cached_tokens) == (0, 0)
    assert first.prompt_tokens > public + 3 * BLOCK
    for tenant in ("other", "left"):  # the same prompt, word for word
        got = await stage.chat(tenant, 1)
        assert (got.predicted_tokens, got.cached_tokens) == (public, public)
    for tenant in ("acme", "other", "left"):
        got = await stage.chat(tenant, 1)
        whole = (got.prompt_tokens - 1) // PAGE * PAGE
        assert got.cached_tokens == whole
        assert got.predicted_tokens == whole // BLOCK * BLOCK


async def test_a_public_text_is_shared_by_completions_of_all_tenants(stage: Stage) -> None:
    public = len(stage.codec.text_tokens(TEXT)) // TOKEN_BYTES // BLOCK * BLOCK
    first = await stage.post("acme", {"prompt": TEXT + SECRET_TASK})
    assert (first.predicted_tokens, first.cached_tokens) == (0, 0)
    second = await stage.post("other", {"prompt": TEXT + SECRET_TASK})
    assert (second.predicted_tokens, second.cached_tokens) == (public, public)


async def test_no_word_of_a_client_makes_anything_public(stage: Stage) -> None:
    """Its own header in all spellings, for the very prompt of another tenant, and its salt."""
    public = stage.public_tokens()
    stolen = engine_salt(SECRET, "tenant:acme", "")
    name = PUBLIC_PREFIX_HEADER
    for number, fields, spelled in (
        (10, {}, [name]),
        (11, {}, [name.lower()]),
        (12, {}, [name.upper(), "Connection"]),
        (13, {"cache_salt": stolen}, [name]),
        (14, {"cache_salt": "", "public_prefixes": PUBLIC, "salts_tails": True}, [name.title()]),
        (15, {name: "", "public": True}, ["X-Warmroute-Salts-Tails"]),
    ):
        await stage.chat("acme", number)
        prompt = stage.codec.chat_tokens(stage.messages(number), None, options={})
        end = len(prompt) // TOKEN_BYTES // BLOCK * BLOCK * TOKEN_BYTES
        mark = mark_of(prompt[:end]).value
        told = {one: name if one == "Connection" else mark for one in spelled}
        given = {
            one: mark if value == "" and one == name else value for one, value in fields.items()
        }
        thief = await stage.post("other", {"messages": stage.messages(number), **given}, told)
        assert (thief.predicted_tokens, thief.cached_tokens) == (public, public), (fields, spelled)


async def test_a_part_of_a_public_prefix_is_private(stage: Stage) -> None:
    """Half of it and then something else; all but its last token; another one's like it."""
    prompt = stage.codec.chat_tokens(stage.messages(20), None, options={})
    size, public = TOKEN_BYTES, stage.public_tokens()
    head, rest = prompt[: public * size], prompt[public * size :]
    parts = (
        head[: public // 2 * size] + rest + b"\x20\0\0\0" * BLOCK,
        head[:-size] + rest + rest,
        head[size:] + rest,
        head[: (public - 1) * size],
    )
    seen: list[list[tuple[int, int]]] = []
    for tenant in ("acme", "other"):  # the second hits what it sent itself, like the first
        seen.append([])
        for packed in parts:
            got = await stage.post(tenant, {"prompt": memoryview(packed).cast("I").tolist()})
            seen[-1].append((got.predicted_tokens, got.cached_tokens // BLOCK * BLOCK))
    assert seen[0] == seen[1]
    assert seen[0][0] == seen[0][2] == (0, 0)
    for tenant in ("left", "right"):
        got = await stage.post(tenant, {"messages": stage.messages(20, STRANGER)})
        assert (got.predicted_tokens, got.cached_tokens) == (0, 0)


async def test_ending_a_scope_ends_its_tails_and_leaves_what_is_public(stage: Stage) -> None:
    """S-10: the index has no block of them any more; other tenants go on hitting theirs."""
    public = stage.public_tokens()
    for tenant in ("left", "right"):
        await stage.chat(tenant, 30)
    blocks = await stage.resident_blocks()
    url = f"{stage.fleet.router.admin_url}/admin/scopes/tenant:left"
    async with stage.fleet.http.delete(url) as answer:
        done = msgspec.json.decode(await answer.read())
        assert (answer.status, done["result"]) == (200, "done")
    tail = (await stage.chat("right", 30)).prompt_tokens // BLOCK - public // BLOCK
    assert done["index"]["blocks"] >= tail > 0
    await stage.told(blocks - done["index"]["blocks"])
    got = await stage.chat("left", 30)
    assert (got.predicted_tokens, got.cached_tokens) == (public, public)
    kept = await stage.chat("right", 30)
    assert kept.predicted_tokens == (kept.prompt_tokens - 1) // PAGE * PAGE // BLOCK * BLOCK
    async with stage.fleet.http.post(f"{url.replace('left', 'right')}/rotate") as answer:
        assert answer.status == 200
    rotated = await stage.chat("right", 30)
    assert (rotated.predicted_tokens, rotated.cached_tokens) == (public, public)


async def test_a_lookup_in_the_store_finds_public_blocks_and_tails_where_they_are_kept(
    stage: Stage, tmp_path: Path
) -> None:
    """A router without an index, and one with: both predict what the engine has."""
    public = stage.public_tokens()
    direct = await stage.fleet.start_router(
        state={"redis": stage.fleet.state_url, "lookup": "direct"},
        tenants_state_file=str(tmp_path / "epochs.json"),
    )
    await stage.fleet.all_up(direct)
    number = 40

    async def is_found() -> bool:
        """Ask for what is new each time: an answer of the store that is late is not waited for."""
        nonlocal number
        number += 1
        await stage.chat("acme", number)
        got = await stage.chat("other", number, direct)
        assert got.cached_tokens == public
        assert got.predicted_tokens in {0, public}
        own = await stage.chat("acme", number, direct)
        whole = own.cached_tokens // BLOCK * BLOCK
        assert own.predicted_tokens in {0, whole}
        return (got.predicted_tokens, own.predicted_tokens) == (public, whole) != (public, public)

    await until(is_found, "both pieces of a chain")


class ShutFront:
    """An engine that salts whole prompts: a worker that does not say that it could do less."""

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.headers: list[str] = []
        self.asked = 0

    async def pass_on(self, request: web.Request) -> web.Response:
        """Answer what the worker does."""
        self.headers += [name.lower() for name in request.headers]
        self.asked += request.path.startswith("/v1/chat")
        body = await request.read()
        async with (
            aiohttp.ClientSession() as session,
            session.request(request.method, self.worker + request.path, data=body) as answer,
        ):
            raw = await answer.read()
            if request.path == "/v1/models":
                told = json.loads(raw)
                for card in told["data"]:
                    assert card.pop("salts_tails") is True
                raw = json.dumps(told).encode()
            kind = answer.headers.get("Content-Type", "text/plain")
            return web.Response(status=answer.status, body=raw, headers={"Content-Type": kind})


@asynccontextmanager
async def shut_front(worker: str) -> AsyncIterator[tuple[ShutFront, str]]:
    front = ShutFront(worker)
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", front.pass_on)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield front, f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_in_a_mixed_pool_each_replica_s_prediction_is_what_it_has(tmp_path: Path) -> None:
    """By turns to a worker that shares the public part and to an engine that cannot."""
    async with running(tmp_path, 1, policy={"kind": "round_robin"}) as stage:
        fleet, public = stage.fleet, stage.public_tokens()
        worker = await fleet.start_worker("shut").ready()
        async with shut_front(worker.words[0]) as (front, url):
            await fleet.start_sidecar("shut", url).ready()
            await fleet.all_up(fleet.router, 2)
            told = {name: one["salts_tails"] for name, one in (await fleet.seen()).items()}
            assert told == {"w0": True, "shut": False}
            seen: dict[tuple[str, str], Got] = {}
            for tenant in ("acme", "other", "left"):
                for number in range(2):
                    got = await stage.chat(tenant, number)
                    seen[got.replica, f"{tenant}{number}"] = got
                    if got.replica == "shut":
                        assert got.predicted_tokens == got.cached_tokens == 0
                    else:
                        assert got.predicted_tokens == got.cached_tokens
                        assert got.cached_tokens in {0, public}
            assert {replica for replica, _ in seen} == {"w0", "shut"}
            on_open = [got.cached_tokens for (replica, _), got in seen.items() if replica == "w0"]
            assert on_open == [0] + [public] * (len(on_open) - 1)
            assert len(on_open) > 1
            again: set[tuple[str, bool]] = set()
            for tenant in ("acme", "other", "left"):
                for number in (0, 0, 1, 1):
                    got = await stage.chat(tenant, number)
                    assert got.predicted_tokens == got.cached_tokens // BLOCK * BLOCK
                    again.add((got.replica, got.cached_tokens > public))
            assert {("w0", True), ("shut", True)} <= again
            assert front.asked
            assert PUBLIC_PREFIX_HEADER.lower() not in front.headers


async def test_several_prompts_and_answers_of_a_request_share_the_public_part_alone(
    tmp_path: Path,
) -> None:
    """Two prompts with two answers each; the first one says which prefix it is."""
    async with running(tmp_path, 1) as stage:
        one, other = (
            stage.codec.chat_tokens(stage.messages(number), None, options={}) for number in (1, 2)
        )
        url = f"{stage.fleet.router.url}/v1/completions"
        for first, shared in ((one[TOKEN_BYTES:], 0), (one, 2 * stage.public_tokens())):
            prompts = [memoryview(packed).cast("I").tolist() for packed in (first, other)]
            cached = []
            for tenant in ("acme", "other", "left"):
                body = {"model": MODEL, "max_tokens": 1, "prompt": prompts, "n": 2}
                sent = {"Authorization": f"Bearer {key_of(tenant)}"}
                async with stage.fleet.http.post(url, json=body, headers=sent) as answer:
                    told = msgspec.json.decode(await answer.read())
                    assert answer.status == 200, told
                    cached.append(told["usage"]["prompt_tokens_details"]["cached_tokens"])
            assert cached == [shared // 2, shared, shared]
