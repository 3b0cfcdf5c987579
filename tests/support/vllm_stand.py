"""Two real vLLM engines with sidecars behind a router, and what the engines tell of their pages."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
from msgspec import Struct

from support.fleet import FleetPlan, LocalFleet, Router, until
from support.page_log import PageLog, following
from support.vllm import MODEL, PAGE_TOKENS, Engine, Engines

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

MARKS: Final = [
    pytest.mark.heavy,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="session"),
]
PAGES: Final = 1024
"""Per engine."""
OUTPUT_TOKENS: Final = 12
CONFIG: Final = {"receipts": True, "decisions_kept": 4_000}
SETTLE_S: Final = 0.1
"""For the last events of a dead engine to arrive."""


class Stand(Struct, frozen=True):
    """What all tests here share; ``logs`` are by the names of engines."""

    fleet: LocalFleet
    engines: Engines
    model: Path
    vllm: Path
    logs: dict[str, PageLog]

    async def ready(self, router: Router | None = None) -> None:
        """Wait until a router, the first unless named, knows every engine and what it holds."""
        asked = router or self.fleet.router
        await self.fleet.all_up(asked, len(self.engines.engines))

        async def is_told() -> bool:
            seen = await self.fleet.seen(asked)
            return all(one["has_events"] for one in seen.values())

        await until(is_told, "events of all engines")

    def engine(self, name: str) -> Engine:
        """Return the engine that the router calls ``name``."""
        return next(engine for engine in self.engines.engines if engine.name == name)

    async def strike(self, engine: Engine) -> None:
        """Let ``engine`` die at once; what it held is gone."""
        await self.engines.strike(engine)
        await asyncio.sleep(SETTLE_S)
        self.logs[engine.name].forget()


@contextlib.asynccontextmanager
async def open_stand(folder: Path, vllm: Path, model: Path) -> AsyncIterator[Stand]:
    """Start everything; none of it outlives the block."""
    plan = FleetPlan(replicas=0, model=MODEL, tokenizer=model, config=CONFIG)
    async with Engines(folder, vllm, model, PAGES) as engines, contextlib.AsyncExitStack() as stack:
        for name in ("v0", "v1"):
            engines.add(name)
        logs = {
            engine.name: await stack.enter_async_context(following(engine.events_port))
            for engine in engines.engines
        }
        for engine in engines.engines:
            await engines.ready(engine)
        fleet = await stack.enter_async_context(LocalFleet(folder, plan))
        for engine in engines.engines:
            block = ("--block-tokens", str(PAGE_TOKENS))
            await fleet.start_sidecar(engine.name, engine.url, *block).ready()
        stand = Stand(fleet, engines, model, vllm, logs)
        await stand.ready()
        yield stand
