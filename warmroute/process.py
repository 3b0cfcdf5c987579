"""What every long-running command does first: logging, open files and the event loop."""

from __future__ import annotations

import asyncio
import logging
import resource
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

import uvloop

if TYPE_CHECKING:
    import argparse
    from collections.abc import Coroutine

Result = TypeVar("Result")

LOOPS = ("uvloop", "asyncio")
OPEN_FILES = 1_048_576
LEVELS = ("debug", "info", "warning", "error")


def add_process_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that every long-running command has."""
    parser.add_argument(
        "--loop", choices=LOOPS, default="uvloop", help="event loop (default: uvloop)"
    )
    parser.add_argument(
        "--log-level", choices=LEVELS, default="info", help="how much to log (default: info)"
    )


def set_up_logging(level: str, mark: str = "") -> None:
    """Log to standard error, one line per record; ``mark`` tells one process from others."""
    logging.basicConfig(
        level=level.upper(),
        stream=sys.stderr,
        format=f"%(asctime)s {mark}%(levelname)s %(name)s: %(message)s",
    )


def allow_open_files() -> None:
    """Take as many file descriptors as this process may have: a stream needs two sockets."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    with suppress(ValueError, OSError):  # some systems allow less than they say
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


def run_loop(main: Coroutine[object, object, Result], loop: str) -> Result:
    """Run ``main`` on the chosen event loop."""
    allow_open_files()
    factory = uvloop.new_event_loop if loop == "uvloop" else asyncio.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)
