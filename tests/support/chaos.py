"""Kill points: seeded blows against every process of a fleet under load, and what must hold after.

``plan_blows`` is the whole randomness: the same seed strikes the same things in the same order. A
victim is brought back in the background while the next one is already struck, so that outages
overlap; what is down or frozen is not struck again before it is back.
"""

from __future__ import annotations

import asyncio
import enum
import os
import random
import signal
import subprocess
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from chaos.evidence import End
from support.chaos_load import CANARY, Leaving, Load
from support.fleet import LocalFleet, until
from support.port import free_ports

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from support.chaos_load import Entry
    from support.fleet import FleetPlan, Router
    from support.valkey import ValkeyProcess
    from warmroute.local import Child

HOST: Final = "127.0.0.1"
"""Below the ports that systems give to outgoing connections: a restarted process gets its own."""
END_S: Final = 60.0
READY_S: Final = 60.0
MARGIN_S: Final = 1.0
FORBIDDEN: Final = (
    "Traceback",
    "exception was never",
    "was never awaited",
    "Unhandled",
    "unhandled",
    "Unclosed",
    "is destroyed but it is pending",
    CANARY,
)


class Target(enum.StrEnum):
    """What is struck."""

    VALKEY = "valkey"
    WORKER = "worker"
    SIDECAR = "sidecar"
    ROUTER = "router"
    CLIENT = "client"


class Means(enum.StrEnum):
    """How a process is struck."""

    KILL = "killed"
    STOP = "stopped"
    FREEZE = "frozen"


MEANS: Final[dict[Target, tuple[Means | Leaving, ...]]] = {
    Target.VALKEY: (Means.KILL, Means.FREEZE),
    Target.WORKER: (Means.KILL, Means.FREEZE, Means.STOP),
    Target.SIDECAR: (Means.KILL, Means.FREEZE, Means.STOP),
    Target.ROUTER: (Means.KILL, Means.STOP, Means.FREEZE),
    Target.CLIENT: tuple(Leaving),
}


class Blow(Struct, frozen=True, kw_only=True):
    """One kill point. ``lot`` from 0 to 1 chooses among several; ``down_s`` is how long it lasts.

    For a client ``down_s`` is how long it waits before it leaves.
    """

    number: int
    target: Target
    means: Means | Leaving
    lot: float
    down_s: float
    pause_s: float

    @property
    def kind(self) -> str:
        """Target and means in words."""
        return f"{self.target} {self.means}"


def plan_blows(seed: int, count: int) -> list[Blow]:
    """Return ``count`` blows: every target equally often, every means of it in turn."""
    rng = random.Random(seed)
    waiting: dict[Target, list[Means | Leaving]] = {target: [] for target in Target}
    blows: list[Blow] = []
    while len(blows) < count:
        for target in rng.sample(list(Target), len(Target)):
            if not waiting[target]:
                waiting[target] = rng.sample(MEANS[target], len(MEANS[target]))
            is_client = target is Target.CLIENT
            longest_s = 0.3 if is_client else rng.choice((0.1, 0.5, 2.5))
            blows.append(
                Blow(
                    number=len(blows),
                    target=target,
                    means=waiting[target].pop(),
                    lot=rng.random(),
                    down_s=rng.uniform(0.0, longest_s),
                    pause_s=rng.uniform(0.1, 1.8),
                )
            )
    return blows[:count]


