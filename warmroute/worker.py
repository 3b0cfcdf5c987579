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
    "model": "model name to serve",
    "tokenizer": "directory with tokenizer.json and chat template; without it tokens are bytes",
    "pages": "size of the KV pool in pages",
    "page_tokens": "tokens per page",
    "preset": "step-time model: llama-8b-h100, llama-70b-fp8-2xh100 or instant",
    "speed_up": "divide every step's duration by this",
    "max_num_seqs": "sequences in one step at most",
    "max_num_batched_tokens": "tokens in one step at most",
    "max_model_len": "longest prompt and output together, in tokens",
    "events_endpoint": "ZMQ endpoint of the KV events",
    "replay_endpoint": "ZMQ endpoint that replays missed events",
    "event_hashes": "block hashes in events: int or bytes",
    "event_encoding": "events as map or array",
    "seed": "seed of the generated text",
    "shutdown_grace_s": "seconds that open requests may go on after SIGTERM",
}
EXAMPLES = """\
examples:
  warmroute worker --port 8000
  warmroute worker --port 8000 --model my-model --tokenizer /models/my-model --pages 4096
  warmroute worker --preset llama-70b-fp8-2xh100 --speed-up 10

The worker has a real page pool, prefix cache and scheduler on a calibrated clock; its text is
generated from a seed. It speaks vLLM's HTTP API, metrics and KV events.
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
