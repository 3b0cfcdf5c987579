"""``warmroute sidecar``: beside each engine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from msgspec import structs

from sidecar.process import run_sidecar_process
from sidecar.profile import SettingsError, SidecarSettings
from warmroute.cli import UsageError
from warmroute.environment import ENGINE_KEY_VARIABLE, REDIS_VARIABLE
from warmroute.flag import add_setting_flags, settings_of
from warmroute.process import add_process_flags, run_loop, set_up_logging
from warmroute.tls_option import CA_VARIABLE, told_tls

if TYPE_CHECKING:
    import argparse

API_KEY_VARIABLE = ENGINE_KEY_VARIABLE
FLAGS = {
    "engine": "the engine's address, http://host:port or https://",
    "redis": "shared state: redis://, unix://, redis+cluster:// or redis+sentinel:// URL",
    "replica": "the replica's name; by default the engine's host:port",
    "advertise": "address under which routers reach the engine; by default --engine",
    "model": "model name; by default what the engine's /v1/models says",
    "weights_revision": "revision of the weights, if two of one name are served",
    "page_tokens": "tokens per KV page; by default what the engine says",
    "block_tokens": "index granularity, a multiple of the page",
    "capacity_pages": "pages in the engine's KV pool; by default what the engine says",
    "events": "ZMQ endpoint of the KV events; by default what the engine says",
    "replay": "ZMQ endpoint that replays events",
    "ranks": "data-parallel ranks, where --events is given: that of rank 0, then the next ports",
    "metrics": "address of /metrics, host:port; port 0: a free one, which the log names",
    "event_silence_s": "seconds after which a working engine without events is reported",
    "chain_seed": "the same as the routers' state.chain_seed",
    "deployment_key_file": "secret of the deployment: the same as the routers' deployment_key_file",
    "heartbeat_interval_s": "seconds between heartbeats",
    "scrape_interval_s": "seconds between looks at /health and /metrics",
    "drain_grace_s": "seconds that running requests may take on SIGTERM",
}
EXAMPLES = f"""\
examples:
  warmroute sidecar --engine http://127.0.0.1:8000 --redis redis://10.0.0.5:6379
  warmroute sidecar --engine http://127.0.0.1:8000 --redis unix:///run/valkey.sock \\
      --replica gpu-0 --advertise http://10.0.0.7:8000

The engine (vLLM, SGLang or the bundled worker) must publish KV events; everything else is found
out. warmroute serve --replica URL runs this command by itself where it can.
{REDIS_VARIABLE} holds a Redis URL with a password, {API_KEY_VARIABLE} the engine's key,
{CA_VARIABLE} the authority of an engine at https:// (docs/tls.md has the others).
Exit code 3: another sidecar registered the same replica.
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.epilog = EXAMPLES
    add_setting_flags(parser, SidecarSettings, FLAGS)
    add_process_flags(parser)


def run(options: argparse.Namespace) -> int:
    """Run one sidecar until it is told to stop."""
    set_up_logging(options.log_level)
    settings = settings_of(options, SidecarSettings, FLAGS)
    settings = structs.replace(
        settings,
        redis=os.environ.get(REDIS_VARIABLE) or settings.redis,
        api_key=os.environ.get(API_KEY_VARIABLE),
        tls=told_tls(),
    )
    if not settings.redis:
        message = f"--redis: expected a URL (or {REDIS_VARIABLE})"
        raise UsageError(message)
    try:
        return run_loop(run_sidecar_process(settings), options.loop)
    except SettingsError as error:
        raise UsageError(str(error)) from None
