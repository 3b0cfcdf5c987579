"""Which program an engine is, by its own answers."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from sidecar.facts import identify
from sidecar.scrape import EngineClient
from state.model import EngineKind

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@asynccontextmanager
async def engine(answers: dict[str, Any]) -> AsyncIterator[EngineClient]:
    """Serve JSON by path, and nothing else."""

    async def answer(request: web.Request) -> web.Response:
        if request.path not in answers:
            return web.Response(status=404)
        return web.json_response(answers[request.path])

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    async with (
        TestServer(app) as server,
        EngineClient(f"http://{server.host}:{server.port}") as client,
    ):
        yield client


def models(owner: str | None) -> dict[str, Any]:
    return {"object": "list", "data": [{"id": "m", "owned_by": owner}]}


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        (
            {"/version": {"version": "0.32.0"}, "/v1/models": models("vllm")},
            (EngineKind.VLLM, "0.32.0"),
        ),
        (
            {"/version": {"version": "warmroute"}, "/v1/models": models("warmroute")},
            (EngineKind.WORKER, None),
        ),
        (
            {
                "/server_info": {"version": "0.5.4", "max_total_num_tokens": 4096, "page_size": 1},
                "/v1/models": models("sglang"),
            },
            (EngineKind.SGLANG, "0.5.4"),
        ),
        (
            {"/get_server_info": {"version": "0.4\x1b[2J", "scheduler_info": {}}},
            (EngineKind.SGLANG, "0.4?[2J"),
        ),
        ({"/v1/models": models("somebody")}, (EngineKind.UNKNOWN, None)),
        ({"/version": ["odd"], "/v1/models": {"data": 5}}, (EngineKind.UNKNOWN, None)),
        ({}, (EngineKind.UNKNOWN, None)),
    ],
)
async def test_an_engine_is_what_its_answers_say(
    answers: dict[str, Any], expected: tuple[EngineKind, str | None]
) -> None:
    async with engine(answers) as client:
        assert await identify(client) == expected
