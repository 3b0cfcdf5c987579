"""``warmroute serve``: the router."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import sys
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from policies.union import KINDS
from router.config import (
    DEFAULT_ADMIN,
    DEFAULT_LISTEN,
    Config,
    ConfigError,
    decode_config,
    load_config,
)
from router.process import Served, serve
from state.tls import ClientTls
from warmroute.cli import UsageError
from warmroute.environment import ENGINE_KEY_VARIABLE, REDIS_VARIABLE
from warmroute.process import add_process_flags, run_loop, set_up_logging
from warmroute.tls_option import tls_environment, told_tls

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncIterator

    from router.app import App
    from router.supervisor.seat import Seat

ATTENDANT: Final = "warmroute.attend"
_log = logging.getLogger("warmroute")

EXAMPLES = """\
examples:
  # two engines, nothing else: the router finds out what they are, and follows what they hold
  warmroute serve --replica http://127.0.0.1:8000 --replica http://127.0.0.1:8001

  # exact prefixes for one model: its directory with tokenizer.json and chat template
  warmroute serve --model my-model=/models/my-model --redis redis://10.0.0.5:6379

  # two processes behind one address, for more than one core can do (docs/processes.md)
  warmroute serve --processes 2 --replica http://127.0.0.1:8000

  # everything from one file (examples/warmroute.yaml is annotated)
  warmroute serve --config warmroute.yaml

ADDRESS is HOST:PORT, [::1]:8080 with IPv6, or unix:/path. TLS of listeners is in the file; the
variable WARMROUTE_TLS_CA names the authority of replicas at https:// (docs/tls.md).
Replicas with a sidecar (warmroute sidecar) register themselves through Redis. Without --redis a
private Valkey server runs as long as the router does. Flags win over the file, and the variable
WARMROUTE_REDIS (for URLs with a password) over --redis. WARMROUTE_ENGINE_API_KEY holds the key that
engines want to see.
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.epilog = EXAMPLES
    parser.add_argument("--config", metavar="FILE", help="YAML configuration")
    parser.add_argument(
        "--replica", action="append", default=[], metavar="URL", help="a replica; repeatable"
    )
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="NAME=DIR",
        help="directory with a model's tokenizer.json and chat template; repeatable",
    )
    parser.add_argument(
        "--redis",
        metavar="URL",
        help="shared state: redis://, unix://, redis+cluster:// or redis+sentinel:// URL",
    )
    parser.add_argument(
        "--listen", metavar="ADDRESS", help=f"for clients (default: {DEFAULT_LISTEN})"
    )
    parser.add_argument(
        "--admin", metavar="ADDRESS", help=f"for operators (default: {DEFAULT_ADMIN})"
    )
    parser.add_argument(
        "--admin-host",
        action="append",
        default=[],
        metavar="NAME",
        help="a name of the operators' listener, besides its address and localhost; repeatable",
    )
    parser.add_argument("--policy", choices=KINDS, help="routing policy (default: expected_ttft)")
    parser.add_argument("--seed", type=int, help="seed of all random draws (default: random)")
    parser.add_argument(
        "--deployment-key-file",
        metavar="FILE",
        help="secret of the deployment, which sidecars have too: keys the ids of prefix blocks",
    )
    parser.add_argument(
        "--no-sidecars",
        action="store_true",
        help="run no sidecars for --replica: what they hold is guessed, unless others run them",
    )
    parser.add_argument("--receipts", action="store_true", help="answer with x-warmroute-* headers")
    parser.add_argument(
        "--processes",
        type=int,
        metavar="N",
        help="router processes that share the work and every limit (default: 1)",
    )
    add_process_flags(parser)


