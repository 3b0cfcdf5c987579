"""A router in front of frail engines, and what its clients get."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp
from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families

from support.fleet import FleetPlan, LocalFleet, until
from support.frail_engine import MODEL, FrailEngine, FrailFleet
from support.port import free_port

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

CHAT = "/v1/chat/completions"
FAST: dict[str, Any] = {"interval_s": 0.2, "timeout_s": 0.5}


class Reply(Struct):
    """What a client got. ``code`` is that of the error, in the body or in the stream."""

    status: int
    body: bytes
    headers: dict[str, str]
    took_s: float
    is_cut: bool = False

    @property
    def is_good(self) -> bool:
        """Whether it is a whole answer."""
        return self.status == 200 and not self.is_cut and b'"error"' not in self.body


class Rig:
    """A router in front of frail engines."""

    def __init__(self, fleet: LocalFleet, frail: FrailFleet) -> None:
        self.fleet = fleet
        self.frail = frail
        self.engines = frail.engines

    async def ask(self, text: str = "hello", **fields: Any) -> Reply:
        """Send one chat."""
        body = {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}
        began_s, received, is_cut = time.monotonic(), bytearray(), False
        async with self.fleet.http.post(self.fleet.router.url + CHAT, json=body) as answer:
            try:
                async for part in answer.content.iter_any():
                    received += part
            except aiohttp.ClientError:
                is_cut = True
            took_s = time.monotonic() - began_s
            headers = {name.lower(): value for name, value in answer.headers.items()}
            return Reply(answer.status, bytes(received), headers, took_s, is_cut)

    async def load(self, seconds: float, width: int, **fields: Any) -> list[Reply]:
        """Let ``width`` clients ask one thing after the other."""
        until_s = time.monotonic() + seconds
        replies: list[Reply] = []

        async def client(number: int) -> None:
            count = 0
            while time.monotonic() < until_s:
                count += 1
                replies.append(await self.ask(f"client {number} asks {count}", **fields))

        await asyncio.gather(*map(client, range(width)))
        return replies

    async def standing(self, name: str) -> dict[str, Any]:
        """Return what the router makes of a replica."""
        found: dict[str, Any] = (await self.fleet.seen())[name]["standing"]
        return found

    async def stands(self, name: str, standing: str, timeout_s: float = 60.0) -> None:
        """Wait until a replica is something."""

        async def is_so() -> bool:
            return bool((await self.standing(name))["standing"] == standing)

        await until(is_so, f"{name} is {standing}", timeout_s)

    async def metric(self, name: str) -> float:
        """Return one figure of the router."""
        return (await self.fleet.gauges(self.fleet.router.url)).get(name, 0.0)

    async def labelled(self, name: str, **labels: str) -> float:
        """Return one figure with these labels."""
        async with self.fleet.http.get(f"{self.fleet.router.url}/metrics") as answer:
            text = await answer.text()
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


@asynccontextmanager
async def rig(folder: Path, count: int, **config: Any) -> AsyncIterator[Rig]:
    """Start ``count`` engines and a router that knows them."""
    engines = [FrailEngine(f"r{number}", free_port()) for number in range(count)]
    settings: dict[str, Any] = {
        "replicas": [{"url": each.url, "name": each.name} for each in engines],
        "attend_sidecars": False,
        "health": FAST,
        "policy": {"kind": "least_loaded"},
        **config,
    }
    async with (
        FrailFleet(engines) as frail,
        LocalFleet(folder, FleetPlan(replicas=0, config=settings)) as fleet,
    ):
        yield Rig(fleet, frail)
