"""Tenants on a real worker: whom a cached prompt helps, and what the shared state tells of it."""

from __future__ import annotations

import random
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import openai
import pytest
import pytest_asyncio
import redis.asyncio
from msgspec import Struct

from prompt.codec import load_codec
from state.model import ModelIdentity
from state.prefix import TOKEN_BYTES, chain_of, chain_root, salt_scope
from state.secret import ChainKeys, engine_salt
from support.conversation import Answered, ask, at_once
from support.fleet import MODEL, FleetPlan, LocalFleet, until
from support.tenant import SECRET, key_of, tenant_config
from support.tokenizer import write_tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Iterator, Sequence

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPTS: Final = 200
CLIENTS: Final = 8
BLOCK_TOKENS: Final = 64
DECOYS: Final = 100_000
READS: Final = {
    b"set": ("SMEMBERS",),
    b"zset": ("ZRANGE", 0, -1),
    b"hash": ("HGETALL",),
    b"stream": ("XRANGE", "-", "+"),
    b"string": ("GET",),
    b"none": ("GET",),
}


class Stage(Struct, frozen=True):
    fleet: LocalFleet
    clients: dict[str, openai.AsyncOpenAI]
    tokenizer: Path

    async def ask(self, tenant: str, text: str, **fields: Any) -> Answered:
        return await ask(self.clients[tenant], MODEL, [("user", text)], 2, **fields)

    def packed(self, text: str) -> bytes:
        """Return the tokens of a chat that says ``text``."""
        messages = [{"role": "user", "content": text}]
        return load_codec(self.tokenizer).chat_tokens(messages, None, options={})


@asynccontextmanager
async def running(folder: Path, *, has_tenants: bool) -> AsyncIterator[Stage]:
    tokenizer = write_tokenizer(folder / "tokenizer")
    names = ("acme", "other", "left", "right")
    told: dict[str, Any] = {"receipts": True}
    group = told | {"share": "shared"}
    tenants = {"acme": told, "other": told, "left": group, "right": group}
    config: dict[str, Any] = told
    flags: tuple[str, ...] = ()
    if has_tenants:
        config = tenant_config(folder, **tenants)
        flags = ("--deployment-key-file", config["deployment_key_file"])
    plan = FleetPlan(replicas=1, tokenizer=tokenizer, config=config, sidecar_flags=flags)
    async with LocalFleet(folder, plan) as fleet, AsyncExitStack() as stack:
        clients = {
            name: openai.AsyncOpenAI(
                base_url=f"{fleet.router.url}/v1", api_key=key_of(name), max_retries=0
            )
            for name in names
        }
        for client in clients.values():
            stack.push_async_callback(client.close)
        yield Stage(fleet, clients, tokenizer)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    async with running(tmp_path_factory.mktemp("fleet"), has_tenants=True) as made:
        yield made


def secret_text(name: str, number: int) -> str:
    return f"{name} {number}: the invoice of March is confidential, 4711 pieces at 12.50. " * 12


async def test_another_tenant_s_prompt_is_as_good_as_a_new_one(stage: Stage) -> None:
    """S-05, B19: two hundred prompts, none of which hits for the other tenant; its own do."""

    async def both(number: int) -> tuple[Answered, Answered, Answered]:
        text = secret_text("S-05", number)
        first = await stage.ask("acme", text)
        other = await stage.ask("other", text)
        return first, other, await stage.ask("acme", text)

    rounds = await at_once(range(PROMPTS), CLIENTS, both)
    assert [r.cached_tokens for r, _, _ in rounds] == [0] * PROMPTS
    assert [r.predicted_tokens for _, r, _ in rounds] == [0] * PROMPTS
    assert [r.cached_tokens for _, r, _ in rounds] == [0] * PROMPTS
    assert all(r.predicted_tokens >= BLOCK_TOKENS for _, _, r in rounds)
    assert all(r.cached_tokens >= r.predicted_tokens for _, _, r in rounds)


async def test_a_client_s_own_salt_opens_nobody_s_cache(stage: Stage) -> None:
    """S-04, B20: the salt of another scope, written by a client that knows it."""
    text = secret_text("S-04", 0)
    await stage.ask("acme", text)
    stolen = engine_salt(SECRET, "tenant:acme", "")
    thief = await stage.ask("other", text, cache_salt=stolen)
    assert (thief.predicted_tokens, thief.cached_tokens) == (0, 0)
    assert (await stage.ask("acme", text, cache_salt="mine")).cached_tokens > 0


