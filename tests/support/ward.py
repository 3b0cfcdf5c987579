"""A healthy fleet for the doctor, and a second engine that sidecars may be set up wrongly for."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import structs

from sidecar.profile import SidecarSettings
from state.client import command_client
from state.model import Rung
from state.redis_writer import RedisWriter
from support.fleet import MODEL, FleetPlan, LocalFleet, until
from support.port import free_port
from support.sidecar import sidecar as running_sidecar
from support.tokenizer import write_tokenizer
from warmroute.cli import main
from warmroute.doctor_case import Code
from warmroute.doctor_fleet import judge
from warmroute.doctor_gather import DoctorSettings, gather

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    import pytest

    from state.client import Client
    from support.valkey import ValkeyProcess
    from warmroute.doctor_case import Case, Report

OTHER = "other-model"
PATIENCE_S = 60.0
WORDS = " ".join(f"word {number}" for number in range(60))


class Ward(NamedTuple):
    """A healthy fleet, a second engine of another model without a sidecar, and the store."""

    fleet: LocalFleet
    engine: str
    redis: Client

    @property
    def healthy(self) -> str:
        """The replica that nothing is wrong with."""
        return self.fleet.replicas[0].url

    def settings(self, *replicas: str, **changes: Any) -> DoctorSettings:
        return DoctorSettings(
            admin=changes.pop("admin", self.fleet.router.admin_url), replicas=replicas, **changes
        )

    async def ask(
        self, url: str, text: str, model: str = OTHER, status: int = 200, **fields: Any
    ) -> None:
        """Send one chat."""
        body = {"model": model, "max_tokens": 1, "messages": [{"role": "user", "content": text}]}
        async with self.fleet.http.post(f"{url}/v1/chat/completions", json=body | fields) as answer:
            assert answer.status == status, await answer.text()

    @asynccontextmanager
    async def sidecar(self, name: str, engine: str, **changes: Any) -> AsyncIterator[None]:
        """Run a sidecar of ``engine``, seen by the router under ``name``."""
        settings = SidecarSettings(
            engine=engine,
            replica=name,
            heartbeat_interval_s=0.1,
            scrape_interval_s=0.1,
            drain_grace_s=0.0,
            event_silence_s=0.3,
            **changes,
        )
        writer = RedisWriter(self.redis, clock=time.monotonic, rng=random.Random(1))

        async def is_here() -> bool:
            return (await self.view(name)).get("endpoint") == engine

        async with running_sidecar(settings, writer):
            await until(is_here, f"the router knows {name}, and no earlier one of that name")
            yield

    async def view(self, name: str) -> dict[str, Any]:
        """Return what the router shows of a replica; nothing while it does not know it."""
        return (await self.fleet.seen()).get(name, {})

    async def fill(self, text: str) -> None:
        """Let the healthy replica compute a chat, and wait until the router knows of it."""
        before = (await self.view("w0"))["resident_blocks"]
        await self.ask(self.healthy, text, model=MODEL)

        async def is_known() -> bool:
            return bool((await self.view("w0"))["resident_blocks"] > before)

        await until(is_known, "more blocks")

    async def told(self, name: str, **facts: Any) -> dict[str, Any]:
        """Wait until the router was told of a replica and these facts of it."""
        seen: dict[str, Any] = {}

        async def is_so() -> bool:
            seen.clear()
            seen.update((await self.view(name)).get("facts") or {})
            both = seen | seen.get("counts", {})
            return bool(seen) and all(both[key] == value for key, value in facts.items())

        await until(is_so, f"{name}: {facts}, not {seen}")
        return seen


@asynccontextmanager
async def open_ward(folder: Path, store: ValkeyProcess) -> AsyncIterator[Ward]:
    """Start everything on ``store``."""
    plan = FleetPlan(
        state_url=store.url,
        replicas=1,
        tokenizer=write_tokenizer(folder / "tokenizer"),
        config={"seed": 7},
    )
    client = command_client(store.settings)
    try:
        async with LocalFleet(folder, plan) as fleet:
            other = await fleet.start_worker("other", "--served-model-name", OTHER).ready()
            yield Ward(fleet, other.words[0], client)
    finally:
        await client.aclose()


async def examined(settings: DoctorSettings, rung: Rung = Rung.LIVE) -> tuple[Case, Report]:
    """Return what the doctor gathers, and what it says, once the router's view is as expected.

    A busy machine may keep a router from its store for a moment. Replicas of earlier tests left the
    router that all share, which is as it should be here.
    """
    until_s = time.monotonic() + PATIENCE_S
    while True:
        case = await gather(settings)
        if case.router is None or case.router.rung is rung or time.monotonic() > until_s:
            report = judge(case)
            ours = tuple(one for one in report.findings if one.code is not Code.REPLICA_LEFT)
            return case, structs.replace(report, findings=ours)
        await asyncio.sleep(0.1)


async def codes(settings: DoctorSettings, rung: Rung = Rung.LIVE) -> list[Code]:
    """Return the findings by their names."""
    return [finding.code for finding in (await examined(settings, rung))[1].findings]


def nobody() -> str:
    """Return an address where nobody listens."""
    return f"http://127.0.0.1:{free_port()}"


async def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Return the exit code of a command, and what it wrote to its outputs."""
    code = await asyncio.to_thread(main, [*words])
    out, err = capsys.readouterr()
    return code, out, err
