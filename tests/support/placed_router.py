"""A router process whose listeners are at addresses of any kind."""

from __future__ import annotations

import asyncio
import contextlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import yaml

from support.fleet import STOP_GRACE_S
from warmroute.local import Child, Processes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from state.tls import ClientTls


@dataclass(slots=True)
class PlacedRouter:
    """A running router; ``url`` and ``admin_url`` are what it said."""

    child: Child
    url: str
    admin_url: str

    async def replicas(self, *words: str) -> list[dict[str, Any]]:
        """Return what ``curl WORDS`` gets of the admin listener about the replicas."""
        at = "http://localhost" if self.admin_url.startswith("unix:") else self.admin_url
        told = await curl(*words, f"{at}/admin/replicas")
        return json.loads(told)  # type: ignore[no-any-return]

    async def all_up(self, *words: str) -> list[dict[str, Any]]:
        """Wait until every replica is up."""
        async with asyncio.timeout(30):
            while True:
                views = await self.replicas(*words)
                if views and all(view["up"] for view in views):
                    return views
                await asyncio.sleep(0.05)


async def curl(*words: str) -> str:
    """Run curl, which must succeed, and return what it printed."""
    status, out, error = await ran("curl", "--silent", "--show-error", "--max-time", "20", *words)
    assert status == 0, error
    return out


async def ran(*command: str, environment: dict[str, str] | None = None) -> tuple[int, str, str]:
    """Run a command and return its status and what it printed."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
    )
    out, error = await process.communicate()
    return process.returncode or 0, out.decode(), error.decode()


@contextlib.asynccontextmanager
async def placed(folder: Path, **config: Any) -> AsyncIterator[PlacedRouter]:
    """Run ``warmroute serve`` with ``config``; listeners are on free ports by default."""
    free: dict[str, Any] = {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0"}
    free |= {"attend_sidecars": False, "drain": {"accept_s": 0.0}}
    path = folder / "router.yaml"
    path.write_text(yaml.safe_dump(msgspec.to_builtins(free | config)))
    async with Processes(folder, stop_grace_s=STOP_GRACE_S) as processes:
        child = await processes.start("router", "serve", "--config", str(path)).ready()
        yield PlacedRouter(child, child.words[0], child.words[2])
        status = await asyncio.to_thread(processes.stop, child)
        assert status == 0, child.log_tail()
        assert "Traceback" not in child.log_tail()


def upstream(tls: ClientTls) -> dict[str, Any]:
    """Return the setting of TLS towards replicas."""
    return {"tls": msgspec.to_builtins(tls), "connect_timeout_s": 5.0}
