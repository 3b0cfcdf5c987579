"""vLLM and the bundled worker are one model: the same tokens, and the same pages in their events.

Both compute in float32. Prompts run alone and beside others, fresh and behind cached prefixes,
whole and in chunks; answers are up to 160 tokens long.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import pytest_asyncio
import zmq
import zmq.asyncio
from msgspec import Struct

from prompt.codec import load_codec
from sidecar.event import decode_batch
from sidecar.fold import PageFolder
from state.model import ModelIdentity, Tier
from state.prefix import chain_of, chain_root, namespace_of, pack_tokens
from state.secret import ChainKeys
from support.engine_process import Engine, Engines
from support.fleet import until
from support.vllm import MODEL, PAGE_TOKENS, vllm_command
from support.vllm_stand import MARKS, PAGES
from support.worker_engine import NOT_SERVED, worker_command

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence
    from pathlib import Path

    import pytest

    from state.model import BlockId

pytestmark = MARKS

CHUNK_TOKENS: Final = 192
"""In one step at most, of prompts that come in chunks."""
LENGTHS: Final = (1, 31, 32, 33, 190, 512, 900, 1300)
SEED: Final = 0
NEWS_S: Final = 30.0
IDENTITY: Final = ModelIdentity(model=MODEL, block_tokens=PAGE_TOKENS)


@dataclass(slots=True)
class Reading:
    """The blocks of one engine, folded from its events as a sidecar does it."""

    folder: PageFolder = field(
        default_factory=lambda: PageFolder(
            IDENTITY, PAGE_TOKENS, keys=ChainKeys(SEED), capacity_pages=PAGES
        )
    )

    async def follow(self, socket: zmq.asyncio.Socket) -> None:
        """Read until cancelled."""
        while True:
            _, _, payload = await socket.recv_multipart()
            batch = decode_batch(payload)
            assert not batch.unknown_events + batch.malformed_events
            self.folder.apply(batch.events)

    def blocks(self) -> set[BlockId]:
        """Return what is resident; all of it has to be in one namespace and in GPU memory."""
        found = self.folder.resident()
        assert set(found) <= {(namespace_of(IDENTITY), Tier.GPU)}
        return set().union(*found.values())


class Trio(Struct, frozen=True):
    """vLLM and two workers: engines and what they told, by name."""

    http: aiohttp.ClientSession
    engines: dict[str, Engine]
    readings: dict[str, Reading]
    vocabulary_size: int

    async def ask(self, name: str, prompt: Sequence[int], output_tokens: int) -> list[int]:
        """Return the greedy continuation of ``prompt``."""
        body = {
            "model": MODEL,
            "prompt": list(prompt),
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        url = f"{self.engines[name].url}/v1/completions"
        async with self.http.post(url, json=body) as answer:
            assert answer.status == 200, await answer.text()
            told: Any = await answer.json()
        ids: list[int] = told["choices"][0]["token_ids"]
        assert len(ids) == output_tokens
        return ids

    async def ask_all(
        self, prompts: Sequence[Sequence[int]], output_tokens: int
    ) -> dict[str, list[list[int]]]:
        """Ask every engine for all of ``prompts`` at once; answers by engine, in order."""

        async def ask_one(name: str) -> list[list[int]]:
            asked = (self.ask(name, prompt, output_tokens) for prompt in prompts)
            return list(await asyncio.gather(*asked))

        answers = await asyncio.gather(*map(ask_one, self.engines))
        return dict(zip(self.engines, answers, strict=True))

    def prompt(self, rng: random.Random, tokens: int) -> list[int]:
        """Return ids of any tokens but the special ones."""
        return rng.choices(range(4, self.vocabulary_size), k=tokens)


@contextlib.asynccontextmanager
async def reading(engine: Engine) -> AsyncIterator[Reading]:
    """Follow an engine's events from its start."""
    read = Reading()
    with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as socket:
        socket.set_hwm(0)
        socket.subscribe(b"")
        socket.connect(f"tcp://127.0.0.1:{engine.events_port}")
        following = asyncio.create_task(read.follow(socket))
        try:
            yield read
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def trio(
    tmp_path_factory: pytest.TempPathFactory, vllm: Path, model: Path
) -> AsyncIterator[Trio]:
    """Start vLLM that computes prompts in chunks; a worker that does, one that need not."""
    folder = tmp_path_factory.mktemp("trio")
    chunks = ("--max-num-batched-tokens", str(CHUNK_TOKENS))
    commands = {
        "vllm": vllm_command(vllm, model, PAGES, *chunks),
        "worker": worker_command(model, PAGES, *chunks),
        "worker-whole": worker_command(model, PAGES, "--max-num-batched-tokens", "2048"),
    }
    async with contextlib.AsyncExitStack() as stack:
        engines, readings = {}, {}
        for name, command in commands.items():
            group = await stack.enter_async_context(Engines(folder, command))
            engines[name] = group.add(name)
            readings[name] = await stack.enter_async_context(reading(engines[name]))
            await group.ready(engines[name])
        http = await stack.enter_async_context(aiohttp.ClientSession())
        yield Trio(http, engines, readings, load_codec(model).vocabulary_size)


