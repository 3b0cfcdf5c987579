"""Paths beyond those that the router knows: none is passed on that the configuration does not name.

Engines have paths that stop them, or change their weights, on the port of the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from support.stage import Actor, Stage, post_to, staged_router

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.asyncio(loop_scope="module")

BODY = b'{"model":"fleet-model","input":"hello"}'
ANY_BODY = b"--boundary\r\nnot JSON"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stage]:
    actors = [Actor("a"), Actor("b")]
    folder = tmp_path_factory.mktemp("stage")
    async with staged_router(
        folder, actors, paths=["/v1/audio/speech", "/pooling", "/more/*"]
    ) as running:
        yield running


@pytest.mark.parametrize("body", [BODY, ANY_BODY], ids=["json", "other"])
@pytest.mark.parametrize(
    "path", ["/v1/audio/speech", "/pooling", "/pooling?a=b", "/more/of/these", "/more/x.y?z"]
)
async def test_a_configured_path_is_passed_on_by_load(stage: Stage, path: str, body: bytes) -> None:
    stage.reset()
    reply = await stage.ask(post_to(body, path))
    assert reply.status == 200
    [received] = stage.posts()
    assert (received.line, received.body) == (f"POST {path} HTTP/1.1".encode(), body)
    [record] = await stage.fleet.decisions(1)
    assert record["unroutable"] == "path without a prefix"
    assert len(record["attempts"]) == 1


@pytest.mark.parametrize(
    "path",
    [
        "/pause",
        "/v1/audio/speech/",
        "/v1/audio/Speech",
        "/pooling/..%2fpause",
        "/v1/../pooling",
        "/more",
        "/more/",
        "/more/../pause",
        "/more/..%2fpause",
        "/more/.hidden",
        "/more//pause",
        "/more/*",
    ],
)
async def test_no_other_path_is(stage: Stage, path: str) -> None:
    stage.reset()
    assert (await stage.ask(post_to(BODY, path))).status == 404
    assert stage.posts() == []


async def test_a_configured_path_takes_posts_only(stage: Stage) -> None:
    stage.reset()
    reply = await stage.ask(b"GET /pooling HTTP/1.1\r\nHost: x\r\n\r\n")
    assert (reply.status, reply.all(b"allow")) == (405, [b"POST"])
    assert stage.posts() == []
