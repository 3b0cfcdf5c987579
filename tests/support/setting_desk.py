"""An operator who reads and changes settings over a router's own paths."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

import msgspec

from support.fleet import MODEL, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from support.fleet import LocalFleet, Router

FOLLOWED_S: Final = 10.0
"""Within so long every router follows."""


class SettingDesk:
    """Asks one router of a fleet."""

    def __init__(self, fleet: LocalFleet, router: Router) -> None:
        self._fleet, self._router = fleet, router

    async def get(self, path: str = "") -> Any:
        """Return what a path below the settings answers."""
        return await self._fleet.get(f"{self._router.admin_url}/admin/settings{path}")

    async def post(
        self, path: str, body: Any, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Any]:
        """Return status and answer of a POST of JSON to a path of the listener."""
        url = self._router.admin_url + path
        kinds = {"Content-Type": "application/json"} | dict(headers or {})
        raw = body if isinstance(body, bytes) else msgspec.json.encode(body)
        async with self._fleet.http.post(url, data=raw, headers=kinds) as answer:
            return answer.status, msgspec.json.decode(await answer.read())

    async def set(self, patch: Any, **more: Any) -> tuple[int, Any]:
        """Change something, of the version that is in force."""
        if "expected_version" not in more:
            more["expected_version"] = (await self.get())["stored_version"]
        body = {"patch": patch, "author": "ann@ops", "reason": "a test"} | more
        return await self.post("/admin/settings", body)

    async def rollback(self, version: int, **more: Any) -> tuple[int, Any]:
        """Go back to a version."""
        body = {"version": version, "author": "ann@ops", "reason": "back"} | more
        return await self.post("/admin/settings/rollback", body)

    async def version(self) -> int:
        """Return the version in force."""
        return int((await self.get())["version"])

    async def has(self, version: int, timeout_s: float = 60.0) -> float:
        """Wait until a version is in force; return the time it took."""

        async def is_so() -> bool:
            return await self.version() == version

        began_s = time.monotonic()
        await until(is_so, f"version {version}", timeout_s)
        return time.monotonic() - began_s


@asynccontextmanager
async def one_more_router(fleet: LocalFleet, **config: Any) -> AsyncIterator[Router]:
    """Run a router for a while."""
    router = await fleet.start_router(**config)
    try:
        yield router
    finally:
        assert await asyncio.to_thread(fleet.processes.stop, router.child) == 0


async def chat(fleet: LocalFleet, router: Router, text: str = "hello", tokens: int = 2) -> int:
    """Send one chat; return its status."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "ignore_eos": True,
    }
    async with fleet.http.post(f"{router.url}/v1/chat/completions", json=body) as answer:
        await answer.read()
        return answer.status
