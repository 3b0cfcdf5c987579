"""Pages over real sockets, with good peers and bad ones on either side."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import struct
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from sidecar.transfer import (
    End,
    Status,
    encode_answer,
    encode_end,
    encode_hello,
    encode_page_head,
)
from sidecar.transfer_client import Fetched, TransferClient
from sidecar.transfer_server import WAITING_STREAMS, TransferServer
from state.model import BlockId
from support.raw import with_both_loops

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        AsyncIterator,
        Callable,
        Coroutine,
        Iterator,
        Sequence,
    )

PAGE_BYTES = 50_000
NAMESPACE = bytes(range(32))
HOST = "127.0.0.1"


def on_both_loops(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on asyncio's loop and on uvloop, and close its server within the loop."""

    @functools.wraps(test)
    async def closing(**given: Any) -> None:
        try:
            await test(**given)
        finally:
            if "server" in given:
                await given["server"].close()

    return with_both_loops(closing)


async def until(is_reached: Callable[[], bool]) -> None:
    """Let others run until it is so."""
    while not is_reached():  # noqa: ASYNC110 - counters have no events
        await asyncio.sleep(0)


def key(number: int) -> BlockId:
    return BlockId(number.to_bytes(16, "big"))


def page(number: int) -> bytes:
    return number.to_bytes(4, "big") * (PAGE_BYTES // 4)


KEYS = [key(number) for number in range(40)]


class Shelf:
    """Holds the pages of the first ``held`` keys; counts pins, may stop before a page."""

    def __init__(self, held: int = 40) -> None:
        self.held = held
        self.pinned = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.closed_gate_at = 0
        self.fails_at: int | None = None
        self.waiting = asyncio.Event()
        self.released = asyncio.Event()

    async def pages(self, keys: Sequence[BlockId]) -> AsyncGenerator[bytes, None]:
        self.pinned += 1
        try:
            for at, name in enumerate(keys):
                number = int.from_bytes(name, "big")
                if number >= self.held:
                    return
                if at == self.fails_at:
                    raise OSError
                if at == self.closed_gate_at:
                    self.waiting.set()
                    await self.gate.wait()
                yield page(number)
        finally:
            self.pinned -= 1
            self.released.set()


class Taken:
    """What a fetch handed on."""

    def __init__(self) -> None:
        self.pages: list[tuple[int, bytes]] = []
        self.some = asyncio.Event()

    def __call__(self, index: int, content: bytes) -> None:
        self.pages.append((index, content))
        self.some.set()

    def check(self, fetched: Fetched, pages: int, why: str) -> None:
        assert (fetched.pages, fetched.why) == (pages, why)
        assert self.pages == [(number, page(number)) for number in range(pages)]
        assert fetched.content_bytes == pages * PAGE_BYTES


@pytest.fixture(name="shelf")
def shelf_of_pages() -> Shelf:
    return Shelf()


@pytest.fixture(name="server")
def idle_server(shelf: Shelf) -> Iterator[TransferServer]:
    server = TransferServer(shelf, NAMESPACE, max_streams=2, hello_s=0.3, stall_s=0.3)
    yield server
    assert shelf.pinned == 0
    assert server.streams == 0


def client(**options: float) -> TransferClient:
    return TransferClient(NAMESPACE, PAGE_BYTES, **options)  # type: ignore[arg-type]


async def raw(port: int, sent: bytes) -> socket.socket:
    stream = socket.socket()
    stream.settimeout(0)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(stream, (HOST, port))
    await loop.sock_sendall(stream, sent)
    return stream


async def rest_of(stream: socket.socket) -> bytes:
    received, loop = b"", asyncio.get_running_loop()
    with contextlib.suppress(ConnectionError):
        while chunk := await loop.sock_recv(stream, 65536):
            received += chunk
    return received


@pytest.mark.parametrize(("held", "why"), [(40, "all"), (7, "missing"), (0, "missing")])
@on_both_loops
async def test_the_leading_pages_that_are_held_arrive_in_order(
    shelf: Shelf, server: TransferServer, held: int, why: str
) -> None:
    shelf.held = held
    _, port = await server.start()
    taken = Taken()
    taken.check(await client().fetch(HOST, port, KEYS, taken), held, why)
    assert server.served_pages == held
    assert server.endings[why] == 1


@on_both_loops
async def test_another_namespace_gets_nothing(server: TransferServer) -> None:
    _, port = await server.start()
    taken = Taken()
    stranger = TransferClient(bytes(32), PAGE_BYTES)
    taken.check(await stranger.fetch(HOST, port, KEYS, taken), 0, "wrong_namespace")


@on_both_loops
async def test_more_fetches_than_either_side_serves_end_at_once(
    shelf: Shelf, server: TransferServer
) -> None:
    _, port = await server.start()
    shelf.gate.clear()
    first = client(max_streams=2)
    under_way = [asyncio.create_task(first.fetch(HOST, port, KEYS, Taken())) for _ in range(2)]
    await until(lambda: server.streams == 2)
    assert (await first.fetch(HOST, port, KEYS, Taken())).why == "limit"
    assert (await client().fetch(HOST, port, KEYS, Taken())).why == "busy"
    shelf.gate.set()
    assert [(await task).why for task in under_way] == ["all", "all"]
    assert (await first.fetch(HOST, port, KEYS, Taken())).why == "all"


@on_both_loops
async def test_a_cancelled_fetch_lets_the_pages_of_the_server_go(
    shelf: Shelf, server: TransferServer
) -> None:
    _, port = await server.start()
    taken = Taken()
    fetcher = client()
    task = asyncio.create_task(fetcher.fetch(HOST, port, KEYS * 1000, taken))
    await taken.some.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await shelf.released.wait()
    assert fetcher.streams == 0
    assert (await fetcher.fetch(HOST, port, KEYS, Taken())).why == "all"


@on_both_loops
async def test_a_server_that_closes_cuts_its_streams(shelf: Shelf, server: TransferServer) -> None:
    _, port = await server.start()
    shelf.gate.clear()
    shelf.closed_gate_at = 3
    taken = Taken()
    task = asyncio.create_task(client().fetch(HOST, port, KEYS, taken))
    await shelf.waiting.wait()
    await server.close()
    taken.check(await task, 3, "closed")
    taken = Taken()
    taken.check(await client().fetch(HOST, port, KEYS, taken), 0, "unreachable")


@on_both_loops
async def test_a_peer_that_never_reads_is_let_go(shelf: Shelf, server: TransferServer) -> None:
    pins: list[int] = []

    class Noting(Counter[str]):
        def __setitem__(self, name: str, count: int) -> None:
            pins.append(shelf.pinned)
            super().__setitem__(name, count)

    server.endings = Noting()
    _, port = await server.start()
    stream = await raw(port, encode_hello(NAMESPACE, KEYS * 1000))
    await shelf.released.wait()
    await until(lambda: server.endings["stalled"] == 1)
    assert pins == [0]
    stream.close()


@pytest.mark.parametrize(
    "sent",
    [b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" + bytes(20), bytes(44), b"\xff" * 100],
)
@on_both_loops
async def test_garbage_gets_a_refusal_and_no_page(server: TransferServer, sent: bytes) -> None:
    _, port = await server.start()
    with await raw(port, sent) as stream:
        assert (await rest_of(stream)) in (encode_answer(Status.BAD_REQUEST), b"")
    assert server.endings["bad_request"] == 1


@pytest.mark.parametrize("length", [0, 10, 44, 60])
@on_both_loops
async def test_half_a_hello_is_cut_off(server: TransferServer, length: int) -> None:
    _, port = await server.start()
    with await raw(port, encode_hello(NAMESPACE, KEYS)[:length]) as stream:
        assert await rest_of(stream) == b""
    assert server.endings["stalled"] == 1


@on_both_loops
async def test_a_thousand_connections_are_bounded_and_then_served_again(
    server: TransferServer,
) -> None:
    _, port = await server.start()
    streams = [await raw(port, b"") for _ in range(1000)]
    await until(lambda: server.endings.total() >= 1000 - 2 - WAITING_STREAMS)
    assert server.endings["busy"] > 0
    for stream in streams:
        stream.close()
    while (await client().fetch(HOST, port, KEYS, Taken())).why != "all":
        pass


OK = encode_answer(Status.OK)


def framed(number: int, named: int | None = None) -> bytes:
    content = page(number)
    return encode_page_head(key(number if named is None else named), content) + content


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


ONE = OK + framed(0)
LIES = {
    "closes at once": (b"", 0, "closed"),
    "speaks HTTP": (b"HTTP/1.1 400 Bad Request\r\n\r\n", 0, "malformed"),
    "has another version": (flipped(OK, 4), 0, "malformed"),
    "has an unknown status": (OK[:-1] + b"\x09", 0, "malformed"),
    "closes after a page": (ONE, 1, "closed"),
    "closes in a page": (ONE + framed(1)[:-1], 1, "closed"),
    "closes in a frame": (ONE + framed(1)[:9], 1, "closed"),
    "damages a page": (ONE + flipped(framed(1), 4000), 1, "corrupt"),
    "sends a wrong checksum": (ONE + flipped(framed(1), 8), 1, "corrupt"),
    "skips a page": (ONE + framed(2), 1, "corrupt"),
    "sends a page twice": (ONE + framed(0), 1, "corrupt"),
    "lies about a length": (ONE + struct.pack("<BI16s", 1, 1 << 31, bytes(16)), 1, "malformed"),
    "sends a longer page": (
        ONE + struct.pack("<BI16s", 1, PAGE_BYTES + 1, bytes(16)),
        1,
        "malformed",
    ),
    "has an unknown frame": (ONE + struct.pack("<BI16s", 7, 0, bytes(16)), 1, "malformed"),
    "says all too early": (ONE + encode_end(End.ALL), 1, "malformed"),
    "says missing after all": (
        OK + framed(0) + framed(1) + framed(2) + encode_end(End.MISSING),
        3,
        "malformed",
    ),
    "sends more than asked": (OK + b"".join(map(framed, range(4))), 3, "malformed"),
    "says missing": (ONE + encode_end(End.MISSING), 1, "missing"),
}


@contextlib.asynccontextmanager
async def scripted(said: bytes, *, stays: bool) -> AsyncIterator[int]:
    """Serve ``said`` to whoever connects; then close, or say nothing more."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(said)
        with contextlib.suppress(ConnectionError):
            await writer.drain()
            await reader.readexactly(len(encode_hello(NAMESPACE, KEYS[:3])))
            if stays:
                await reader.read()
        writer.close()

    server = await asyncio.start_server(answer, HOST, 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


@pytest.mark.parametrize("lie", LIES)
@on_both_loops
async def test_a_server_that_lies_costs_only_the_pages_it_did_not_send(lie: str) -> None:
    said, pages, why = LIES[lie]
    taken = Taken()
    async with scripted(said, stays=False) as port:
        taken.check(await client().fetch(HOST, port, KEYS[:3], taken), pages, why)


@pytest.mark.parametrize("said", [b"", OK, ONE[: len(OK) + 9], ONE[:-1], ONE])
@pytest.mark.parametrize("limit", ["page_s", "fetch_s"])
@on_both_loops
async def test_a_server_that_stalls_is_given_up(said: bytes, limit: str) -> None:
    taken = Taken()
    async with scripted(said, stays=True) as port:
        fetched = await client(**{"page_s": 60, limit: 0.1}).fetch(HOST, port, KEYS[:3], taken)
    taken.check(fetched, int(said == ONE), "stalled")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
@on_both_loops
async def test_nobody_listening_is_unreachable(host: str) -> None:
    with socket.socket() as unused:
        unused.bind((HOST, 0))
        taken = Taken()
        port = unused.getsockname()[1]
        taken.check(await client().fetch(host, port, KEYS, taken), 0, "unreachable")


@on_both_loops
async def test_a_source_that_fails_ends_the_stream_only(
    shelf: Shelf, server: TransferServer
) -> None:
    _, port = await server.start()
    shelf.fails_at = 2
    taken = Taken()
    taken.check(await client().fetch(HOST, port, KEYS, taken), 2, "closed")
    shelf.fails_at = None
    assert (await client().fetch(HOST, port, KEYS, Taken())).why == "all"
