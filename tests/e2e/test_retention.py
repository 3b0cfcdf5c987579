"""S-11: every key of the store dies by itself, at all times, whoever is killed when."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from state.client import command_client, run_command
from support.fleet import until
from support.tenancy import TEXT, tenant_fleet
from support.valkey import ValkeyProcess

if TYPE_CHECKING:
    from pathlib import Path

    from support.fleet import Router
    from support.tenancy import TenantFleet

LONGEST_MS = 86_400_000 * 1.2
KINDS = {
    b"record", b"generation", b"load", b"changes", b"sets", b"blocks", b"epoch", b"version",
    b"leases", b"routers", b"replicas",
}  # fmt: skip


class Watch:
    """Looks at all keys again and again: ``kinds`` are those that it saw."""

    def __init__(self, valkey: ValkeyProcess) -> None:
        self._valkey = valkey
        self.kinds: set[bytes] = set()
        self.faults: list[tuple[bytes, int]] = []
        self.looks = 0
        self.is_done = False
        """Told and not cancelled: the store's client may swallow a cancellation."""

    async def run(self) -> None:
        client = command_client(self._valkey.settings)
        try:
            while not self.is_done:
                for key in await run_command(client, "KEYS", "*"):
                    left_ms = await run_command(client, "PTTL", key)
                    if left_ms == -1 or left_ms > LONGEST_MS:
                        self.faults.append((key, left_ms))
                    self.kinds.add(key.split(b":")[3])
                self.looks += 1
                await asyncio.sleep(0)
        finally:
            await client.aclose()

    async def looked(self, times: int) -> None:
        """Wait until all keys were looked at so often again."""
        wanted = self.looks + times

        async def is_so() -> bool:
            return self.looks >= wanted

        await until(is_so, f"{times} looks at all keys")


async def load(stand: TenantFleet, router: Router) -> None:
    """Send prompts of two tenants, old and new, until cancelled."""
    for number in range(10_000):
        name = "ab"[number % 2]
        await asyncio.gather(
            stand.ask(router, name, f"{number % 7} {TEXT}"),
            stand.ask(router, name, f"new {number} {TEXT}"),
        )


async def test_no_key_lives_for_ever_under_load_nor_after_a_kill(tmp_path: Path) -> None:
    """S-11: TTL -1 is never seen, of no kind of key; a day is the longest."""
    with ValkeyProcess() as valkey:
        async with tenant_fleet(tmp_path, valkey.url, "a", "b", pages=512) as stand:
            router = await stand.router("r1")
            watch = Watch(valkey)
            looking = asyncio.create_task(watch.run())
            loading = asyncio.create_task(load(stand, router))
            await watch.looked(8)
            await stand.call("DELETE", router, "/admin/scopes/tenant:a")
            await stand.call("POST", router, "/admin/scopes/tenant:b/rotate")
            await watch.looked(3)
            [replica] = stand.fleet.replicas
            replica.sidecar.process.kill()
            replica.sidecar.process.wait()
            await watch.looked(4)
            replica.sidecar = stand.fleet.start_sidecar("w0", replica.url)
            await replica.sidecar.ready()
            await watch.looked(2)
            await valkey.flush()
            await watch.looked(4)
            watch.is_done = True
            loading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await loading
            await looking
            assert watch.faults == []
            assert watch.kinds >= KINDS
