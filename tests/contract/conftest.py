"""One server per session, emptied before each test, and the backends under contract."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest

from support.state_backend import MemoryBackend, RedisBackend
from support.valkey import ValkeyProcess

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


@pytest.fixture(scope="session")
def valkey() -> Iterator[ValkeyProcess]:
    with ValkeyProcess() as server:
        yield server


@pytest.fixture
async def redis_backend(valkey: ValkeyProcess) -> AsyncIterator[RedisBackend]:
    await valkey.command("FLUSHALL")
    async with AsyncExitStack() as stack:
        yield RedisBackend(valkey, stack)


@pytest.fixture(params=["memory", "redis"])
async def backend(
    request: pytest.FixtureRequest, valkey: ValkeyProcess
) -> AsyncIterator[MemoryBackend | RedisBackend]:
    if request.param == "memory":
        yield MemoryBackend()
        return
    await valkey.command("FLUSHALL")
    async with AsyncExitStack() as stack:
        yield RedisBackend(valkey, stack)


@pytest.fixture
def own_server() -> Iterator[ValkeyProcess]:
    """Start a server that a test may kill."""
    with ValkeyProcess() as server:
        yield server
