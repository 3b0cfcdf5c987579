"""One router process as its supervisor knows it: started, ready, leaving, ended."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from router.supervisor.message import (
    Accept,
    Channel,
    Farewell,
    Launch,
    Lead,
    Leaving,
    Ready,
    Relieve,
)
from router.supervisor.seat import socket_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from router.supervisor.message import Message, Orders

REAP_S: Final = 0.01
LINGER_S: Final = 5.0
"""How long a process may still be there after it closed the channel."""


class Child:
    """One process. ``place`` is which of the sockets is its own, ``life`` tells it from all others.

    The callables are told what it says; ``ended`` is set once it is gone.
    """

    def __init__(self, orders: Orders, place: int, life: int) -> None:
        self.number = orders.number
        self.place = place
        self.life = life
        self.path = socket_of(Path(orders.folder), orders.number)
        self.is_ready = False
        self.is_accepting = False
        self.has_to_end = False
        """It was told to: its end is no crash."""
        self.ready_s: float | None = None
        self.changed = asyncio.Event()
        self.ended = asyncio.Event()
        self.status: int | None = None
        self.farewell: Farewell | None = None
        self.on_leaving: Callable[[], None] = lambda: None
        self.on_relieve: Callable[[], None] = lambda: None
        self.on_launch: Callable[[Launch], None] = lambda _: None
        self.pid = 0
        self._orders = orders
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: Channel | None = None
        self._told: tuple[int, ...] = ()
        self._task: asyncio.Task[None] | None = None

    async def start(self, command: Sequence[str]) -> None:
        """Start ``command`` with the descriptor of the channel behind it; raises OSError."""
        ours, theirs = socket.socketpair()
        try:
            theirs.set_inheritable(True)
            descriptor = theirs.fileno()
            self._process = subprocess.Popen(  # noqa: ASYNC220, S603 - our own program; it only forks
                [*command, str(descriptor)],
                stdin=subprocess.DEVNULL,
                pass_fds=(descriptor, *self._orders.sockets),
                process_group=0,  # Ctrl-C is the supervisor's to tell
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self.pid = self._process.pid
        self._channel = Channel(ours)
        await self._channel.open()
        self._channel.send(self._orders)
        self._task = asyncio.create_task(self._follow(), name=f"process {self.number}")

    def send(self, message: Message) -> None:
        """Tell it something, if it is still there."""
        if self._channel is not None:
            self._channel.send(message)

    def accept_from(self, places: Sequence[int]) -> None:
        """Let it accept from these sockets, where that is news."""
        wanted = tuple(sorted(places))
        if wanted != self._told:
            self._told = wanted
            self.send(Accept(wanted))

    def lead(self) -> None:
        """Let it do what only one does."""
        self.send(Lead())

    def kill(self) -> None:
        """End it at once."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait until something holds of it, or it is gone."""
        while not is_so() and not self.ended.is_set():
            self.changed.clear()
            await self.changed.wait()

    async def _follow(self) -> None:
        channel, process = self._channel, self._process
        assert channel is not None  # noqa: S101 - start has made both
        assert process is not None  # noqa: S101
        while (message := await channel.receive()) is not None:
            self._take(message)
            self.changed.set()
        self._left()
        began_s = asyncio.get_running_loop().time()
        while process.poll() is None:
            await asyncio.sleep(REAP_S)
            if asyncio.get_running_loop().time() - began_s > LINGER_S:
                process.kill()
        self.status = process.returncode
        await channel.close()
        with suppress(OSError):
            self.path.unlink()
        self.ended.set()
        self.changed.set()

    def _take(self, message: Message) -> None:
        match message:
            case Ready():
                self.is_ready = self.is_accepting = True
                self.ready_s = asyncio.get_running_loop().time()
            case Leaving():
                self._left()
            case Relieve():
                self.on_relieve()
            case Launch():
                self.on_launch(message)
            case Farewell():
                self.farewell = message
            case _:
                pass

    def _left(self) -> None:
        if self.is_accepting:
            self.is_accepting = False
            self.on_leaving()


def told_of(status: int | None) -> str:
    """Return how a process ended, for a person."""
    if status is None:
        return "it has not ended"
    if status >= 0:
        return f"status {status}"
    with suppress(ValueError):
        return signal.Signals(-status).name
    return f"signal {-status}"