class FixedFleet(LocalFleet):
    """A fleet whose processes keep their addresses when they are started again."""

    def __init__(self, directory: Path, plan: FleetPlan) -> None:
        super().__init__(directory, plan)
        ports = iter(free_ports(plan.replicas + 2 * plan.routers))
        self._worker_ports = {f"w{index}": next(ports) for index in range(plan.replicas)}
        self._router_ports = [(next(ports), next(ports)) for _ in range(plan.routers)]

    def worker_url(self, name: str) -> str:
        """Return where the worker of this name listens, whenever it does."""
        return f"http://{HOST}:{self._worker_ports[name]}"

    def start_worker(self, name: str, *flags: str) -> Child:
        """Start a worker on its own port."""
        return super().start_worker(name, "--port", str(self._worker_ports[name]), *flags)

    async def start_router(self, index: int | None = None, **config: Any) -> Router:
        """Start the router of this index; without one, the next."""
        listen, admin = self._router_ports[len(self.routers) if index is None else index]
        return await super().start_router(
            listen=f"{HOST}:{listen}", admin=f"{HOST}:{admin}", **config
        )


@dataclass(slots=True)
class Outage:
    """When a router could not answer, from the blow until it served again."""

    router_index: int
    from_s: float
    until_s: float = float("inf")


class Chaos:
    """Strikes ``fleet`` and ``valkey``; ``tasks`` runs what brings them back."""

    def __init__(
        self, fleet: FixedFleet, valkey: ValkeyProcess, load: Load, tasks: asyncio.TaskGroup
    ) -> None:
        self._fleet = fleet
        self._valkey = valkey
        self._load = load
        self._tasks = tasks
        self._busy: dict[str, asyncio.Task[None]] = {}
        self._struck: set[int] = set()
        self.outages: list[Outage] = []

    async def strike(self, blow: Blow) -> None:
        """Strike and return after the blow's pause; raises what went wrong before."""
        if blow.target is Target.CLIENT:
            router_index = int((await self._free_victim(blow)).rpartition(" ")[2])
            leaving = self._load.leave(Leaving(blow.means), router_index, blow.down_s)
            self._tasks.create_task(leaving)
        else:
            victim = await self._free_victim(blow)
            task = self._tasks.create_task(self._hit(victim, blow), name=f"{victim} {blow.means}")
            self._busy[victim] = task
            task.add_done_callback(lambda _: self._busy.pop(victim))
        await asyncio.sleep(blow.pause_s)
        self.assert_that_only_victims_ended()

    async def all_back(self) -> None:
        """Wait until every victim is back."""
        while self._busy:
            await asyncio.wait(self._busy.values())
        self.assert_that_only_victims_ended()

    def assert_that_only_victims_ended(self) -> None:
        """No process may end by itself, whatever happens around it."""
        ended = [
            f"{child.name} ({child.process.returncode}):\n{child.log_tail()}"
            for child in self._fleet.processes.children
            if not child.is_alive() and child.process.pid not in self._struck
        ]
        assert not ended, "\n".join(ended)

    def thaw_all(self) -> None:
        """Let frozen processes go on, so that they can be stopped."""
        for child in self._fleet.processes.children:
            if child.is_alive():
                child.process.send_signal(signal.SIGCONT)
        self._valkey.thaw()

    def _victims(self, target: Target) -> list[str]:
        match target:
            case Target.WORKER | Target.SIDECAR:
                return [f"{target} {replica.name}" for replica in self._fleet.replicas]
            case Target.ROUTER | Target.CLIENT:
                return [f"{Target.ROUTER} {index}" for index in range(len(self._fleet.routers))]
        return [target.value]

    async def _free_victim(self, blow: Blow) -> str:
        victims = self._victims(blow.target)
        while not (free := [victim for victim in victims if victim not in self._busy]):
            waits = [self._busy[victim] for victim in victims]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        return free[int(blow.lot * len(free))]

    async def _hit(self, victim: str, blow: Blow) -> None:
        name = victim.rpartition(" ")[2]
        match blow.target:
            case Target.VALKEY:
                await self._hit_valkey(blow)
            case Target.ROUTER:
                await self._hit_router(int(name), blow)
            case Target.WORKER | Target.SIDECAR:
                await self._hit_replica(name, blow)

    async def _hit_valkey(self, blow: Blow) -> None:
        if blow.means is Means.FREEZE:
            self._valkey.freeze()
            await asyncio.sleep(blow.down_s)
            self._valkey.thaw()
            return
        self._valkey.kill()
        await asyncio.sleep(blow.down_s)
        await asyncio.to_thread(self._valkey.start)

    async def _hit_router(self, index: int, blow: Blow) -> None:
        outage = Outage(index, time.monotonic())
        self.outages.append(outage)
        if await self._hit_child(self._fleet.routers[index].child, blow):
            self._fleet.routers[index] = await self._fleet.start_router(index)
        outage.until_s = time.monotonic()

    async def _hit_replica(self, name: str, blow: Blow) -> None:
        replica = next(each for each in self._fleet.replicas if each.name == name)
        if blow.target is Target.WORKER:
            if await self._hit_child(replica.worker, blow):
                replica.worker = self._fleet.start_worker(name)
                await replica.worker.ready(READY_S)
        elif await self._hit_child(replica.sidecar, blow):
            replica.sidecar = self._fleet.start_sidecar(name, self._fleet.worker_url(name))
            await replica.sidecar.ready(READY_S)

    async def _hit_child(self, child: Child, blow: Blow) -> bool:
        """Strike one process and wait until its time is over; True when it must be started."""
        if blow.means is Means.FREEZE:
            child.process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(blow.down_s)
            child.process.send_signal(signal.SIGCONT)
            return False
        self._struck.add(child.process.pid)
        is_kill = blow.means is Means.KILL
        child.process.send_signal(signal.SIGKILL if is_kill else signal.SIGTERM)
        await until(lambda: _is_over(child), f"the end of {child.name} that was stopped", END_S)
        status = child.process.returncode
        assert status == (-signal.SIGKILL if is_kill else 0), (child.name, status, child.log_tail())
        await asyncio.sleep(blow.down_s)
        return True


