"""``warmroute serve`` that also watches how long its event loop is held.

    python bench/held.py FLAGS OF SERVE

A callback asks to be called again every millisecond; what is longer than that between two calls is
a hold. On SIGUSR1 the process prints ``hold WALL_US CPU_US``: the longest since it was asked last,
and the most CPU that the loop's own thread used between two calls. The first has the machine's
noise and waits for the interpreter's lock in it, the second has not.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from router.process import serve
from warmroute.process import run_loop, set_up_logging
from warmroute.serve import add_flags, announce, merge

TICK_S = 0.001


class Watch:
    """Notes the longest holds of the running loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.add_signal_handler(signal.SIGUSR1, self.tell)
        self._forget()
        self._tick()

    def tell(self) -> None:
        """Print the longest holds and begin anew."""
        print(f"hold {self._wall_s * 1e6:.0f} {self._cpu_s * 1e6:.0f}", flush=True)
        self._forget()

    def _forget(self) -> None:
        self._wall_s = self._cpu_s = 0.0
        self._wall_at_s, self._cpu_at_s = time.monotonic(), time.thread_time()

    def _tick(self) -> None:
        wall_s, cpu_s = time.monotonic(), time.thread_time()
        self._wall_s = max(self._wall_s, wall_s - self._wall_at_s - TICK_S)
        self._cpu_s = max(self._cpu_s, cpu_s - self._cpu_at_s)
        self._wall_at_s, self._cpu_at_s = wall_s, cpu_s
        self._loop.call_later(TICK_S, self._tick)


async def watched(options: argparse.Namespace) -> None:
    """Serve, and watch the loop."""
    watch = Watch()
    await serve(merge(options, None), announce)
    del watch


def main() -> None:
    """Run until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_flags(parser)
    options = parser.parse_args()
    set_up_logging(options.log_level)
    run_loop(watched(options), options.loop)


if __name__ == "__main__":
    main()
