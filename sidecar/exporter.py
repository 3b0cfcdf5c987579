"""Serves a sidecar's ``/metrics`` on an address of its own, and takes ``/renew`` from this host."""

from __future__ import annotations

import logging
from ipaddress import ip_address
from typing import TYPE_CHECKING, Final, Self

from aiohttp import web

from sidecar.profile import SettingsError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_MOST_PORT: Final = 65_535
_SHUTDOWN_S: Final = 0.5
_MOST_REVISION_CHARS: Final = 256
_LOG = logging.getLogger("warmroute.sidecar")


class Exporter:
    """``async with Exporter("host:port", render, renew)``; SettingsError if it cannot listen.

    Port 0 takes a free one; ``url`` and the log tell which.
    """

    def __init__(
        self, address: str, render: Callable[[], bytes], renew: Callable[[str | None], None]
    ) -> None:
        self._address = address
        self._render = render
        self._renew = renew
        self.url = ""

    async def __aenter__(self) -> Self:
        host, port = _parse(self._address)
        app = web.Application()
        app.router.add_get("/metrics", self._answer)
        app.router.add_post("/renew", self._take_renewal)
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

    async def _take_renewal(self, request: web.Request) -> web.Response:
        """Begin a new generation, of other weights where ``weights_revision`` is given.

        Nobody else's business: not that of other hosts, nor of pages in a browser here.
        """
        if not is_local(request):
            return web.Response(status=403, text="renew: only from this host, by no web page\n")
        revision = request.query.get("weights_revision")
        if revision is not None and not (
            revision.isprintable() and 0 < len(revision) <= _MOST_REVISION_CHARS
        ):
            expected = f"a printable name of 1 to {_MOST_REVISION_CHARS} characters"
            return web.Response(status=400, text=f"weights_revision: expected {expected}\n")
        self._renew(revision)
        return web.Response(text="renewed\n")


def is_local(request: web.BaseRequest) -> bool:
    """Return whether a request comes from this host, and from no page in a browser."""
    try:
        is_loopback = ip_address(request.remote or "").is_loopback
    except ValueError:
        return False
    return is_loopback and "Origin" not in request.headers


def _parse(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > _MOST_PORT:
        message = f"metrics: expected host:port, got {address!r}"
        raise SettingsError(message)
    return host, int(port)
