"""The supervisor: a router of several processes, from its first socket to its last process.

It handles no request of a client. It owns the listening sockets, the private state server and the
operators' listener, starts the processes, and puts together what they tell.
"""

from __future__ import annotations

import asyncio
import logging
import random
import shutil
import signal
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from router.capacity import ShortageLog, capacity_of, open_files_most
from router.drain import Stop
from router.history import History
from router.listener import Listener
from router.origin import open_guard
from router.process import Served
from router.supervisor.binding import Binding
from router.supervisor.census import Census
from router.supervisor.crew import Crew, Plan
from router.supervisor.front import Front
from router.supervisor.glance import Glance
from router.supervisor.message import End
from router.supervisor.poll import Poll
from router.supervisor.seat import FRONT
from router.supervisor.sidecars import Sidecars
from router.tls import listener_contexts, watch_tls
from router.upkeep import supervise
from state.address import redact
from state.embedded import EmbeddedValkey
from state.tls import ClientContext, ClientTls

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from router.client import Handler
    from router.config import Config
    from router.supervisor.sidecars import Starter
    from router.tls import ListenerContext, TlsWatch

_log = logging.getLogger(__name__)

RESTART: Final = signal.SIGUSR2
_PREFIX: Final = "wrp-"
_PATH_MOST_BYTES: Final = 90
"""Of the folder: a Unix socket's path has room for 103 bytes on some systems."""


class Means(msgspec.Struct, frozen=True, kw_only=True):
    """How processes are started: ``command`` takes the descriptor of the channel behind it."""

    command: tuple[str, ...]
    log_level: str
    loop: str


