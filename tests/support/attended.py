"""Routers that ``warmroute serve --replica URL ...`` starts, and the sidecars that they run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from support.fleet import ANY_PORT, Router, until

if TYPE_CHECKING:
    from collections.abc import Sequence

    from support.fleet import LocalFleet
    from warmroute.local import Child

FOLLOW_S = 60.0
"""For a process to start on a busy machine, and to register."""


@dataclass(slots=True)
class Served:
    """A router, and the engines whose addresses it was given."""

    fleet: LocalFleet
    router: Router
    urls: Sequence[str]

    async def until_followed(self) -> None:
        """Wait until the router is told what each engine holds."""

        async def is_so() -> bool:
            seen = await self.fleet.seen(self.router)
            told = [one for one in seen.values() if one["has_events"] and one["up"]]
            return len(told) == len(seen) == len(self.urls)

        await until(is_so, "sidecars of all replicas", FOLLOW_S)

    async def until_live(self) -> None:
        """Wait until the router's view of the shared state is live."""

        async def is_so() -> bool:
            ready = await self.fleet.get(f"{self.router.url}/readyz")
            return bool(ready["rung"] == "live")

        await until(is_so, "a live view of the state")

    async def generations(self) -> dict[str, str]:
        """Return the generation of each replica."""
        seen = await self.fleet.seen(self.router)
        return {name: one["generation"] for name, one in seen.items()}

    def logged(self) -> list[str]:
        """Return what the router and its sidecars logged."""
        return self.router.child.log.read_text().splitlines()

    def decisions(self) -> list[str]:
        """Return what was said of each replica, in the order of their addresses."""
        lines = [line for line in self.logged() if " warmroute.attend: replica " in line]
        names = [url.removeprefix("http://") for url in self.urls]
        return [line for name in names for line in lines if f" replica {name}: " in line]


async def serve_addresses(fleet: LocalFleet, *flags: str, urls: Sequence[str] = ()) -> Served:
    """Start a router with nothing but addresses: of ``urls``, or of all workers of the fleet."""
    given = urls or [
        child.words[0]
        for child in fleet.processes.children
        if child.name.startswith("worker-") and child.is_alive()
    ]
    words = [word for url in given for word in ("--replica", url)]
    listen = ("--listen", ANY_PORT, "--admin", ANY_PORT)
    child = await fleet.processes.start("router", "serve", *listen, *words, *flags).ready()
    return Served(fleet, Router(child, url=child.words[0], admin_url=child.words[2]), given)


def attended_pids(router: Child) -> list[int]:
    """Return the processes of the sidecars that ``router`` runs."""
    pid = router.process.pid
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if _is_sidecar(int(child))]


def _is_sidecar(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    return b"sidecar" in words and b"--engine" in words


async def has_ended(pids: Sequence[int]) -> bool:
    """Return whether none of these sidecars runs any more."""
    return not any(_is_sidecar(pid) for pid in pids)
