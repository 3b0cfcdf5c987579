"""The whole stand: a store, replicas behind links, two routers, clients, and all evidence of it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import secrets
import signal
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Self

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from chaos.client import Crowd, Tenant
from chaos.engines import Engine
from chaos.evidence import Evidence, Outage, read_ledger
from chaos.speech import MODEL, TEMPLATE
from chaos.watch import Look, Watch
from prompt.codec import load_codec
from support.parted_link import PartedLink
from support.port import free_ports
from support.valkey import ValkeyProcess
from warmroute.local import Child, Processes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

READY_S: Final = 90.0
SETTLE_S: Final = 60.0
POLL_S: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to build. ``config`` goes on top of each router's file."""

    seed: int
    replicas: int = 6
    routers: int = 2
    rate_hz: float = 20.0
    config: dict[str, Any] = field(default_factory=dict)


SETTINGS: Final[dict[str, Any]] = {
    "state": {},
    "attend_sidecars": False,
    "receipts": False,
    "decisions_kept": 4_000,
    "upstream": {
        "connect_timeout_s": 1.0,
        "first_byte_timeout_s": 6.0,
        "chunk_idle_timeout_s": 5.0,
        "pool_idle_s": 1.0,
    },
    "health": {"interval_s": 0.4, "timeout_s": 1.0, "fall": 2, "rise": 1, "slow_start_s": 2.0},
    "ejection": {"base_s": 1.0, "most_s": 4.0, "decay_s": 4.0, "panic_leave_s": 1.0},
    "quarantine": {"ttl_s": 10.0},
    "limits": {"head_deadline_s": 60.0},  # clients are late themselves on a busy machine
    "drain": {"accept_s": 2.0, "grace_s": 6.0},
    "seed": 5,
}
"""Times of a router, shortened so that what takes minutes takes seconds."""


@dataclass(slots=True)
class RouterProcess:
    """One of the routers; ``life`` counts its starts."""

    index: int
    listen: int
    admin: int
    link: PartedLink
    life: int = 0
    child: Child | None = None

    @property
    def pid(self) -> int:
        """Its process."""
        assert self.child is not None
        return self.child.process.pid


