"""A worker that serves imports nothing any more: where file descriptors have run out, that fails.

The first median in the engine's loop once ended the worker so, and the first prompt a request.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import aiohttp

from sidecar.setting import WorkerAddress, WorkerSettings
from sidecar.worker import serve_worker

PATH = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
REQUESTS = 40
PROMPT = "The rules of the house are these. " * 6


async def late_imports(folder: Path) -> list[str]:
    """Serve with every tier, ask enough for costs to be fitted; return what was imported."""
    settings = WorkerSettings(
        pages=64,
        threads=1,
        host_mib=2,
        disk_dir=str(folder / "pages"),
        disk_mib=16,
        audit=str(folder / "audit"),
        transfer_port=0,
    )
    ready: asyncio.Future[WorkerAddress] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve_worker(settings, ready.set_result))
    async with aiohttp.ClientSession((await ready).http) as session:
        before = set(sys.modules)
        for number in range(REQUESTS):
            asked = {"model": "warmroute-tiny", "prompt": f"{number} {PROMPT}", "max_tokens": 8}
            asked |= {"stream": number % 2 == 0, "temperature": number % 3 / 2, "logprobs": 2}
            async with session.post("/v1/completions", json=asked) as answer:
                assert answer.status == 200
                await answer.read()
        for path in ("/metrics", "/debug/kv", "/kv_transfer", "/server_info"):
            async with session.get(path) as answer:
                await answer.read()
        late = sorted(set(sys.modules) - before)
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    return late


def test_nothing_is_imported_once_a_worker_serves(tmp_path: Path) -> None:
    words = [sys.executable, __file__, str(tmp_path)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False, env=PATH)
    assert (ended.returncode, ended.stdout.strip()) == (0, "late: []"), ended.stderr


if __name__ == "__main__":
    print("late:", asyncio.run(late_imports(Path(sys.argv[1]))))  # noqa: T201
