"""Serves a sidecar's ``/metrics`` on an address of its own."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final, Self

from aiohttp import web

from sidecar.profile import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_MOST_PORT: Final = 65_535
_SHUTDOWN_S: Final = 0.5
_LOG = logging.getLogger("warmroute.sidecar")


class Exporter:
    """``async with Exporter("host:port", render)``; raises SettingsError when it cannot listen.

    Port 0 takes a free one; ``url`` and the log tell which.
    """

    def __init__(self, address: str, render: Callable[[], bytes]) -> None:
        self._address = address
        self._render = render
        self.url = ""

    async def __aenter__(self) -> Self:
        host, port = _parse(self._address)
        app = web.Application()
        app.router.add_get("/metrics", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_S)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port).start()
        except OSError as error:
            await self._runner.cleanup()
            message = f"metrics: cannot listen on {self._address}: {error.strerror}"
            raise SettingsError(message) from error
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        _LOG.info("metrics at %s/metrics", self.url)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._runner.cleanup()

    async def _answer(self, _: web.Request) -> web.Response:
        return web.Response(body=self._render(), headers={"Content-Type": CONTENT_TYPE})


def _parse(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > _MOST_PORT:
        message = f"metrics: expected host:port, got {address!r}"
        raise SettingsError(message)
    return host, int(port)
