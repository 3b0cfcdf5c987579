"""A router that logs all it can, beside a fleet's Valkey."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import TYPE_CHECKING, Any

from support.fleet import ANY_PORT, LocalFleet, Router, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@contextlib.asynccontextmanager
async def talking_router(
    fleet: LocalFleet, folder: Path, name: str, **config: Any
) -> AsyncIterator[Router]:
    """Start a router that logs all it can."""
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps({"listen": ANY_PORT, "admin": ANY_PORT, "seed": 1, **config}))
    words = ("serve", "--config", str(path), "--log-level", "debug")
    child = await fleet.processes.start(name, *words).ready()
    yield Router(child, url=child.words[0], admin_url=child.words[2])
    await asyncio.to_thread(fleet.processes.stop, child)


async def fleet_is_up(fleet: LocalFleet, router: Router) -> None:
    """Wait until the router finds all its replicas up."""

    async def is_up() -> bool:
        return all(one["up"] for one in (await fleet.seen(router)).values())

    await until(is_up, "both replicas up")
