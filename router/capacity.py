"""How many connections the open files of this process are enough for.

A request in progress has two of them, the client's and the replica's. What is left goes to clients
that are told that there are too many, to operators, and to everything else: the state server,
health checks, logs. So operators get in, and streams go on, however many clients come.
"""

from __future__ import annotations

import logging
import resource
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct, structs

from router.config import LimitSettings
from router.server import SHED_MOST
from router.upstream import NO_DESCRIPTOR

if TYPE_CHECKING:
    import asyncio

_log = logging.getLogger(__name__)

RESERVED: Final = 48
"""Open files that are no connection of a client or an operator."""
OPERATORS_LEAST: Final = 8
OPERATORS_MOST: Final = 256
"""Beyond that many, which no operators need, files are the clients'."""
OPERATORS_SHARE: Final = 16
"""One in so many open files may be an operator's connection, and one, or ``SHED_MOST`` of them, a
client's that is told that there are too many."""
UNLIMITED: Final = 1 << 20
TELL_EVERY_S: Final = 10.0


class ShortageLog:
    """The event loop's exception handler: a file that cannot be opened is one line now and then.

    The loop itself accepts nothing for a second; its own report is a stack trace for each client.
    """

    def __init__(self) -> None:
        self._tell_at_s = 0.0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Report what the loop met with."""
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in NO_DESCRIPTOR:
            loop.default_exception_handler(context)
        elif loop.time() >= self._tell_at_s:
            self._tell_at_s = loop.time() + TELL_EVERY_S
            _log.warning("no open file is left for another connection; open ones go on")


class Capacity(Struct, frozen=True, kw_only=True):
    """The limits of each listener."""

    clients: LimitSettings
    operators: LimitSettings


def open_files_most() -> int:
    """Return how many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def capacity_of(limits: LimitSettings, open_files: int) -> Capacity:
    """Return the limits with as many connections as fit."""
    operators = min(OPERATORS_MOST, max(OPERATORS_LEAST, open_files // OPERATORS_SHARE))
    shed = min(SHED_MOST, open_files // OPERATORS_SHARE)
    clients = max(1, (open_files - RESERVED - operators - shed) // 2)
    if clients < limits.connections:
        _log.info(
            "limits.connections: %d instead of %d, as the process may have %d open files",
            clients,
            limits.connections,
            open_files,
        )
    return Capacity(
        clients=structs.replace(limits, connections=min(limits.connections, clients)),
        operators=structs.replace(limits, connections=min(limits.connections, operators)),
    )
