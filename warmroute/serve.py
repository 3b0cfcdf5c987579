"""``warmroute serve``: the router."""

from __future__ import annotations

import logging
import os
import random
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

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
from warmroute.attend import Attendant
from warmroute.cli import UsageError
from warmroute.environment import ENGINE_KEY_VARIABLE, REDIS_VARIABLE
from warmroute.process import add_process_flags, run_loop, set_up_logging
from warmroute.tls_option import tls_environment, told_tls

if TYPE_CHECKING:
    import argparse

    from router.app import App

_log = logging.getLogger("warmroute")

EXAMPLES = """\
examples:
  # two engines, nothing else: the router finds out what they are, and follows what they hold
  warmroute serve --replica http://127.0.0.1:8000 --replica http://127.0.0.1:8001

  # exact prefixes for one model: its directory with tokenizer.json and chat template
  warmroute serve --model my-model=/models/my-model --redis redis://10.0.0.5:6379

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
    for key in ("listen", "admin", "seed", "deployment_key_file"):
        if getattr(options, key) is not None:
            raw[key] = getattr(options, key)
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


def attending(config: Config, log_level: str, app: App, state_url: str) -> Attendant:
    """Return who looks after the configured replicas of ``app``, to be entered."""
    environment = {REDIS_VARIABLE: state_url, **tls_environment(config.upstream.tls)}
    if config.upstream.api_key is not None:
        environment[ENGINE_KEY_VARIABLE] = config.upstream.api_key
    return Attendant(config, app, environment, log_level, random.SystemRandom())


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
        beside = partial(attending, config, options.log_level) if config.attend_sidecars else None
        run_loop(serve(config, announce, beside), options.loop)
    except ConfigError as error:
        raise UsageError(str(error)) from None
    return 0
