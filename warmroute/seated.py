"""One router process of several: ``python -m warmroute.seated FD``, started by ``warmroute serve``.

What it is to be comes over the descriptor ``FD``; see ``router.supervisor``.
"""

from __future__ import annotations

import os
import socket
import sys
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from router.config import ConfigError
from router.supervisor.message import receive_orders
from router.supervisor.seat import Seat
from warmroute.cli import EXIT_USAGE
from warmroute.process import run_loop, set_up_logging
from warmroute.serve import serve_one

if TYPE_CHECKING:
    from router.supervisor.message import Orders

EXIT_ALONE = 1


async def _serve(orders: Orders, control: socket.socket) -> None:
    seat = Seat(orders, control)
    async with AsyncExitStack() as stack:
        await seat.open()
        stack.push_async_callback(seat.close)
        await serve_one(seat.config, orders.log_level, seat)


def main() -> int:
    """Run the process; returns the exit code."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    control = socket.socket(fileno=int(sys.argv[1]))
    try:
        orders = receive_orders(control)
    except EOFError:
        return EXIT_ALONE
    set_up_logging(orders.log_level, f"p{orders.number} ")
    try:
        run_loop(_serve(orders, control), orders.loop)
    except ConfigError as error:
        print(f"warmroute serve: {error}", file=sys.stderr)
        return EXIT_USAGE
    return 0


if __name__ == "__main__":
    sys.exit(main())
