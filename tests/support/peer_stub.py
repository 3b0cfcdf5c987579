"""A peer that gives what another worker has, and stops giving when it is told to."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Self

import aiohttp
from aiohttp import web

from sidecar.transfer_client import TransferClient
from sidecar.transfer_server import TransferServer

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence
    from types import TracebackType

    from state.model import BlockId

HOST = "127.0.0.1"


class HalfPeer:
    """Passes on the first ``pages`` pages of the worker at ``url``, then gives nothing more.

    ``is_mute``: it does not even say where pages are. ``asked`` is set once pages were asked for.
    """

    def __init__(self, url: str, page_bytes: int, pages: int = 0, *, is_mute: bool = False) -> None:
        self._behind = url
        self._page_bytes = page_bytes
        self._pages = pages
        self._is_mute = is_mute
        self._info: dict[str, Any] = {}
        self._never = asyncio.Event()
        self.asked = asyncio.Event()
        self.url = ""

    async def __aenter__(self) -> Self:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{self._behind}/kv_transfer") as answer,
        ):
            self._info = await answer.json()
        self._namespace = bytes.fromhex(self._info["namespace"])
        self._server = TransferServer(self, self._namespace)
        _, self._port = await self._server.start()
        app = web.Application()
        app.router.add_get("/kv_transfer", self._told)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, HOST, 0)
        await site.start()
        self.url = f"http://{HOST}:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._never.set()
        await self._server.close()
        await self._runner.cleanup()

    async def _told(self, _: web.Request) -> web.Response:
        if self._is_mute:
            self.asked.set()
            await self._never.wait()
        return web.json_response(self._info | {"port": self._port})

    async def pages(self, keys: Sequence[BlockId]) -> AsyncGenerator[bytes, None]:
        """See ``transfer_server.PageSource``."""
        client = TransferClient(self._namespace, self._page_bytes)
        contents: list[bytes] = []
        if self._pages:
            await client.fetch(
                HOST,
                int(self._info["port"]),
                keys[: self._pages],
                lambda _, content: contents.append(content),
            )
        for content in contents:
            yield content
        self.asked.set()
        await self._never.wait()
