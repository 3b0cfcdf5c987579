"""The sidecar as a process: signals, its connection to the state store, exit codes.

``python -m sidecar.process --json '{"engine": ..., "redis": ...}'`` runs one.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import signal
import sys
import time
from typing import TYPE_CHECKING, Final

import msgspec
import uvloop

from sidecar.announce import FencedError
from sidecar.profile import SettingsError, SidecarSettings, deployment_key
from sidecar.rank import run_agent
from state.client import RedisSettings, command_client
from state.redis_writer import RedisWriter
from state.seal import Seal

if TYPE_CHECKING:
    from state.model import ReplicaRecord

EXIT_CONFIG: Final = 2
EXIT_FENCED: Final = 3
_STATE_TIMEOUT_S: Final = 1.0
"""Patient, as no request waits for it: after a failed write everything is announced again."""
_LOG = logging.getLogger("warmroute.sidecar")


async def run_sidecar_process(settings: SidecarSettings) -> int:
    """Run until SIGTERM or SIGINT; prints one ready line; returns the exit code."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    is_told = False

    def tell_ready(record: ReplicaRecord) -> None:
        nonlocal is_told
        if not is_told:
            sys.stdout.write(f"ready {record.replica}\n")
            sys.stdout.flush()
            is_told = True

    try:
        redis = command_client(
            RedisSettings(
                url=settings.redis or "",
                command_timeout_s=_STATE_TIMEOUT_S,
                connect_timeout_s=_STATE_TIMEOUT_S,
            )
        )
    except ValueError as error:
        raise SettingsError(str(error)) from error
    rng = random.SystemRandom()
    secret = deployment_key(settings)
    seal = None if secret is None else Seal(secret, time.time)
    writer = RedisWriter(redis, clock=time.monotonic, rng=rng, seal=seal)
    try:
        await run_agent(settings, writer, stop=stop, rng=rng, on_ready=tell_ready)
    except FencedError as error:
        _LOG.error("fenced: %s; stopping", error)
        return EXIT_FENCED
    finally:
        await redis.aclose()
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run a sidecar from ``--json SETTINGS``; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m sidecar.process")
    parser.add_argument("--json", required=True, help="SidecarSettings as JSON")
    given = parser.parse_args(arguments).json
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        settings = msgspec.json.decode(given, type=SidecarSettings)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(run_sidecar_process(settings))
    except (msgspec.DecodeError, SettingsError) as error:
        sys.stderr.write(f"wrong settings: {error}\n")
        return EXIT_CONFIG


if __name__ == "__main__":
    sys.exit(main())
