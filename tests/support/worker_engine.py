"""The bundled worker in the place of vLLM: the same model directory, the same sizes."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

from prompt.codec import load_codec
from support.checkpoint import config_table, write_checkpoint
from support.tokenizer import SPECIAL_TOKENS
from support.vllm import CONTEXT_TOKENS, MODEL, PAGE_TOKENS, SEQUENCES, write_model_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from support.engine_process import Command, Engine

_REASONS: Final[dict[str, tuple[str, ...]]] = {
    "of the APIs that generate it has OpenAI's two older ones": (
        "POST /v1/responses",
        "POST /v1/messages",
        "POST /v1/messages/count_tokens",
        "POST /v1/chat/completions/batch",
        "POST /v1/systemone",
        "POST /invocations",
    ),
    "an answer is not kept once it is sent": (
        "GET /v1/responses/{response_id}",
        "POST /v1/responses/{response_id}/cancel",
    ),
    "it generates, and does not score": ("POST /generative_scoring",),
    "it reads text only: there are no caches of other media": (
        "POST /reset_mm_cache",
        "POST /reset_encoder_cache",
    ),
    "it keeps its memory and goes on while it lives; who wants it to rest stops it": (
        "POST /sleep",
        "POST /wake_up",
        "POST /release_kv_cache_memory",
        "POST /pause",
        "POST /resume",
        "GET /is_paused",
    ),
    "a request ends when its client leaves": ("POST /abort_requests",),
    "weights are read once, at its start": (
        "POST /init_weight_transfer_engine",
        "POST /shutdown_weight_transfer_engine",
        "POST /start_weight_update",
        "POST /start_draft_weight_update",
        "POST /update_weights",
        "POST /finish_weight_update",
        "POST /update_weight_version",
        "GET /weight_info",
        "POST /weight_checker",
    ),
    "it is one process with one rank": (
        "POST /collective_rpc",
        "GET /get_world_size",
        "POST /scale_elastic_ep",
        "POST /is_scaling_elastic_ep",
    ),
}

NOT_SERVED: Final = {route: why for why, routes in _REASONS.items() for route in routes}
"""All that vLLM serves a text model with and the worker, by design, does not, and why.

By method and path; the worker answers 404 there.
"""


def is_served(path: str) -> bool:
    """Return whether the worker takes a POST at ``path``, which vLLM does."""
    return f"POST {path}" not in NOT_SERVED


def worker_command(model: Path, pages: int, *flags: str) -> Command:
    """Return how the worker serves ``model`` with a cache of ``pages``; ``flags`` on top."""

    def command(engine: Engine) -> list[str]:
        valued = {
            "--compute": "numpy",
            "--model": model,
            "--served-model-name": MODEL,
            "--host": "127.0.0.1",
            "--port": engine.port,
            "--events-endpoint": f"tcp://127.0.0.1:{engine.events_port}",
            "--replay-endpoint": f"tcp://127.0.0.1:{engine.replay_port}",
            "--max-model-len": CONTEXT_TOKENS,
            "--max-num-seqs": SEQUENCES,
            "--page-tokens": PAGE_TOKENS,
            "--pages": pages,
            "--threads": 1,
        }
        words = [str(word) for pair in valued.items() for word in pair]
        return [sys.executable, "-m", "warmroute", "worker", *words, *flags]

    return command


def write_numpy_model(folder: Path) -> Path:
    """Write a tiny Llama with random weights and a tokenizer of its own, without torch."""
    write_model_tokenizer(folder)
    vocabulary_size = load_codec(folder).vocabulary_size
    table = config_table(
        "llama",
        vocab_size=vocabulary_size,
        max_position_embeddings=2 * CONTEXT_TOKENS,
        bos_token_id=SPECIAL_TOKENS.index("<|bos|>"),
        eos_token_id=SPECIAL_TOKENS.index("<|im_end|>"),
    )
    return write_checkpoint(folder, table)