def merge(
    options: argparse.Namespace,
    redis_from_environment: str | None,
    engine_key: str | None = None,
    tls: ClientTls = ClientTls(),  # noqa: B008 - frozen
) -> Config:
    """Return the configuration of file, flags and environment; raises ConfigError."""
    config = load_config(Path(options.config)) if options.config else Config()
    raw = msgspec.to_builtins(config)
    for key in ("listen", "admin", "seed", "deployment_key_file", "processes"):
        if getattr(options, key) is not None:
            raw[key] = getattr(options, key)
    raw["admin_hosts"] = [*raw["admin_hosts"], *options.admin_host]
    raw["receipts"] = raw["receipts"] or options.receipts
    raw["attend_sidecars"] = raw["attend_sidecars"] and not options.no_sidecars
    if options.policy is not None:
        raw["policy"] = {"kind": options.policy}
    if options.replica:
        raw["replicas"] = [{"url": url} for url in options.replica]
    for pair in options.model:
        name, equals, directory = pair.partition("=")
        if not (name and equals and directory):
            message = f"--model: expected NAME=DIR, got {pair!r}"
            raise ConfigError(message)
        raw["models"] = [*raw["models"], {"name": name, "tokenizer": directory}]
    redis = redis_from_environment or options.redis
    if redis:
        raw["state"]["redis"] = redis
    if engine_key:
        raw["upstream"]["api_key"] = engine_key
    if config.upstream.tls == ClientTls():
        raw["upstream"]["tls"] = msgspec.to_builtins(tls)
    return decode_config(raw)


def announce(served: Served) -> None:
    """Tell that the router listens: one line for people, one for whoever started the process."""
    print(f"ready {served.url} admin {served.admin_url} state {served.state_url}", flush=True)


@asynccontextmanager
async def attending(
    config: Config,
    log_level: str,
    app: App,
    state_url: str,
    *,
    serving: asyncio.Event | None = None,
    seat: Seat | None = None,
) -> AsyncIterator[None]:
    """Look after the configured replicas of ``app`` while the block runs, once it is ``serving``.

    ``seat`` is the place of one process among several, of which one has sidecars run.
    """
    environment = {REDIS_VARIABLE: state_url, **tls_environment(config.upstream.tls)}
    if config.upstream.api_key is not None:
        environment[ENGINE_KEY_VARIABLE] = config.upstream.api_key

    async def attend(stack: AsyncExitStack) -> None:
        if serving is not None:
            await serving.wait()
        # The sidecar's libraries load slowly; requests are served meanwhile.
        await asyncio.to_thread(import_module, ATTENDANT)
        from warmroute.attend import Attendant  # noqa: PLC0415 - it is there now

        attendant = Attendant(config, app, environment, log_level, random.SystemRandom())
        if seat is not None:
            attendant.launch, attendant.may_launch = seat.launch, lambda: seat.is_lead
        await stack.enter_async_context(attendant)

    async with AsyncExitStack() as stack:
        task = asyncio.create_task(attend(stack), name="attendant")
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


def run(options: argparse.Namespace) -> int:
    """Run the router until it is told to stop."""
    set_up_logging(options.log_level)
    try:
        config = merge(
            options,
            os.environ.get(REDIS_VARIABLE),
            os.environ.get(ENGINE_KEY_VARIABLE),
            told_tls(),
        )
        if config.processes > 1:
            return serve_several(config, options)
        run_loop(serve_one(config, options.log_level), options.loop)
    except ConfigError as error:
        raise UsageError(str(error)) from None
    return 0


async def serve_one(config: Config, log_level: str, seat: Seat | None = None) -> None:
    """Run a router, or one process of several."""
    serving = asyncio.Event()
    beside = None
    if config.attend_sidecars and config.replicas:
        beside = partial(attending, config, log_level, serving=serving, seat=seat)

    def ready(served: Served) -> None:
        if seat is None:
            announce(served)
        else:
            seat.ready()
        serving.set()

    await serve(config, ready, beside, seat)


def serve_several(config: Config, options: argparse.Namespace) -> int:
    """Run a router of several processes; returns the exit code. Raises ConfigError."""
    # What one process alone does without.
    from router.supervisor.crew import CrewFailedError  # noqa: PLC0415
    from router.supervisor.serve import Means, Supervisor  # noqa: PLC0415
    from warmroute.launch import launch  # noqa: PLC0415

    means = Means(
        command=(sys.executable, "-m", "warmroute.seated"),
        log_level=options.log_level,
        loop=options.loop,
    )
    try:
        run_loop(Supervisor(config, means, announce, launch).serve(), options.loop)
    except CrewFailedError as error:
        print(f"warmroute serve: {error}", file=sys.stderr)
        return error.status
    return 0
