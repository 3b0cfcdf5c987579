"""``warmroute worker``: the bundled paged-KV worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prompt.model import CodecLoadError
from sidecar.setting import WorkerSettings
from sidecar.worker import WorkerStartError, run_worker_process
from warmroute.cli import UsageError
from warmroute.flag import add_setting_flags, settings_of
from warmroute.process import add_process_flags, run_loop, set_up_logging

if TYPE_CHECKING:
    import argparse

FLAGS = {
    "host": "address to listen on",
    "port": "HTTP port; 0 chooses a free one",
    "compute": "what runs a step: numpy, torch (extra [engine]) or synthetic (a clock)",
    "model": "model directory, or a name for the built-in model with random weights",
    "served_model_name": "name that clients use, if not that of --model",
    "tokenizer": "directory with tokenizer.json and chat template; without it tokens are bytes",
    "dtype": "number format of torch: auto, float32, bfloat16 or float16",
    "device": "device of torch: auto, cpu or cuda",
    "threads": "threads of the arithmetic",
    "preset": "clock of synthetic compute: llama-8b-h100, llama-70b-fp8-2xh100 or instant",
    "speed_up": "divide every step's duration of synthetic compute by this",
    "pages": "size of the KV pool in pages (default: 8192, at most 1 GiB)",
    "page_tokens": "tokens per page",
    "max_num_seqs": "sequences in one step at most",
    "max_num_batched_tokens": "tokens in one step at most",
    "max_model_len": "longest prompt and output together, in tokens",
    "eviction": "which cached page goes first: lru, benefit or quota",
    "tenant_quotas": "pages guaranteed to tenants, TENANT=PAGES,... (TENANT as in /debug/kv)",
    "public_prefixes": "JSON file of prompt starts that all cache salts share",
    "host_mib": "host memory for pages that the pool gives up, in MiB",
    "disk_dir": "directory for pages below host memory",
    "disk_mib": "its size in MiB",
    "fetch": "bring pages back when that is cheaper than computing them, always or never",
    "demote": "keep all pages below the pool, or only those reused once",
    "transfer_port": "serve pages to other workers on this port; 0 chooses a free one",
    "transfer_peers": "workers to fetch pages from, http://host:port,...",
    "audit": "file for the audit of all pages",
    "audit_mib": "size at which it is rotated",
    "audit_files": "older files to keep",
    "events_endpoint": "ZMQ endpoint of the KV events",
    "replay_endpoint": "ZMQ endpoint that replays missed events",
    "event_hashes": "block hashes in events: int or bytes",
    "event_encoding": "events as map or array",
    "seed": "seed of random weights and of the page keys",
    "request_timeout_s": "seconds that a request may take",
    "shutdown_grace_s": "seconds that open requests may go on after SIGTERM",
}
EXAMPLES = """\
examples:
  warmroute worker --port 8000
  warmroute worker --port 8000 --model /models/qwen3-0.6b --host-mib 2048
  warmroute worker --compute synthetic --preset llama-70b-fp8-2xh100 --speed-up 10

It computes real tokens on a paged KV cache, and speaks vLLM's HTTP API, metrics and KV events.
With --compute synthetic a clock takes the place of the arithmetic, for tests of large fleets.
"""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.epilog = EXAMPLES
    add_setting_flags(parser, WorkerSettings, FLAGS)
    add_process_flags(parser)


def run(options: argparse.Namespace) -> int:
    """Run one worker until it is told to stop."""
    set_up_logging(options.log_level)
    settings = settings_of(options, WorkerSettings, FLAGS)
    try:
        run_loop(run_worker_process(settings), options.loop)
    except (CodecLoadError, WorkerStartError) as error:
        raise UsageError(str(error)) from None
    return 0
