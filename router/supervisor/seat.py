"""One process of several: what its supervisor gave it, and what it tells the supervisor.

A supervisor that is gone is noticed by the end of the channel: the process ends as on SIGTERM.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Final

from router.config import decode_config
from router.drain import Stop
from router.listener import Listener
from router.supervisor.ask import ask
from router.supervisor.listener import SharedListener
from router.supervisor.message import (
    Accept,
    Channel,
    End,
    Farewell,
    Launch,
    Lead,
    Leaving,
    Ready,
    Relieve,
    Reload,
    Retire,
    SidecarEnded,
)
from router.supervisor.share import seated
from state.model import Rung

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from router.app import App
    from router.client import Handler
    from router.reply import Response
    from router.request import Request
    from router.supervisor.message import Message, Orders
    from router.tls import ListenerContext

_log = logging.getLogger(__name__)

FRONT: Final = "front"
"""The name of the socket at which the supervisor answers its processes."""
SUCCESSOR_S: Final = 10.0
"""How long a process that follows another one waits for what it needs before it serves."""
LOOK_S: Final = 0.02
LIVE_S: Final = 2.0
"""For so long of that it waits for a live view of the shared state, too."""


def socket_of(folder: Path, number: int) -> Path:
    """Return where process ``number`` answers operators' questions."""
    return folder / f"p{number}"


class SeatStop(Stop):
    """Asked for by the supervisor; signals are passed on to it at first."""

    def __init__(self, relieve: Callable[[], None]) -> None:
        super().__init__()
        self._relieve = relieve
        self._is_signalled = False

    def listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take SIGTERM from now on; SIGINT is the supervisor's."""
        loop.add_signal_handler(signal.SIGTERM, self._signalled)
        loop.add_signal_handler(signal.SIGINT, lambda: None)

    def _signalled(self) -> None:
        if self._is_signalled or self.asked.is_set():
            self.asked.set()
        else:
            self._is_signalled = True
            self._relieve()

    def retire(self) -> None:
        """End, as another process has taken over."""
        self.is_retiring = True
        self.asked.set()

    def end(self, told: End) -> None:
        """End as all others do."""
        self.is_retiring = False
        self.is_interactive = self.is_interactive or told.is_interactive
        self.asked.set()
        if told.is_insisting:
            self.insisted.set()


class RemoteSidecar:
    """A sidecar that the supervisor runs: the part of ``Popen`` that an attendant needs."""

    def __init__(self) -> None:
        self.status: int | None = None

    def poll(self) -> int | None:
        """Return its exit status, None while it runs."""
        return self.status

    def send_signal(self, number: int) -> None:
        """Leave it: it goes on when this process ends."""

    def kill(self) -> None:
        """Leave it, too."""

    def wait(self) -> int | None:
        """Return at once."""
        return self.status


class Seat:
    """This process's place among the others."""

    def __init__(self, orders: Orders, control: socket.socket) -> None:
        self.number = orders.number
        self.config = seated(decode_config(orders.config), orders.number)
        self.state_url = orders.state_url
        self.stop = SeatStop(self._ask_for_relief)
        self.is_lead = False
        self.on_reload: list[Callable[[], None]] = []
        self._orders = orders
        self._folder = Path(orders.folder)
        self._channel = Channel(control)
        self._sockets = [socket.socket(fileno=fd) for fd in orders.sockets]
        self._clients: SharedListener | None = None
        self._sidecars: dict[int, RemoteSidecar] = {}
        self._next_sidecar = 0
        self._listening: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Listen to the supervisor from now on."""
        await self._channel.open()
        self._listening = asyncio.create_task(self._listen(), name="supervisor")

    async def close(self) -> None:
        """End the channel, when everything is told."""
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)
        await self._channel.close()

    def clients(self, tls: ListenerContext | None) -> SharedListener:
        """Return the clients' listener."""
        self._clients = SharedListener(
            self._orders.url, self._sockets, tls, lambda: self._channel.send(Leaving())
        )
        return self._clients

    def operators(self) -> Listener:
        """Return the listener of which only the supervisor knows."""
        return Listener("admin", f"unix:{socket_of(self._folder, self.number)}")

    async def settled(self, app: App) -> None:
        """Wait until this process serves as well as the one that it follows, but not for ever."""
        if not self._orders.is_successor:
            return
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        while (waited_s := loop.time() - began_s) < SUCCESSOR_S and not self.stop.asked.is_set():
            members = app.fleet.members()
            is_up = any(app.health.is_up(replica) for replica in members)
            is_live = app.reader.freshness()[0] is Rung.LIVE or waited_s > LIVE_S
            if is_up and is_live:
                return
            await asyncio.sleep(LOOK_S)

    def ready(self) -> None:
        """Tell that connections can be accepted."""
        self._channel.send(Ready())

    def farewell(self, metrics: bytes, pulse: bytes) -> None:
        """Leave the last figures behind."""
        self._channel.send(Farewell(metrics=metrics, pulse=pulse))

    def client_routes(self) -> dict[str, Mapping[str, Handler]]:
        """Return what clients ask and only the supervisor can answer."""
        return {"/metrics": {"GET": self._metrics, "HEAD": self._metrics}}

    async def _metrics(self, request: Request) -> Response:
        return (await ask(self._folder / FRONT, request)).response()

    def launch(
        self, replica: str, command: list[str], environment: Mapping[str, str]
    ) -> RemoteSidecar:
        """Let the supervisor run a sidecar, which goes on when this process ends."""
        self._next_sidecar += 1
        sidecar = self._sidecars[self._next_sidecar] = RemoteSidecar()
        self._channel.send(
            Launch(
                sidecar=self._next_sidecar,
                replica=replica,
                command=tuple(command),
                environment=dict(environment),
            )
        )
        return sidecar

    def _ask_for_relief(self) -> None:
        self._channel.send(Relieve())

    async def _listen(self) -> None:
        while (message := await self._channel.receive()) is not None:
            self._take(message)
        if not self.stop.asked.is_set():
            _log.warning("the supervisor is gone: this process ends, too")
        self.stop.end(End())

    def _take(self, message: Message) -> None:
        match message:
            case Accept(sockets=places):
                if self._clients is not None:
                    self._clients.accept_from(places)
            case Lead():
                self.is_lead = True
            case Retire():
                self.is_lead = False
                self.stop.retire()
            case End():
                self.is_lead = False
                self.stop.end(message)
            case Reload():
                for reload in self.on_reload:
                    reload()
            case SidecarEnded(sidecar=number, status=status):
                sidecar = self._sidecars.pop(number, None)
                if sidecar is not None:
                    sidecar.status = status
            case _:
                _log.warning("the supervisor said %s", type(message).__name__)
