"""One server and one cluster per session, emptied before each test; the backends under contract."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest

from support.state_backend import MemoryBackend, RedisBackend
from support.valkey import ValkeyProcess
from support.valkey_acl import ValkeyAcl
from support.valkey_cluster import ValkeyCluster
from support.valkey_sentinel import ValkeySentinel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from support.state_backend import StateServer

BACKENDS = (
    "memory",
    "mirror",
    "direct",
    "cluster-mirror",
    "cluster-direct",
    "sentinel-mirror",
    "sentinel-direct",
    "acl-mirror",
    "acl-direct",
)
_SERVERS = {
    "": "valkey",
    "cluster": "valkey_cluster",
    "sentinel": "valkey_sentinel",
    "acl": "valkey_acl",
}


@pytest.fixture(scope="session")
def valkey() -> Iterator[ValkeyProcess]:
    with ValkeyProcess() as server:
        yield server


@pytest.fixture(scope="session")
def valkey_cluster() -> Iterator[ValkeyCluster]:
    with ValkeyCluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def valkey_sentinel() -> Iterator[ValkeySentinel]:
    with ValkeySentinel() as setup:
        yield setup


@pytest.fixture(scope="session")
def valkey_acl() -> Iterator[ValkeyAcl]:
    with ValkeyAcl() as server:
        yield server


@pytest.fixture(scope="session", params=["server", "cluster"])
def state_server(request: pytest.FixtureRequest) -> StateServer:
    """Return one server, then a cluster of three."""
    name = "valkey" if request.param == "server" else "valkey_cluster"
    server: StateServer = request.getfixturevalue(name)
    return server


@pytest.fixture
async def redis_backend(valkey: ValkeyProcess) -> AsyncIterator[RedisBackend]:
    await valkey.flush()
    async with AsyncExitStack() as stack:
        yield RedisBackend(valkey, stack)


@pytest.fixture
async def cluster_backend(valkey_cluster: ValkeyCluster) -> AsyncIterator[RedisBackend]:
    await valkey_cluster.flush()
    async with AsyncExitStack() as stack:
        yield RedisBackend(valkey_cluster, stack)


@pytest.fixture(params=BACKENDS)
async def backend(request: pytest.FixtureRequest) -> AsyncIterator[MemoryBackend | RedisBackend]:
    if request.param == "memory":
        yield MemoryBackend()
        return
    where, _, lookup = request.param.rpartition("-")
    server: StateServer = request.getfixturevalue(_SERVERS[where])
    await server.flush()
    async with AsyncExitStack() as stack:
        yield RedisBackend(server, stack, lookup)


@pytest.fixture
def own_server() -> Iterator[ValkeyProcess]:
    """Start a server that a test may kill."""
    with ValkeyProcess() as server:
        yield server
