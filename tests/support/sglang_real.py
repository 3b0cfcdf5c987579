"""Real SGLang servers on the CPU, of the environment that ``WARMROUTE_SGLANG`` names."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from support.vllm import MODEL, NoEngineError, made_by, write_model_tokenizer

if TYPE_CHECKING:
    from support.engine_process import Command, Engine

VARIABLE: Final = "WARMROUTE_SGLANG"
CONTEXT_TOKENS: Final = 4096
CPU_FLAGS: Final = (
    *("--device", "cpu", "--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch", "--grammar-backend", "none"),
    *("--disable-overlap-schedule", "--skip-server-warmup"),
)


def sglang_python(named: str | None) -> Path:
    """Return the Python of the environment that the variable ``named``; raises NoEngineError."""
    if not named:
        message = f"{VARIABLE} is not set: make an environment with tests/sglang/install.py FOLDER"
        raise NoEngineError(message)
    python = Path(named).absolute() / "bin" / "python"
    if not os.access(python, os.X_OK):
        message = f"{VARIABLE}={named}: {python} is no executable"
        raise NoEngineError(message)
    return python


def write_model(folder: Path, python: Path) -> Path:
    """Write a tiny model with random weights and a tokenizer of its own to ``folder``."""
    write_model_tokenizer(folder)
    return made_by("tiny_llama.py", folder, python)


def sglang_command(python: Path, model: Path, page_tokens: int, cache_tokens: int) -> Command:
    """Return how SGLang serves ``model`` with a cache of ``cache_tokens``."""

    def command(engine: Engine) -> list[str]:
        events = {
            "publisher": "zmq",
            "endpoint": f"tcp://*:{engine.events_port}",
            "replay_endpoint": f"tcp://*:{engine.replay_port}",
            "topic": "kv-events",
        }
        valued = {
            "--model-path": model,
            "--served-model-name": MODEL,
            "--host": "127.0.0.1",
            "--port": engine.port,
            "--context-length": CONTEXT_TOKENS,
            "--max-running-requests": 8,
            "--max-total-tokens": cache_tokens,
            "--page-size": page_tokens,
            "--kv-events-config": json.dumps(events),
        }
        flags = [str(word) for pair in valued.items() for word in pair]
        server = ["-m", "sglang.launch_server", *flags, "--enable-cache-report", *CPU_FLAGS]
        return ["env", "SGLANG_USE_CPU_ENGINE=1", str(python), *server]

    return command
