"""vLLM's own load generator, ``vllm bench serve``, against any server."""

from __future__ import annotations

import asyncio
import json
import os
from typing import TYPE_CHECKING, Any, Final

from msgspec import Struct

from support.engine_process import ENVIRONMENT, LOG_TAIL_BYTES
from support.vllm import MODEL

if TYPE_CHECKING:
    from pathlib import Path

BACKENDS: Final = {
    "openai": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
    "openai-responses": "/v1/responses",
}
PROMPTS: Final = 32
OUTPUT_TOKENS: Final = 24
PREFIX_TOKENS: Final = 128
BENCH_S: Final = 180.0


class Benched(Struct, frozen=True, kw_only=True):
    """What the generator saved of its answers; lists are in the order of its prompts."""

    completed: int
    failed: int
    total_input_tokens: int
    total_output_tokens: int
    output_lens: list[int]
    generated_texts: list[str]
    errors: list[str]


async def bench(vllm: Path, model: Path, url: str, backend: str, result: Path) -> Benched:
    """Send random prompts with a shared start to ``url``, greedily, and read what came back."""
    valued: dict[str, Any] = {
        "--backend": backend,
        "--endpoint": BACKENDS[backend],
        "--base-url": url,
        "--model": MODEL,
        "--tokenizer": model,
        "--dataset-name": "random",
        "--random-input-len": 200,
        "--random-prefix-len": PREFIX_TOKENS,
        "--random-output-len": OUTPUT_TOKENS,
        "--num-prompts": PROMPTS,
        "--max-concurrency": 6,
        "--temperature": 0,
        "--seed": 3,
        "--result-dir": result.parent,
        "--result-filename": result.name,
    }
    flags = [str(word) for pair in valued.items() for word in pair]
    switches = ["--ignore-eos", "--disable-tqdm", "--save-result", "--save-detailed"]
    process = await asyncio.create_subprocess_exec(
        *("nice", "-n", "10", str(vllm), "bench", "serve", *flags, *switches),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, **ENVIRONMENT},
    )
    try:
        async with asyncio.timeout(BENCH_S):
            said, _ = await process.communicate()
    except BaseException:
        process.kill()
        await process.wait()
        raise
    assert process.returncode == 0, said[-LOG_TAIL_BYTES:].decode(errors="replace")
    saved = json.loads(await asyncio.to_thread(result.read_text))
    return Benched(**{name: saved[name] for name in Benched.__struct_fields__})
