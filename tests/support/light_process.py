"""A process for a supervisor to keep that starts quickly: it answers connections with its pid.

``python -m support.light_process FD``. Its orders' configuration is the path of a folder: a file
``fails`` in it lets it end with status 3 at its start, ``refuses`` with status 2.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from pathlib import Path

from router.accept import accepted_from
from router.supervisor.message import (
    Accept,
    Channel,
    End,
    Farewell,
    Leaving,
    Ready,
    Retire,
    receive_orders,
)


async def answer(sock: socket.socket) -> None:
    """Answer everybody who comes."""
    while True:
        accepted, _ = await accepted_from(sock)
        with accepted, contextlib.suppress(OSError):
            accepted.sendall(str(os.getpid()).encode())


async def run(control: socket.socket) -> int:
    """Do as told until the end."""
    orders = await asyncio.to_thread(receive_orders, control)
    folder = Path(str(orders.config))
    for name, status in (("fails", 3), ("refuses", 2)):
        if (folder / name).exists():
            return status
    channel = Channel(control)
    await channel.open()
    sockets = [socket.socket(fileno=descriptor) for descriptor in orders.sockets]
    for each in sockets:
        each.settimeout(0)
    tasks: dict[int, asyncio.Task[None]] = {}
    channel.send(Ready())
    while (message := await channel.receive()) is not None:
        if isinstance(message, End | Retire):
            break
        if isinstance(message, Accept):
            for place in tasks.keys() - set(message.sockets):
                tasks.pop(place).cancel()
            for place in set(message.sockets) - tasks.keys():
                tasks[place] = asyncio.create_task(answer(sockets[place]))
    for task in tasks.values():
        task.cancel()
    await asyncio.gather(*tasks.values(), return_exceptions=True)
    channel.send(Leaving())
    channel.send(Farewell(metrics=b"", pulse=b""))
    await channel.close()
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(run(socket.socket(fileno=int(sys.argv[1])))))
