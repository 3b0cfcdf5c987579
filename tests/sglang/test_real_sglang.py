"""Two real SGLang servers with sidecars behind a router: what is found out, and predictions.

``make test-sglang WARMROUTE_SGLANG=/path/to/environment`` (``tests/sglang/install.py`` makes one).
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

import pytest
import pytest_asyncio

from support.conversation import sdk
from support.engine_load import Players, in_turns, make_talks
from support.engine_process import Engines
from support.fleet import FleetPlan, LocalFleet, until
from support.page_log import PageLog, following
from support.port import free_ports
from support.sglang_real import VARIABLE, sglang_command, sglang_python, write_model
from support.vllm import MODEL, NoEngineError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from support.engine_load import Talk, Turn
    from support.engine_process import Engine

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.timeout(1_800),
    pytest.mark.asyncio(loop_scope="module"),
]

CACHE_TOKENS: Final = 4096
"""Some five conversations."""
TALKS: Final = 12
QUESTIONS: Final = 5
ACTIVE: Final = 10
SALTS: Final = (None, "blue", "green")
NEWS_S: Final = 30.0
SETTLE_S: Final = 0.12
"""Two rounds of the router's chores: until then what it sent itself counts, too."""


@dataclass(slots=True)
class Stand:
    """Two servers, what they told of their pages, and where their sidecars' metrics are."""

    fleet: LocalFleet
    engines: Engines
    page_tokens: int
    players: Players
    logs: dict[str, PageLog] = field(default_factory=dict)
    sidecars: dict[str, str] = field(default_factory=dict)

    async def informed(self) -> None:
        """Wait until the sidecars and the router know all that the servers have told."""

        async def is_known(name: str, log: PageLog) -> bool:
            gauges = await self.fleet.gauges(self.sidecars[name])
            seen = (await self.fleet.seen())[name]
            return (
                gauges["warmroute_sidecar_event_batches_total"] >= log.batches
                and seen["resident_blocks"] == log.held_pages
            )

        for name, log in self.logs.items():
            await until(partial(is_known, name, log), f"news of {name}", NEWS_S)
        await asyncio.sleep(SETTLE_S)

    async def turn(self, phase: str, talk: Talk) -> Turn:
        """Ask the next question of ``talk``; the prediction must be right to the page."""
        await self.informed()
        turn = await self.players.turn(phase, talk)
        told = turn.answered
        assert turn.is_right(self.page_tokens), (phase, talk.number, told)
        record = await self.fleet.decision(told.request_id)
        assert record["is_exact"]
        assert record["prompt_tokens"] == record["reported_prompt_tokens"] == told.prompt_tokens
        return turn

    def engine(self, name: str) -> Engine:
        """Return the server that the router calls ``name``."""
        return next(engine for engine in self.engines.engines if engine.name == name)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[1, 16])
async def stand(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stand]:
    try:
        python = sglang_python(os.environ.get(VARIABLE))
    except NoEngineError as error:
        pytest.fail(str(error), pytrace=False)
    folder = tmp_path_factory.mktemp("sglang")
    model = write_model(folder / "model", python)
    command = sglang_command(python, model, request.param, CACHE_TOKENS)
    config = {"receipts": True, "decisions_kept": 4_000}
    plan = FleetPlan(replicas=0, model=MODEL, tokenizer=model, config=config)
    async with AsyncExitStack() as stack:
        engines = await stack.enter_async_context(Engines(folder, command))
        for name in ("s0", "s1"):
            engines.add(name)
        for engine in engines.engines:
            await engines.ready(engine)
        fleet = await stack.enter_async_context(LocalFleet(folder, plan))
        client = await stack.enter_async_context(sdk(fleet.router.url))
        players = Players(client, MODEL, at_once=1, output_tokens=8)
        stand = Stand(fleet, engines, request.param, players)
        for engine in engines.engines:
            log = following(engine.events_port, engine.replay_port)
            stand.logs[engine.name] = await stack.enter_async_context(log)
            stand.sidecars[engine.name] = await start_sidecar(stand, engine)
        await fleet.all_up(fleet.router, len(engines.engines))
        yield stand


