"""The sidecar as a process beside a real worker, with a real Valkey between it and a router."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import msgspec
import pytest

from sidecar.profile import SidecarSettings
from sidecar.setting import WorkerSettings
from state.mirror import Mirror
from state.model import ModelIdentity, ReplicaId, RouterId
from state.prefix import chain_of, chain_root, pack_tokens
from support.kv_engine import KvEngine
from support.valkey import ValkeyProcess, eventually
from support.worker import running_worker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

ROOT = Path(__file__).resolve().parents[2]
REPLICA = ReplicaId("r1")


@pytest.fixture(name="valkey")
def running_valkey() -> Iterator[ValkeyProcess]:
    with ValkeyProcess() as server:
        yield server


@asynccontextmanager
async def sidecar(settings: SidecarSettings) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-m",
            "sidecar.process",
            "--json",
            msgspec.json.encode(settings).decode(),
        ),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def until_ready(process: asyncio.subprocess.Process) -> None:
    assert process.stdout is not None
    async with asyncio.timeout(100):
        assert await process.stdout.readline() == b"ready r1\n"


async def end_of(process: asyncio.subprocess.Process) -> tuple[int, str]:
    async with asyncio.timeout(100):
        _, log = await process.communicate()
    assert process.returncode is not None
    return process.returncode, log.decode()


def router_view(valkey: ValkeyProcess) -> Mirror:
    return Mirror(valkey.settings, RouterId("router"), clock=time.monotonic, rng=random.Random(1))


async def complete(url: str, prompt: list[int]) -> int:
    """Return the cached tokens that the engine reports."""
    body = {"model": "m", "prompt": prompt, "max_tokens": 1, "ignore_eos": True}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/v1/completions", json=body) as response,
    ):
        assert response.status == 200, await response.text()
        usage = (await response.json())["usage"]
    return int((usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


async def test_a_workers_blocks_reach_a_router_and_leave_with_it(valkey: ValkeyProcess) -> None:
    worker_settings = WorkerSettings(
        compute="synthetic", model="m", pages=256, page_tokens=16, speed_up=1000
    )
    prompt = [random.Random(1).randrange(200) for _ in range(300)]
    with running_worker(worker_settings) as worker:
        settings = SidecarSettings(
            engine=worker.url, replica=REPLICA, redis=valkey.url, drain_grace_s=1.0
        )
        async with sidecar(settings) as process, router_view(valkey) as router:
            await until_ready(process)
            assert await router.settle(30)
            record = router.replicas()[REPLICA].record
            assert record.identity == ModelIdentity(model="m", block_tokens=64)
            assert record.capacity_pages == 256
            root = chain_root(record.identity, 0)
            chain = chain_of(root, pack_tokens(prompt), record.identity.block_tokens, 0)
            assert await complete(worker.url, prompt) == 0
            await eventually(lambda: REPLICA in router.overlap(chain))
            assert router.overlap(chain)[REPLICA].gpu_blocks == 4
            assert await complete(worker.url, prompt) >= 4 * 64
            process.send_signal(signal.SIGTERM)
            status, log = await end_of(process)
            assert status == 0, log
            assert "Traceback" not in log
            await eventually(lambda: REPLICA not in router.replicas())


async def test_the_first_of_two_sidecars_ends_with_status_3(valkey: ValkeyProcess) -> None:
    async with KvEngine() as engine:
        settings = SidecarSettings(
            engine=engine.url, replica=REPLICA, redis=valkey.url, heartbeat_interval_s=0.1
        )
        async with sidecar(settings) as first:
            await until_ready(first)
            async with sidecar(settings) as second:
                await until_ready(second)
                status, log = await end_of(first)
                assert status == 3
                assert log.count("fenced") == 1
                assert "Traceback" not in log
                assert second.returncode is None


@pytest.mark.parametrize(
    "given",
    [
        "{",
        "{}",
        '{"engine": "x"}',
        '{"engine": "http://127.0.0.1:1"}',
        '{"engine": "http://127.0.0.1:1", "redis": "nonsense"}',
        '{"engine": "http://127.0.0.1:1", "redis": "redis://127.0.0.1:1", "typo": 1}',
        '{"engine": "http://127.0.0.1:1", "redis": "redis://127.0.0.1:1", "replica": "a b"}',
    ],
)
async def test_wrong_settings_end_the_process_with_status_2(given: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sidecar.process", "--json", given),
        cwd=ROOT,
        stderr=asyncio.subprocess.PIPE,
    )
    status, log = await end_of(process)
    assert status == 2
    assert "wrong settings" in log
    assert "Traceback" not in log