async def _is_over(child: Child) -> bool:
    return not child.is_alive()


def unexplained(ledger: Iterable[Entry], outages: Iterable[Outage]) -> list[Entry]:
    """Return what nobody had a reason for: faults, and connections that closed without an outage.

    A router that lives tells a client why it gets no answer. Only the connection of an answer that
    is no stream may break without a word, when its worker dies while it sends.
    """
    outages = list(outages)
    return [entry for entry in ledger if entry.fault or _is_cut_for_nothing(entry, outages)]


def _is_cut_for_nothing(entry: Entry, outages: list[Outage]) -> bool:
    if entry.end is not End.CLOSED or (entry.status == 200 and not entry.is_stream):
        return False
    return not any(
        outage.router_index == entry.router_index
        and outage.from_s <= entry.ended_s
        and entry.began_s <= outage.until_s + MARGIN_S
        for outage in outages
    )


def group_members() -> set[tuple[int, str]]:
    """Return the process ids and command lines of this process group, but for ``ps`` itself."""
    listed = subprocess.run(
        ["ps", "-A", "-o", "pid=,pgid=,stat=,args="], check=True, capture_output=True, text=True
    ).stdout
    rows = [line.split(None, 3) for line in listed.splitlines()]
    group = str(os.getpgrp())
    return {
        (int(pid), command)
        for pid, pgid, stat, command in (row for row in rows if len(row) == 4)
        if pgid == group and not stat.startswith("Z") and not command.startswith("ps -A")
    }


def complaints(directory: Path) -> list[str]:
    """Return the lines of all processes' output that must never be there."""
    return [
        f"{path.name}: {line}"
        for path in sorted([*directory.glob("*.log"), *directory.glob("*.out")])
        for line in path.read_text(errors="replace").splitlines()
        if any(word in line for word in FORBIDDEN)
    ]


def line_counts(directory: Path) -> dict[str, int]:
    """Return how many lines each process logged, by log file."""
    return {
        path.name: len(path.read_text(errors="replace").splitlines())
        for path in sorted(directory.glob("*.log"))
    }
