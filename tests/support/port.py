"""Ports of servers that a test starts, stops, and starts again at the same address.

A port of the system's own choice is one that it may give to an outgoing connection as soon as the
server is down. These are below all that it gives, and none is given twice by one process.
"""

from __future__ import annotations

import itertools
import random
import socket
from typing import Final

HOST: Final = "127.0.0.1"
FIRST_PORT: Final = 10_000
LAST_PORT: Final = 32_000
_START: Final = random.SystemRandom().randrange(FIRST_PORT, LAST_PORT)
_CANDIDATES: Final = itertools.chain(
    range(_START, LAST_PORT), itertools.cycle(range(FIRST_PORT, LAST_PORT))
)


def free_port() -> int:
    """Return a port that nobody uses now and that no outgoing connection is given."""
    while True:
        port = next(_CANDIDATES)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
        return port


def free_ports(count: int) -> list[int]:
    """Return so many of them."""
    return [free_port() for _ in range(count)]