class Supervisor:
    """One router of ``config.processes``; ``serve`` runs it."""

    def __init__(
        self, config: Config, means: Means, ready: Callable[[Served], None], start: Starter
    ) -> None:
        self._config = config
        self._means = means
        self._ready = ready
        self._sidecars = Sidecars(start)
        self._stop = Stop()
        self._restarts: set[asyncio.Task[bool]] = set()

    async def serve(self) -> None:
        """Run until SIGTERM or SIGINT; raises ConfigError and CrewFailedError."""
        config = self._config
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(ShortageLog())
        async with AsyncExitStack() as stack:
            contexts = listener_contexts(config)
            mode = int(config.socket_mode, 8)
            is_tls = "listen" in contexts
            binding = Binding(config.listen, config.processes, is_tls=is_tls, mode=mode)
            stack.callback(binding.close)
            operators = self._operators(stack, contexts, mode)
            folder = _private_folder()
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            state_url = config.state.redis
            if state_url is None:
                state_url = (await stack.enter_async_context(EmbeddedValkey())).url
            stack.push_async_callback(self._sidecars.close)
            crew = Crew(self._plan(binding, state_url, folder), random.SystemRandom())
            crew.on_launch = self._sidecars.launch
            crew.on_closed = binding.close
            front, poll = self._front(crew, binding.url)
            crew.on_ended = poll.buried
            await self._open_doors(stack, front, operators, folder)
            watch = watch_tls(
                {"admin": contexts["admin"]} if "admin" in contexts else {},
                ClientContext(ClientTls()),
            )
            self._listen(loop, crew, watch)
            served = Served(
                url=binding.url,
                admin_url=None if operators is None else operators.url,
                state_url=redact(state_url),
            )
            await self._run(crew, poll, front, watch, served)

    def _plan(self, binding: Binding, state_url: str, folder: Path) -> Plan:
        config, means = self._config, self._means
        return Plan(
            processes=config.processes,
            command=means.command,
            config=msgspec.to_builtins(config),
            sockets=tuple(each.fileno() for each in binding.sockets),
            url=binding.url,
            state_url=state_url,
            folder=str(folder),
            log_level=means.log_level,
            loop=means.loop,
            drain_s=config.drain.accept_s + config.drain.grace_s,
        )

    def _operators(
        self, stack: AsyncExitStack, contexts: Mapping[str, ListenerContext], mode: int
    ) -> Listener | None:
        if self._config.admin is None:
            return None
        operators = Listener("admin", self._config.admin, contexts.get("admin"), mode)
        stack.push_async_callback(operators.close)
        return operators

    def _front(self, crew: Crew, url: str) -> tuple[Front, Poll]:
        now_unix_s = time.time()
        census, history = Census(), History(time.monotonic, now_unix_s)
        glance = Glance(history, url, now_unix_s, self._stop.asked.is_set)
        poll = Poll(crew.children, census, history, glance, time.monotonic)
        return Front(crew, poll, census, url, now_unix_s), poll

    async def _open_doors(
        self, stack: AsyncExitStack, front: Front, operators: Listener | None, folder: Path
    ) -> None:
        """Answer operators, and the processes where clients ask for the metrics of all."""
        inner = Listener("admin", f"unix:{folder / FRONT}")
        stack.push_async_callback(inner.close)
        metrics: dict[str, Handler] = {"GET": front.metrics}
        await inner.start({"/metrics": metrics})
        if operators is not None:
            routes = open_guard(self._config).guarded(front.routes())
            capacity = capacity_of(self._config.limits, open_files_most())
            await operators.start(routes, capacity.operators)

    def _listen(self, loop: asyncio.AbstractEventLoop, crew: Crew, watch: TlsWatch) -> None:
        """Take signals from now on."""
        self._stop.listen(loop)

        def reload() -> None:
            crew.reload()
            if watch.has_files:
                watch.reload()

        def restart() -> None:
            if self._restarts:
                _log.warning("processes are being replaced already")
                return
            task = asyncio.ensure_future(self._restart(crew))
            self._restarts.add(task)
            task.add_done_callback(self._restarts.discard)

        loop.add_signal_handler(signal.SIGHUP, reload)
        loop.add_signal_handler(RESTART, restart)

    async def _restart(self, crew: Crew) -> bool:
        _log.info("replacing %d processes, one after the other", self._config.processes)
        is_done = await crew.restart()
        if is_done:
            _log.info("all processes were replaced")
        elif not self._stop.asked.is_set():
            _log.error("not all processes were replaced; those before go on")
        return is_done

    async def _run(
        self, crew: Crew, poll: Poll, front: Front, watch: TlsWatch, served: Served
    ) -> None:
        chores: dict[str, Callable[[], Awaitable[None]]] = {
            "poll": poll.run,
            "live": poll.live.run,
            "sidecars": self._sidecars.run,
        }
        if watch.has_files:
            chores["TLS"] = watch.run
        background = [
            asyncio.create_task(supervise(name, run), name=name) for name, run in chores.items()
        ]
        running = asyncio.create_task(crew.run(), name="crew")
        asked = asyncio.create_task(self._stop.asked.wait())
        serving = asyncio.create_task(crew.serving.wait())
        try:
            await asyncio.wait((running, asked, serving), return_when=asyncio.FIRST_COMPLETED)
            if serving.done() and not asked.done():
                self._ready(served)
                await asyncio.wait((running, asked), return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                front.is_draining = True
                await self._end(crew)
            await running
            await crew.gone()
            poll.live.end()
        finally:
            tasks = [*background, running, asked, serving, *self._restarts]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _end(self, crew: Crew) -> None:
        """Let all processes end, at once after a second signal."""
        is_interactive = self._stop.is_interactive
        crew.end(End(is_interactive=is_interactive))
        gone = asyncio.create_task(crew.gone())
        insisted = asyncio.create_task(self._stop.insisted.wait())
        await asyncio.wait((gone, insisted), return_when=asyncio.FIRST_COMPLETED)
        if not gone.done():
            crew.end(End(is_interactive=is_interactive, is_insisting=True))
        await gone
        insisted.cancel()
        await asyncio.gather(insisted, return_exceptions=True)


def _private_folder() -> Path:
    """Return a new folder of mode 0700 whose path leaves room for a socket's name."""
    folder = tempfile.mkdtemp(prefix=_PREFIX)
    if len(folder.encode()) < _PATH_MOST_BYTES:
        return Path(folder)
    Path(folder).rmdir()
    return Path(tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp"))
