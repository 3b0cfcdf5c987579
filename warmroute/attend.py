"""Looks after the replicas that ``warmroute serve`` was given by their addresses alone.

Each is looked at until it serves, and again now and then. What is found is said in one line, and
used: the size of its cache, its tokenizer, and its KV events. Where events can be had and nobody
follows them yet, a sidecar does, as a child process that ends with the router.

Several routers may be given the same replicas: a sidecar that another one took over ends with
status 3, and its attendant leaves the replica to the other as long as that one is registered.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, Self

from router.fleet import static_member
from router.upkeep import supervise
from sidecar.process import EXIT_CONFIG, EXIT_FENCED
from sidecar.scrape import EngineClient, EngineError
from state.model import EngineKind, Rung
from state.rhythm import Backoff
from warmroute.engine_look import look_at, shown
from warmroute.launch import launch
from warmroute.local_tokenizer import LocalTokenizers

if TYPE_CHECKING:
    import random
    import subprocess
    from collections.abc import Callable, Mapping
    from types import TracebackType

    from router.app import App
    from router.config import Config, StaticReplica
    from router.endpoint import Endpoint
    from router.fleet import Member
    from state.model import ReplicaId
    from warmroute.engine_look import EngineLook

POLL_S: Final = 0.5
"""How often a child and the registry are looked at."""
LOOK_S: Final = 30.0
"""A replica that serves is looked at again after this time: it may be another engine by then."""
UNREACHED_LOOK_S: Final = 1.0
ADOPT_S: Final = 2.0
"""For so long a replica whose sidecar went stays without: it may come back with its engine."""
RESTART_BASE_S: Final = 1.0
RESTART_CAP_S: Final = 30.0
STEADY_S: Final = 60.0
"""A sidecar that ran for so long is restarted at once."""
STOP_S: Final = 4.0
STOP_POLL_S: Final = 0.02
VLLM_EVENTS: Final = (
    '--kv-events-config \'{"enable_kv_cache_events":true,"publisher":"zmq",'
    '"endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5558"}\''
)
SGLANG_EVENTS: Final = (
    '--kv-events-config \'{"publisher":"zmq","endpoint":"tcp://*:5557",'
    '"replay_endpoint":"tcp://*:6557"}\''
)
_log = logging.getLogger("warmroute.attend")


class Running(Protocol):
    """What an attendant needs of a process that it started."""

    def poll(self) -> int | None:
        """Return its exit status, None while it runs."""
        ...

    def send_signal(self, sig: int, /) -> None:
        """Send it a signal."""
        ...

    def kill(self) -> None:
        """End it at once."""
        ...

    def wait(self) -> int | None:
        """Wait for its end."""
        ...


@dataclass(slots=True)
class Child:
    """A running sidecar."""

    process: Running
    started_s: float


@dataclass(slots=True, kw_only=True)
class Charge:
    """One replica and what is done for it.

    ``silent_looks``: in a row, those after which the engine did not tell the tokens of a sample.
    ``ours`` are the ids of sidecars that were registered for it while a child of this router ran.
    """

    settings: StaticReplica
    member: Member
    backoff: Backoff
    look: EngineLook | None = None
    look_due_s: float = 0.0
    silent_looks: int = 0
    start_due_s: float = 0.0
    child: Child | None = None
    ours: frozenset[str] = frozenset()
    told: str = ""


def _launch_own(
    _: str, command: list[str], environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    return launch(command, environment)


class Attendant:
    """Attends a router's configured replicas while its block runs.

    ``environment`` is what sidecars get besides that of this process: where the shared state is.
    """

    def __init__(
        self,
        config: Config,
        app: App,
        environment: Mapping[str, str],
        log_level: str,
        rng: random.Random,
    ) -> None:
        self._config = config
        self._app = app
        self._environment = environment
        self._log_level = log_level
        self._rng = rng
        self.launch: Callable[[str, list[str], Mapping[str, str]], Running] = _launch_own
        """Starts the sidecar of a replica."""
        self.may_launch: Callable[[], bool] = lambda: True
        """Whether this process has sidecars run, of several that attend the same replicas."""
        self._clock = time.monotonic
        self._charges = [
            Charge(
                settings=replica,
                member=static_member(replica),
                backoff=Backoff(RESTART_BASE_S, RESTART_CAP_S, rng),
            )
            for replica in config.replicas
        ]
        self._tokenizers = LocalTokenizers(config, app.prompts)
        self._members: Mapping[ReplicaId, Member] = {}
        self._registered: Mapping[Endpoint, frozenset[str]] = {}
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        """Start to attend."""
        self._tasks = [
            asyncio.create_task(supervise(name, partial(self._attend, charge)), name=name)
            for charge in self._charges
            for name in (f"attend {charge.member.replica}",)
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End every sidecar that was started here."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        children = [charge.child.process for charge in self._charges if charge.child is not None]
        for process in children:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for _ in range(round(STOP_S / STOP_POLL_S)):
            if all(process.poll() is not None for process in children):
                break
            await asyncio.sleep(STOP_POLL_S)
        for process in children:
            if process.poll() is None:
                process.kill()
            process.wait()

    async def _attend(self, charge: Charge) -> None:
        """Attend one replica for ever."""
        api_key = self._config.upstream.api_key
        tls = self._config.upstream.tls
        async with EngineClient(charge.settings.url, api_key=api_key, tls=tls) as client:
            while True:
                self._reap(charge)
                if self._clock() >= charge.look_due_s:
                    await self._look(charge, client)
                self._follow(charge)
                await asyncio.sleep(POLL_S)

    def _reap(self, charge: Charge) -> None:
        """Note how a sidecar ended, and when the next one may start."""
        child = charge.child
        status = child.process.poll() if child is not None else None
        if child is None or status is None:
            if child is not None:
                charge.ours = self._sidecars_of(charge) or charge.ours
            return
        charge.child = None
        now_s = self._clock()
        charge.look_due_s = now_s
        if status == EXIT_FENCED:
            charge.ours = frozenset()
            charge.start_due_s = now_s + self._patience_s()
            return
        if now_s - child.started_s >= STEADY_S:
            charge.backoff.reset()
        pause_s = RESTART_CAP_S if status == EXIT_CONFIG else charge.backoff.next_s()
        charge.start_due_s = now_s + pause_s
        _log.warning(
            "sidecar ended: replica=%s status=%d, the next one starts in %.1f s",
            charge.member.replica,
            status,
            pause_s,
        )

    async def _look(self, charge: Charge, client: EngineClient) -> None:
        try:
            charge.look = await look_at(client)
        except EngineError:
            charge.look_due_s = self._clock() + UNREACHED_LOOK_S
            return
        if charge.look.capacity_tokens is not None:
            self._app.fleet.learn_capacity(charge.member.replica, charge.look.capacity_tokens)
        is_told = await self._tokenizers.consider(
            charge.member.replica, charge.look, client, self._config.upstream.api_key
        )
        charge.silent_looks = 0 if is_told else charge.silent_looks + 1
        pause_s = LOOK_S if is_told else UNREACHED_LOOK_S * 2**charge.silent_looks
        charge.look_due_s = self._clock() + min(LOOK_S, pause_s)

    def _follow(self, charge: Charge) -> None:
        """Start a sidecar where one can follow and none is; say what was decided, once."""
        look = charge.look
        if look is None:
            return
        if charge.child is not None:
            self._tell(charge, look, is_elsewhere=False)
            return
        rung, _ = self._app.reader.freshness()
        if rung is not Rung.LIVE:
            return  # whether a sidecar is registered is not known
        # What a child that was killed registered stays there for a while.
        is_elsewhere = bool(self._sidecars_of(charge) - charge.ours)
        if is_elsewhere:
            charge.start_due_s = self._clock() + self._patience_s()
        elif can_follow(charge, look) and self._clock() >= charge.start_due_s:
            if not self.may_launch():
                return  # the one that does tells of it
            self._start(charge)
        self._tell(charge, look, is_elsewhere=is_elsewhere)

    def _patience_s(self) -> float:
        """Return how long a replica that others attended stays without; routers differ in it."""
        return ADOPT_S * self._rng.uniform(1.0, 2.0)

    def _sidecars_of(self, charge: Charge) -> frozenset[str]:
        """Return the ids of the sidecars that the registry shows for the replica's address."""
        members = self._app.fleet.members()
        if members is not self._members:  # gone through once for all replicas
            self._members = members
            states = self._app.reader.replicas()
            found: dict[Endpoint, set[str]] = {}
            for replica, member in members.items():
                if member.is_registered and replica in states:
                    ids = found.setdefault(member.endpoint, set())
                    ids.add(states[replica].record.sidecar)
            self._registered = {endpoint: frozenset(ids) for endpoint, ids in found.items()}
        return self._registered.get(charge.member.endpoint, frozenset())

    def _start(self, charge: Charge) -> None:
        words = {
            "--engine": charge.settings.url,
            "--replica": charge.member.replica,
            "--drain-grace-s": "0",  # the engine stays
            "--chain-seed": str(self._config.state.chain_seed),
            "--log-level": self._log_level,
        }
        if self._config.deployment_key_file is not None:
            words["--deployment-key-file"] = self._config.deployment_key_file
        command = [sys.executable, "-m", "warmroute", "sidecar"]
        command += [word for pair in words.items() for word in pair]
        process = self.launch(charge.member.replica, command, self._environment)
        charge.child = Child(process, self._clock())

    def _tell(self, charge: Charge, look: EngineLook, *, is_elsewhere: bool) -> None:
        """Log what was found and decided, where that is news."""
        if is_elsewhere:
            decision = "a sidecar is registered"
        elif charge.member.endpoint.path is not None:
            decision = "at a unix socket: what it holds is guessed"
        elif not look.sources:
            decision = f"no KV events: what it holds is guessed{advice(look)}"
        elif look.unreachable:
            places = ", ".join(map(shown, look.unreachable))
            decision = (
                f"KV events at {places} cannot be reached: what it holds is guessed "
                "(engines listen at an endpoint with a * and connect to all others)"
            )
        else:
            decision = "a sidecar of this router follows its KV events" + advice(look)
        model = look.base_models[0]
        directory = self._tokenizers.directory(model)
        parts = [
            f"{look.kind.value}, model {shown(model)}",
            f"pages of {look.page_tokens} tokens" if look.page_tokens else "",
            f"cache of {look.capacity_tokens} tokens" if look.capacity_tokens else "",
            f"{look.ranks} data-parallel ranks" if look.ranks > 1 else "",
            f"prompts read with {shown(str(directory))}" if directory is not None else "",
            decision,
        ]
        line = "; ".join(part for part in parts if part)
        if line != charge.told:
            charge.told = line
            _log.info("replica %s: %s", charge.member.replica, line)


def can_follow(charge: Charge, look: EngineLook) -> bool:
    """Return whether a sidecar may follow: other routers could not dial a unix socket."""
    return look.can_follow and charge.member.endpoint.path is None


def advice(look: EngineLook) -> str:
    """Return what the engine should be started with besides, if anything."""
    missing = []
    events = {EngineKind.VLLM: VLLM_EVENTS, EngineKind.SGLANG: SGLANG_EVENTS}.get(look.kind)
    if not look.sources and events is not None:
        missing.append(events)
    elif look.sources and any(source.replay is None for source in look.sources.values()):
        missing.append("a replay_endpoint in its --kv-events-config")
    if look.does_report_hits is False:
        missing.append("--enable-cache-report")
    if not look.does_cache:
        missing.append("its radix cache (without --disable-radix-cache)")
    return f" (start it with {', and '.join(missing)})" if missing else ""