async def start_sidecar(stand: Stand, engine: Engine) -> str:
    """Start the sidecar of ``engine``; return where its metrics are."""
    [port] = free_ports(1)
    flags = ("--block-tokens", str(stand.page_tokens), "--metrics", f"127.0.0.1:{port}")
    await stand.fleet.start_sidecar(engine.name, engine.url, *flags).ready()
    return f"http://127.0.0.1:{port}"


async def test_all_is_found_out(stand: Stand) -> None:
    talk = make_talks(1, 1, (60, 90), seed=3)[0]
    await stand.turn("first", talk)

    async def are_told() -> bool:
        seen = (await stand.fleet.seen()).values()
        return all(one["facts"] and one["load"] for one in seen) and any(
            one["facts"]["encodings"] for one in seen
        )

    await until(are_told, "facts and loads of both servers", NEWS_S)
    for one in (await stand.fleet.seen()).values():
        assert one["has_events"]
        assert one["page_tokens"] == stand.page_tokens
        assert one["capacity_tokens"] == CACHE_TOKENS
        assert one["facts"]["engine"] == "sglang"
        assert one["load"]["running"] == one["load"]["queued"] == 0
        if one["facts"]["encodings"]:
            assert one["facts"]["encodings"] == ["map"]
            assert "signed int" in one["facts"]["hash_kinds"]
        print(one["facts"])  # noqa: T201 - shown with -rP


async def test_predictions_are_right_to_the_page_while_the_caches_evict(stand: Stand) -> None:
    began = len(stand.players.turns)
    for phase, is_salted in (("plain", False), ("salted", True)):
        talks = make_talks(TALKS, QUESTIONS, (30, 90), seed=1 + is_salted)
        for talk in talks:
            talk.salt = SALTS[talk.number % len(SALTS)] if is_salted else None
        for talk in in_turns(talks, ACTIVE, seed=5):
            await stand.turn(phase, talk)
    turns = stand.players.turns[began:]
    print(  # noqa: T201 - the figures, shown with -rP
        f"pages of {stand.page_tokens}: {len(turns)} of {len(turns)} right;",
        f"cached {sum(turn.answered.cached_tokens for turn in turns)}",
        f"of {sum(turn.answered.prompt_tokens for turn in turns)} prompt tokens;",
        f"cut by eviction: {sum(turn.is_cut(stand.page_tokens) for turn in turns)};",
        f"evicted pages: { {name: len(log.evictions) for name, log in stand.logs.items()} };",
        dict(Counter(turn.answered.replica for turn in turns)),
    )
    assert {turn.answered.replica for turn in turns} == {"s0", "s1"}
    assert any(turn.is_cut(stand.page_tokens) for turn in turns)
    assert all(log.evictions for log in stand.logs.values())


async def test_a_flush_and_a_restart_void_what_was_known(stand: Stand) -> None:
    talk = make_talks(1, 8, (30, 90), seed=9)[0]
    await stand.turn("before", talk)
    warm = await stand.turn("before", talk)
    assert warm.answered.cached_tokens
    engine = stand.engine(warm.answered.replica)
    log = stand.logs[engine.name]
    async with stand.fleet.http.post(f"{engine.url}/flush_cache") as answer:
        assert answer.status == 200
    await until(lambda: is_empty(log), "the event of the flush", NEWS_S)
    flushed = await stand.turn("flushed", talk)
    assert flushed.answered.cached_tokens < warm.answered.prompt_tokens
    assert (await stand.turn("again", talk)).answered.cached_tokens
    engine = stand.engine(stand.players.turns[-1].answered.replica)
    before = (await stand.fleet.seen())[engine.name]["generation"]
    await stand.engines.strike(engine)
    stand.logs[engine.name].forget()
    stand.engines.start(engine)
    await stand.engines.ready(engine)

    async def is_new() -> bool:
        one = (await stand.fleet.seen()).get(engine.name)  # None while it is not registered
        return one is not None and one["up"] and one["generation"] not in {before, None}

    await until(is_new, "a new generation", 2 * NEWS_S)
    await stand.turn("restarted", talk)
    assert (await stand.turn("warm again", talk)).answered.cached_tokens


async def is_empty(log: PageLog) -> bool:
    """Return whether a server told that it holds nothing."""
    return not log.held_pages
