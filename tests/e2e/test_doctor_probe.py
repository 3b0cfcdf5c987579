"""What a probe sends, and what it makes of odd answers."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from warmroute.admin_client import session
from warmroute.doctor_case import ProbeResult
from warmroute.doctor_probe import ProbeFailedError, probe_body, probe_engine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

USAGE = {"usage": {"prompt_tokens": 900, "prompt_tokens_details": {"cached_tokens": 896}}}


@asynccontextmanager
async def engine(answer: Any, status: int = 200) -> AsyncIterator[tuple[str, list[web.Request]]]:
    """Serve one answer to everything; yields the address and what was asked."""
    asked: list[web.Request] = []

    async def reply(request: web.Request) -> web.Response:
        await request.read()
        asked.append(request)
        return web.json_response(answer, status=status)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", reply)
    async with TestServer(app) as server:
        yield f"http://{server.host}:{server.port}", asked


@pytest.mark.parametrize(("rank", "header"), [(None, None), (0, "0"), (3, "3")])
async def test_one_prompt_goes_twice_to_the_rank_that_is_meant(
    rank: int | None, header: str | None
) -> None:
    body = probe_body("m", 64)
    async with engine(USAGE) as (url, asked), session() as http:
        result = await probe_engine(http, url, body, rank)
        assert result == ProbeResult(prompt_tokens=900, reported_tokens=896)
        assert [each.headers.get("X-data-parallel-rank") for each in asked] == [header, header]
        assert [await each.json() for each in asked] == [body, body]


def test_a_prompt_is_new_each_time_and_longer_than_some_blocks() -> None:
    texts = [probe_body("m", size)["messages"][0]["content"] for size in (16, 16, 768)]
    assert texts[0] != texts[1]
    assert texts[0][:30] != texts[1][:30]
    assert len(texts[2].split()) > 4 * 768
    assert probe_body("m", 16)["max_tokens"] == 1


@pytest.mark.parametrize(
    ("answer", "status", "told"),
    [
        (USAGE, 401, "answered 401"),
        ({"usage": None}, 200, "an answer without usage"),
        ({"usage": {"prompt_tokens": "x"}}, 200, "an answer without usage"),
        ({"text": "x" * (2 << 20)}, 200, "OSError"),
    ],
)
async def test_a_probe_that_fails_says_why(answer: Any, status: int, told: str) -> None:
    async with engine(answer, status) as (url, _), session() as http:
        with pytest.raises(ProbeFailedError, match=told):
            await probe_engine(http, url, probe_body("m", 64))


async def test_usage_without_details_is_unknown_and_not_nothing() -> None:
    async with engine({"usage": {"prompt_tokens": 900}}) as (url, _), session() as http:
        result = await probe_engine(http, url, probe_body("m", 64))
    assert result == ProbeResult(prompt_tokens=900)