class Rig:
    """``async with Rig(directory, plan) as rig``; all processes end with it."""

    def __init__(self, directory: Path, plan: Plan) -> None:
        self.directory = directory
        self.plan = plan
        self.processes = Processes(directory)
        self.valkey = ValkeyProcess()
        self.engines: list[Engine] = []
        self.routers: list[RouterProcess] = []
        self.outages: list[Outage] = []
        self._secret = secrets.token_bytes(16)
        self.key = self._secret
        self._stack = contextlib.AsyncExitStack()
        self.tenants = [
            Tenant(name, f"sk-chaos-{secrets.token_hex(12)}", f"zq{secrets.token_hex(7)}")
            for name in ("acme", "globex")
        ]
        self.crowd = Crowd(
            lambda index: self.routers[index].listen, self.tenants, self.key, plan.seed
        )
        self.crowd.routers = plan.routers
        self.crowd.shape.rate_hz = plan.rate_hz
        self.watch = Watch(self)

    async def __aenter__(self) -> Self:
        try:
            self._stack.enter_context(self.valkey)
            await self._stack.enter_async_context(self.processes)
            self._write_files()
            names = [f"w{index}" for index in range(self.plan.replicas)]
            ports = free_ports(len(names) + 2 * self.plan.routers)
            self.engines = [
                Engine(name, ports.pop(), self.processes, self.directory) for name in names
            ]
            for engine in self.engines:
                self._stack.push_async_callback(engine.close)
            about = (load_codec(self.directory / "tokenizer").digest, self._deployment)
            await asyncio.gather(
                *(engine.open(self.key, self.valkey.url, about) for engine in self.engines)
            )
            for index in range(self.plan.routers):
                link = await self._stack.enter_async_context(PartedLink(self.valkey.socket_path))
                self.routers.append(RouterProcess(index, ports.pop(), ports.pop(), link))
            await asyncio.gather(*(self.start_router(router) for router in self.routers))
            await self.settle()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *about: object) -> None:
        await self._stack.aclose()

    def _write_files(self) -> None:
        folder = self.directory / "tokenizer"
        folder.mkdir()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {_level(byte): byte for byte in range(256)}
        assert sorted(vocabulary) == alphabet
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.save(str(folder / "tokenizer.json"))
        told = {"chat_template": TEMPLATE}
        (folder / "tokenizer_config.json").write_text(json.dumps(told))
        path = self.directory / "deployment.key"
        self._deployment = secrets.token_hex(32).encode()
        path.touch(0o600)
        path.write_bytes(self._deployment)

    @property
    def secrets(self) -> tuple[str, ...]:
        """What must be nowhere."""
        return (self._deployment.decode(), *(tenant.key for tenant in self.tenants))

    # Routers.

    async def start_router(
        self,
        router: RouterProcess,
        prefix: tuple[str, ...] = (),
        config: dict[str, Any] | None = None,
    ) -> None:
        """Start a router's next life, behind ``prefix``, with ``config`` on top; wait for it."""
        router.life += 1
        tenants = [
            {"name": one.name, "key_digests": [hashlib.sha256(one.key.encode()).hexdigest()]}
            for one in self.tenants
        ]
        settings = {
            **SETTINGS,
            "listen": f"127.0.0.1:{router.listen}",
            "admin": f"127.0.0.1:{router.admin}",
            "state": {"redis": router.link.url},
            "models": [{"name": MODEL, "tokenizer": str(self.directory / "tokenizer")}],
            "tenants": tenants,
            "deployment_key_file": str(self.directory / "deployment.key"),
            "tenants_state_file": str(self.directory / f"epochs-{router.index}.json"),
            **self.plan.config,
            **(config or {}),
        }
        path = self.directory / f"router-{router.index}.json"
        path.write_text(json.dumps(settings))
        words = [sys.executable, "-m", "warmroute", "serve", "--config", str(path)]
        command = [*prefix, *words]
        child = self.processes.start_command(f"router-{router.index}", command)
        router.child = await child.ready(READY_S)

    def begin_outage(self, router: RouterProcess) -> Outage:
        """Note that a router cannot answer from now on."""
        outage = Outage(router=router.index, from_s=time.monotonic())
        self.outages.append(outage)
        return outage

    async def bring_back(self, router: RouterProcess, outage: Outage) -> None:
        """Start a router that ended."""
        await self.start_router(router)
        await self.settle()
        outage.until_s = time.monotonic()

    async def restore(self) -> None:
        """Undo what a step that broke may have left."""
        for engine in self.engines:
            engine.send(signal.SIGCONT)
            engine.link.heal()
            if not engine.is_alive:
                await engine.start()
            with contextlib.suppress(OSError, TimeoutError):
                await engine.mode("normal")
        for router in self.routers:
            router.link.heal()
            router.link.delay_s = 0.0

    # Waiting.

    async def until(
        self, is_so: Callable[[list[Look]], bool], timeout_s: float = SETTLE_S
    ) -> float | None:
        """Wait until looks at all routers that live say so; return how long, None: not in time."""
        began_s = time.monotonic()
        while time.monotonic() - began_s < timeout_s:
            looks = await self.watch.looks()
            if looks and is_so(looks):
                return time.monotonic() - began_s
            await asyncio.sleep(POLL_S)
        return None

    async def settle(self, timeout_s: float = SETTLE_S) -> float:
        """Wait until every router has every replica up and in no trouble; raises TimeoutError."""
        names = {engine.name for engine in self.engines}

        def is_well(looks: list[Look]) -> bool:
            return all(
                set(look.replicas) == names
                and all(one.is_up and one.standing in GOOD for one in look.replicas.values())
                and look.is_ready
                for look in looks
            )

        took_s = await self.until(is_well, timeout_s)
        if took_s is None:
            shown = [
                {name: (one.is_up, one.standing) for name, one in look.replicas.items()}
                for look in await self.watch.looks()
            ]
            message = f"the fleet does not come back: {shown}"
            raise TimeoutError(message)
        return took_s

    def evidence(self) -> Evidence:
        """Return everything that was noted; ``watch.rest`` comes before."""
        watch = self.watch
        artefacts = {
            path.name: path.read_text(errors="replace")
            for path in sorted(self.directory.glob("*.log")) + sorted(self.directory.glob("*.out"))
            if "router" in path.name
        }
        return Evidence(
            key=self.key,
            clients=self.crowd.ledger,
            replicas=[
                line
                for one in self.engines
                for line in read_ledger(one.ledger)
                if line["event"] != "end"
            ],
            decisions=list(watch.records.values()),
            samples=watch.samples,
            outages=self.outages,
            rests=watch.rests,
            replica_active=watch.replica_active,
            artefacts=artefacts | watch.shown,
            secrets=self.secrets,
            keys_without_ttl=watch.keys_without_ttl,
            redis_clients=watch.redis_clients,
            replica_names=frozenset(engine.name for engine in self.engines),
            reborn=frozenset(one.name for one in self.engines if len(one.lives) > 1),
        )


GOOD: Final = frozenset({"up", "slow_start"})


def _level(byte: int) -> str:
    """Return the character that stands for a byte in a byte-level vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if byte in plain:
        return chr(byte)
    return chr(256 + [one for one in range(256) if one not in plain].index(byte))
