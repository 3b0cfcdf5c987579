"""What a client can send to learn, log or desynchronise something, against a whole router."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
import pytest_asyncio

from support.raw import get, post
from support.stage import Actor, Stage, chat_body, post_to, staged_router

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.asyncio(loop_scope="module")

CANARY = b"sk-CANARY-77"


def unsent(headers: bytes) -> bytes:
    """Return the head of a request whose body waits to be asked for."""
    line = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nExpect: 100-continue\r\n"
    return line + headers + b"\r\n\r\n"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    async with staged_router(tmp_path_factory.mktemp("hostile"), [Actor("a")]) as stage:
        yield stage


@pytest.fixture
def stage(running: Stage) -> Stage:
    running.reset()
    return running


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (get(extra=b"Authorization: Bearer " + CANARY + b"\x01\r\n"), 400),
        (b"GET /v1/models?key=" + CANARY + b"\xff HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (CANARY + b" / HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (post(extra=b"Transfer-Encoding: chunked\r\nX-Key: " + CANARY + b"\r\n"), 400),
        (get(extra=b"X-Key: " + CANARY * 1_000 + b"\r\n"), 431),
    ],
    ids=["header value", "query", "method", "two lengths", "long header"],
)
async def test_a_malformed_request_is_quoted_nowhere(
    stage: Stage, request_bytes: bytes, status: int
) -> None:
    """G-02: neither in the answer nor in the log; the answer is ours and names no version."""
    client = await stage.client()
    client.send(request_bytes)
    reply = await client.reply()
    assert reply.status == status
    assert msgspec.json.decode(reply.body)["error"]["type"] == "invalid_request_error"
    assert reply.all(b"server") == [b"warmroute"]
    assert await client.is_closed()
    log = stage.fleet.router.child.log.read_bytes()
    assert CANARY not in reply.body + log
    assert b"Traceback" not in log


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"POST /nope HTTP/1.1\r\nHost: a\r\nContent-Length: 40\r\n\r\n", 404),
        (b"PUT /livez HTTP/1.1\r\nHost: a\r\nContent-Length: 40\r\n\r\n", 405),
        (b"GET /livez HTTP/1.1\r\nHost: a\r\nContent-Length: 40\r\n\r\n", 400),
        (unsent(b"Content-Length: 99999999"), 413),
        (unsent(b"Content-Encoding: gzip\r\nContent-Length: 40"), 415),
    ],
)
async def test_an_answer_before_the_body_ends_the_connection(
    stage: Stage, request_bytes: bytes, status: int
) -> None:
    """H-48: a client that sends its next request instead of the body must not lose step."""
    client = await stage.client()
    client.send(request_bytes)
    reply = await client.reply()
    assert (reply.status, reply.all(b"connection")) == (status, [b"close"])
    client.send(get() * 2)
    assert await client.is_closed()


async def test_an_error_after_the_whole_body_keeps_the_connection(stage: Stage) -> None:
    client = await stage.client()
    client.send(b"POST /nope HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}" + get())
    assert [(await client.reply()).status, (await client.reply()).status] == [404, 200]


async def test_a_second_content_encoding_is_seen(stage: Stage) -> None:
    """H-43: the first line says identity, the replica would decompress."""
    extra = b"Content-Encoding: identity\r\nContent-Encoding: gzip\r\n"
    assert (await stage.ask(post(chat_body(), extra))).status == 415
    assert stage.posts() == []


async def test_a_huge_or_unprintable_model_is_refused_on_every_path(stage: Stage) -> None:
    """G-03: the decision trace keeps a thousand model names; none may be megabytes."""
    for name in (b"m" * 1_000_000, b"a\\nb", b"a\\u202eb"):
        reply = await stage.ask(post_to(b'{"model":"%b"}' % name, "/v1/embeddings"))
        assert (reply.status, len(reply.body) < 500) == (400, True)
    records = await stage.fleet.decisions(3)
    assert [record["model"] for record in records] == [None, None, None]


async def test_an_endless_number_in_an_admin_query_is_a_client_error(stage: Stage) -> None:
    url = f"{stage.fleet.router.admin_url}/debug/decisions?limit={'9' * 5_000}"
    async with stage.fleet.http.get(url) as answer:
        assert answer.status == 400