def pages_of(texts: Iterable[Sequence[int]]) -> set[BlockId]:
    """Return the full pages of all that was computed: the last token of an answer was not."""
    root = chain_root(IDENTITY, SEED)
    chains = (chain_of(root, pack_tokens(ids[:-1]), PAGE_TOKENS, SEED) for ids in texts)
    return {block for chain in chains for block in chain}


async def assert_equal_pages(trio: Trio, texts: Iterable[Sequence[int]]) -> None:
    """Wait until all engines have told of exactly the pages of ``texts``."""
    expected = pages_of(texts)

    async def is_told() -> bool:
        return all(len(read.blocks()) >= len(expected) for read in trio.readings.values())

    await until(is_told, "news of all pages", NEWS_S)
    for name, read in trio.readings.items():
        assert read.blocks() == expected, name


async def test_tokens_and_pages_are_those_of_vllm(trio: Trio) -> None:
    """In turn: fresh prompts, their continuations, others with the same start, and all again."""
    rng = random.Random(5)
    texts: list[list[int]] = []

    async def ask(prompts: list[list[int]], output_tokens: int) -> list[list[int]]:
        answers = await trio.ask_all(prompts, output_tokens)
        assert len({str(told) for told in answers.values()}) == 1, output_tokens
        whole = [[*ids, *told] for ids, told in zip(prompts, answers["vllm"], strict=True)]
        assert len({str(ids[len(ids) - output_tokens :]) for ids in whole}) > len(whole) / 2
        texts.extend(whole)
        return whole

    alone = await ask([trio.prompt(rng, 700)], 160)
    fresh = await ask([trio.prompt(rng, tokens) for tokens in LENGTHS], 120)
    second = await ask([[*ids, *trio.prompt(rng, 45)] for ids in (*alone, *fresh)], 100)
    shared = [[*second[0][:576], *trio.prompt(rng, tokens)] for tokens in LENGTHS]
    await ask(shared, 110)
    await ask([ids[: len(ids) - 100] for ids in second], 100)
    await assert_equal_pages(trio, texts)


async def test_what_was_forgotten_is_computed_to_the_same_tokens(trio: Trio) -> None:
    rng = random.Random(6)
    prompts = [trio.prompt(rng, tokens) for tokens in LENGTHS]
    first = await trio.ask_all(prompts, 100)
    for engine in trio.engines.values():
        async with trio.http.post(f"{engine.url}/reset_prefix_cache") as answer:
            assert (await answer.json())["success"]
    again = await trio.ask_all(prompts, 100)
    assert again == first
    assert len({str(told) for told in again.values()}) == 1
    whole = [[*ids, *told] for ids, told in zip(prompts, again["vllm"], strict=True)]
    await assert_equal_pages(trio, whole)


async def test_every_route_of_vllm_is_served_or_listed(trio: Trio) -> None:
    """What is not listed has to be there, and what is listed has to be one of vLLM's."""
    async with trio.http.get(f"{trio.engines['vllm'].url}/openapi.json") as answer:
        paths: Any = (await answer.json())["paths"]
    routes = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    assert set(NOT_SERVED) <= routes
    url = trio.engines["worker"].url
    for route in routes:
        method, path = route.split()
        async with trio.http.request(method, url + path.format(response_id="resp_1")) as answer:
            assert (answer.status == 404) == (route in NOT_SERVED), route
