"""Real vLLM engines for tests, of the executable that ``WARMROUTE_VLLM`` names."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Final

from support.data import data_file, unpacked
from support.engine_process import ENVIRONMENT, LOG_TAIL_BYTES
from support.tokenizer import CHAT_TEMPLATE, SPECIAL_TOKENS, write_tokenizer

if TYPE_CHECKING:
    from support.engine_process import Command, Engine

VARIABLE: Final = "WARMROUTE_VLLM"
MODEL: Final = "tiny-llama"
PAGE_TOKENS: Final = 32
"""The smallest of vLLM on a CPU."""
CONTEXT_TOKENS: Final = 2048
SEQUENCES: Final = 8
"""In one step."""


class NoEngineError(Exception):
    """There is no vLLM to test with, or it did not start; the text says what to do."""


def vllm_executable(named: str | None) -> Path:
    """Return the executable that the variable ``named``, itself or by its environment.

    Raises NoEngineError.
    """
    if not named:
        message = f"{VARIABLE} is not set: name a vLLM executable, or the environment it is in"
        raise NoEngineError(message)
    executable = Path(named).absolute()
    if executable.is_dir():
        executable = executable / "bin" / "vllm"
    for file in (executable, executable.with_name("python")):
        if not os.access(file, os.X_OK):
            message = f"{VARIABLE}={named}: {file} is no executable"
            raise NoEngineError(message)
    return executable


def write_model_tokenizer(folder: Path) -> Path:
    """Write a small tokenizer whose chats may have messages without content; returns its folder."""
    return write_tokenizer(
        folder,
        chat_template=CHAT_TEMPLATE.replace("message.content", "(message.content or '')"),
        config={"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIAL_TOKENS[0]},
    )


def write_model(folder: Path, vllm: Path) -> Path:
    """Write a tiny model with random weights and a tokenizer of its own to ``folder``."""
    write_model_tokenizer(folder)
    return made_by("tiny_llama.py", folder, vllm)


def made_by(script: str, folder: Path, vllm: Path) -> Path:
    """Let a script beside this file write a model to ``folder``; returns the folder."""
    made = subprocess.run(
        [vllm.with_name("python"), "-P", Path(__file__).with_name(script), folder],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        message = f"no model was made:\n{made.stderr[-LOG_TAIL_BYTES:]}"
        raise NoEngineError(message)
    return folder


def write_text_model(name: str, folder: Path, vllm: Path) -> Path:
    """Write a tiny model with the shared tokenizer ``name`` to ``folder``."""
    source = data_file(f"tokenizers/{name}")
    folder.mkdir()
    shutil.copyfile(source / "tokenizer_config.json", folder / "tokenizer_config.json")
    plain = source / "tokenizer.json"
    definition = plain.read_bytes() if plain.exists() else None
    (folder / "tokenizer.json").write_bytes(
        definition or unpacked(f"tokenizers/{name}/tokenizer.json.zst")
    )
    return made_by("tiny_weights.py", folder, vllm)


def vllm_command(vllm: Path, model: Path, pages: int, *switches: str) -> Command:
    """Return how vLLM serves ``model`` with a cache of ``pages``; ``switches`` on top."""

    def command(engine: Engine) -> list[str]:
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{engine.events_port}",
            "replay_endpoint": f"tcp://*:{engine.replay_port}",
        }
        valued = {
            "--served-model-name": MODEL,
            "--host": "127.0.0.1",
            "--port": engine.port,
            # Half the precision makes near-ties, and texts that depend on what else is computed.
            "--dtype": "float32",
            "--seed": 0,
            "--max-model-len": CONTEXT_TOKENS,
            "--max-num-seqs": SEQUENCES,
            "--block-size": PAGE_TOKENS,
            "--num-gpu-blocks-override": pages,
            "--kv-events-config": json.dumps(events),
        }
        flags = [str(word) for pair in valued.items() for word in pair]
        always = ["--enforce-eager", "--enable-prefix-caching", "--enable-prompt-tokens-details"]
        return [str(vllm), "serve", str(model), *flags, *always, *switches]

    return command