async def test_tenants_of_one_group_hit_each_other_s_prompts_and_no_one_else_does(
    stage: Stage,
) -> None:
    text = secret_text("group", 0)
    await stage.ask("left", text)
    shared = await stage.ask("right", text)
    assert shared.cached_tokens >= shared.predicted_tokens >= BLOCK_TOKENS
    stranger = await stage.ask("acme", text)
    assert (stranger.predicted_tokens, stranger.cached_tokens) == (0, 0)


async def dumped(stage: Stage) -> set[bytes]:
    """Return every value, member and key that the state server holds."""
    found: set[bytes] = set()
    async with redis.asyncio.Redis.from_url(stage.fleet.state_url, protocol=2) as server:
        async for key in server.scan_iter():
            found.add(key)
            kind: Any = await server.type(key)
            read, *arguments = READS[kind]
            execute: Any = server.execute_command
            answer = await execute(read, key, *arguments)
            found |= {value for value in _flat(answer) if isinstance(value, bytes)}
    return found


def _flat(answer: Any) -> Iterator[Any]:
    if isinstance(answer, dict):
        answer = list(answer.items())
    if isinstance(answer, list | tuple | set):
        for one in answer:
            yield from _flat(one)
    else:
        yield answer


def matches(prompts: Iterable[bytes], values: set[bytes], scope: str, keys: ChainKeys) -> int:
    """Return how many prompts a reader of the state finds, who knows ``keys`` and the scope."""
    identity = ModelIdentity(model=MODEL, scope=scope, block_tokens=BLOCK_TOKENS)
    key = keys.of(scope)
    root = chain_root(identity, key)
    return sum(
        any(one in values for one in chain_of(root, packed, BLOCK_TOKENS, key))
        for packed in prompts
    )


async def told(stage: Stage, prompts: Sequence[bytes], scope: str, keys: ChainKeys) -> set[bytes]:
    """Return what the state holds once the engines told of all ``prompts``."""
    values: set[bytes] = set()

    async def is_so() -> bool:
        nonlocal values
        values = await dumped(stage)
        return matches(prompts, values, scope, keys) == len(prompts)

    await until(is_so, "all prompts told")
    return values


def dictionary(stage: Stage, name: str) -> list[bytes]:
    """Return prompts of which ten were asked, and very many were not."""
    rng = random.Random(3)
    decoys = (rng.randbytes(BLOCK_TOKENS * TOKEN_BYTES) for _ in range(DECOYS))
    return [*(stage.packed(secret_text(name, number)) for number in range(10)), *decoys]


async def test_who_reads_the_shared_state_finds_no_prompt_without_the_deployment_key(
    stage: Stage,
) -> None:
    """S-03: not even one who guesses the prompt and knows the salt; with the key, all ten."""
    for number in range(10):
        await stage.ask("acme", secret_text("S-03", number))
    candidates = dictionary(stage, "S-03")
    scope = salt_scope(engine_salt(SECRET, "tenant:acme", ""))
    values = await told(stage, candidates[:10], scope, ChainKeys(0, SECRET))
    assert matches(candidates, values, scope, ChainKeys(0)) == 0
    assert matches(candidates, values, "", ChainKeys(0)) == 0
    assert matches(candidates, values, scope, ChainKeys(0, b"another" + SECRET)) == 0
    assert matches(candidates, values, scope, ChainKeys(0, SECRET)) == 10
    everything = b"\n".join(values)
    for hidden in (
        SECRET,
        key_of("acme").encode(),
        engine_salt(SECRET, "tenant:acme", "").encode(),
    ):
        assert hidden not in everything


async def test_without_tenants_a_reader_of_the_shared_state_can_guess_prompts(
    tmp_path: Path,
) -> None:
    """S-03, its control: the same search finds what was asked where chains have no key."""
    async with running(tmp_path, has_tenants=False) as open_stage:
        for number in range(10):
            await open_stage.ask("acme", secret_text("open", number))
        candidates = dictionary(open_stage, "open")
        values = await told(open_stage, candidates[:10], "", ChainKeys(0))
        assert matches(candidates, values, "", ChainKeys(0)) == 10
