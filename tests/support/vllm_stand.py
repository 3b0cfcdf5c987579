"""Two engines with sidecars behind a router, and what the engines tell of their pages.

They are vLLM's or the bundled worker's: the router cannot tell.
"""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
from msgspec import Struct

from support.engine_process import Engine, Engines
from support.fleet import FleetPlan, LocalFleet, Router, until
from support.page_log import PageLog, following
from support.port import free_ports
from support.vllm import MODEL, PAGE_TOKENS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from support.engine_process import Command

MARKS: Final = [
    pytest.mark.heavy,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="session"),
]
PAGES: Final = 1024
"""Per engine."""
OUTPUT_TOKENS: Final = 12
CONFIG: Final = {"receipts": True, "decisions_kept": 4_000}
NEWS_S: Final = 30.0
SETTLE_S: Final = 0.1
"""For the last events of a dead engine to arrive."""


class Stand(Struct, frozen=True):
    """What all tests here share; ``logs`` and ``sidecars`` are by the names of engines.

    Of a sidecar it is where its metrics are.
    """

    fleet: LocalFleet
    engines: Engines
    model: Path
    logs: dict[str, PageLog]
    sidecars: dict[str, str]

    async def ready(self, router: Router | None = None) -> None:
        """Wait until a router, the first unless named, knows every engine and what it holds."""
        asked = router or self.fleet.router
        await self.fleet.all_up(asked, len(self.engines.engines))

        async def is_told() -> bool:
            seen = await self.fleet.seen(asked)
            return all(one["has_events"] for one in seen.values())

        await until(is_told, "events of all engines")

    async def informed(self) -> None:
        """Wait until the sidecars and the first router know all that the engines have told."""

        async def is_known(name: str, log: PageLog) -> bool:
            gauges = await self.fleet.gauges(self.sidecars[name])
            seen = (await self.fleet.seen())[name]
            return (
                gauges["warmroute_sidecar_event_batches_total"] >= log.batches
                and seen["resident_blocks"] == log.held_text_pages
            )

        for name, log in self.logs.items():
            await until(partial(is_known, name, log), f"news of {name}", NEWS_S)

    def engine(self, name: str) -> Engine:
        """Return the engine that the router calls ``name``."""
        return next(engine for engine in self.engines.engines if engine.name == name)

    async def strike(self, engine: Engine) -> None:
        """Let ``engine`` die at once; what it held is gone."""
        await self.engines.strike(engine)
        await asyncio.sleep(SETTLE_S)
        self.logs[engine.name].forget()


@contextlib.asynccontextmanager
async def open_stand(folder: Path, command: Command, model: Path) -> AsyncIterator[Stand]:
    """Start everything, engines with ``command``; none of it outlives the block."""
    plan = FleetPlan(replicas=0, model=MODEL, tokenizer=model, config=CONFIG)
    async with Engines(folder, command) as engines, contextlib.AsyncExitStack() as stack:
        for name in ("v0", "v1"):
            engines.add(name)
        logs = {
            engine.name: await stack.enter_async_context(
                following(engine.events_port, engine.replay_port)
            )
            for engine in engines.engines
        }
        for engine in engines.engines:
            await engines.ready(engine)
        fleet = await stack.enter_async_context(LocalFleet(folder, plan))
        sidecars = {}
        for engine in engines.engines:
            [port] = free_ports(1)
            flags = ("--block-tokens", str(PAGE_TOKENS), "--metrics", f"127.0.0.1:{port}")
            await fleet.start_sidecar(engine.name, engine.url, *flags).ready()
            sidecars[engine.name] = f"http://127.0.0.1:{port}"
        stand = Stand(fleet, engines, model, logs, sidecars)
        await stand.ready()
        yield stand
