"""Host names of replicas: a resolver that does not answer holds up nothing else."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from router.endpoint import Endpoint
from router.error import ReplicaConnectTimeoutError, ReplicaUnreachableError
from router.names import AT_ONCE, Names, addresses_of
from router.upstream import UpstreamPool, UpstreamSettings, fetch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

GONE = socket.gaierror(socket.EAI_NONAME, "no such name")
AGAIN = socket.gaierror(socket.EAI_AGAIN, "no answer")


class Resolver:
    """Answers from ``book``; names that are not there take until ``release``."""

    def __init__(self, **book: list[str] | OSError) -> None:
        self.book: dict[str, list[str] | OSError] = dict(book)
        self.asked: list[str] = []
        self.news = threading.Semaphore(0)
        self._gate = threading.Event()

    def __call__(self, host: str) -> list[str]:
        self.asked.append(host)
        self.news.release()
        if host not in self.book:
            assert self._gate.wait(60.0)
            return []
        found = self.book[host]
        if isinstance(found, OSError):
            raise found
        return found

    def release(self) -> None:
        self._gate.set()


@pytest.fixture
def resolver() -> Iterator[Resolver]:
    made = Resolver(good=["10.0.0.1", "10.0.0.2", "10.0.0.1"])
    yield made
    made.release()


async def test_names_that_nobody_answers_hold_up_neither_others_nor_the_loops_threads(
    resolver: Resolver,
) -> None:
    names = Names(resolver)
    stuck = [asyncio.create_task(names.addresses(f"stuck-{n}")) for n in range(AT_ONCE - 1)]
    async with asyncio.timeout(30):
        while len(resolver.asked) < AT_ONCE - 1:
            await asyncio.to_thread(resolver.news.acquire)
        assert await names.addresses("good") == ("10.0.0.1", "10.0.0.2")
        assert await asyncio.gather(*(asyncio.to_thread(int, "7") for _ in range(64))) == [7] * 64
    resolver.release()
    assert all(
        isinstance(one, OSError) for one in await asyncio.gather(*stuck, return_exceptions=True)
    )


async def test_one_name_is_looked_up_once_at_a_time_whoever_waits(resolver: Resolver) -> None:
    names = Names(resolver)
    waiting = [asyncio.create_task(names.addresses("slow")) for _ in range(50)]
    await asyncio.sleep(0)
    for one in waiting[:10]:
        one.cancel()
    resolver.book["slow"] = ["10.0.0.9"]
    resolver.release()
    ended = await asyncio.gather(*waiting, return_exceptions=True)
    assert resolver.asked == ["slow"]
    assert {type(one) for one in ended[:10]} == {asyncio.CancelledError}
    assert await names.addresses("slow") == ("10.0.0.9",)


async def test_there_is_a_bound_beyond_which_a_name_fails_at_once(resolver: Resolver) -> None:
    names = Names(resolver)
    stuck = [asyncio.create_task(names.addresses(f"stuck-{n}")) for n in range(AT_ONCE)]
    await asyncio.sleep(0)
    with pytest.raises(OSError, match="too many names"):
        await names.addresses("good")
    resolver.release()
    await asyncio.gather(*stuck, return_exceptions=True)
    assert await names.addresses("good")


async def test_a_known_name_outlives_a_resolver_that_is_slow_or_fails_and_not_its_own_end(
    resolver: Resolver,
) -> None:
    names = Names(resolver)
    known = await names.addresses("good")
    resolver.book["good"] = AGAIN
    assert await names.addresses("good") == known
    del resolver.book["good"]
    assert await names.addresses("good") == known  # after a moment
    resolver.book["good"] = GONE
    resolver.release()
    told: BaseException | tuple[str, ...] = known
    async with asyncio.timeout(30):
        while told == known:
            (told,) = await asyncio.gather(names.addresses("good"), return_exceptions=True)
    assert isinstance(told, OSError)
    assert told.errno == socket.EAI_NONAME
    resolver.book["good"] = AGAIN
    with pytest.raises(OSError, match="no answer"):
        await names.addresses("good")


async def test_a_name_that_cannot_be_one_is_an_error_like_others() -> None:
    with pytest.raises(OSError, match=r"."):
        await Names().addresses("a" * 64 + ".example")


def test_the_hosts_own_resolver_is_asked() -> None:
    assert "127.0.0.1" in addresses_of("localhost")


@asynccontextmanager
async def engine(host: str = "127.0.0.1") -> AsyncIterator[int]:
    """Serve /health at one address of this host."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, host, 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_every_address_of_a_replicas_name_is_dialled() -> None:
    resolver = Resolver(both=["::1", "127.0.0.1"], other=["::1"])
    pool = UpstreamPool(UpstreamSettings(connect_timeout_s=20.0), names=Names(resolver))
    async with engine() as port:
        status, _, _ = await fetch(Endpoint("both", port), "/health", pool, 30.0)
        assert status == 200
        with pytest.raises(ReplicaUnreachableError) as refused:
            await fetch(Endpoint("other", port), "/health", pool, 30.0)
        assert type(refused.value) is ReplicaUnreachableError
    await pool.close()


async def test_a_replica_whose_name_is_not_answered_is_late_and_the_others_are_not() -> None:
    resolver = Resolver(good=["127.0.0.1"])
    pool = UpstreamPool(UpstreamSettings(connect_timeout_s=0.3), names=Names(resolver))
    async with engine() as port:
        with pytest.raises(ReplicaConnectTimeoutError):
            await fetch(Endpoint("stuck", port), "/health", pool, 30.0)
        pool.settings = UpstreamSettings(connect_timeout_s=20.0)
        for host in ("good", "127.0.0.1"):
            assert (await fetch(Endpoint(host, port), "/health", pool, 30.0))[0] == 200
    assert "127.0.0.1" not in resolver.asked
    resolver.release()
    await pool.close()
