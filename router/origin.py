"""What pages in an operator's browser may ask of the operators' listener.

One guard is in front of every path there. Browsers name where a request comes from (``Host``,
``Origin``, Fetch Metadata); other clients need name nothing.
"""

from __future__ import annotations

from ipaddress import ip_address
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from router.config import socket_path, split_address
from router.error import ForbiddenError, MisdirectedError, RouterError
from router.header import header_value
from router.reply import error_response

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from router.client import Answer, Handler
    from router.config import Config
    from router.request import Request

NO_PAGES: Final = "/admin/scopes/"
"""What the listener's own pages do not change either."""
_OWN_SITES: Final = frozenset({"same-origin", "none"})
_SAFE: Final = frozenset({"GET", "HEAD"})
_LOCAL: Final = "localhost"


class OriginGuard:
    """Refuses what a page of another origin may have sent.

    An address is believed to be this listener's, a name only where it is one of ``names``: whoever
    owns another one can make it lead here, and a browser then takes their page for ours (DNS
    rebinding). ``has_names`` is False for a unix socket, which no name leads to.
    """

    def __init__(self, names: Iterable[str], *, has_names: bool = True) -> None:
        self._names = frozenset(map(_plain, names)) | {_LOCAL}
        self._has_names = has_names

    def guarded(
        self, routes: Mapping[str, Mapping[str, Handler]]
    ) -> dict[str, Mapping[str, Handler]]:
        """Return the table with the guard in front of every handler."""
        return {
            path: {method: self._behind(handler) for method, handler in methods.items()}
            for path, methods in routes.items()
        }

    def _behind(self, handler: Handler) -> Handler:
        async def guarded(request: Request) -> Answer:
            try:
                self.check(request)
            except RouterError as error:
                return error_response(error, request.headers.request_id)
            return await handler(request)

        return guarded

    def check(self, request: Request) -> None:
        """Raise ForbiddenError or MisdirectedError for what another origin's page may have sent."""
        host = _told(request, b"host")
        if self._has_names and host is not None and not self._is_own(host):
            message = "Host: expected an address, localhost, or one of admin_hosts"
            raise MisdirectedError(message, param="Host")
        self._check_site(request)
        origin = _told(request, b"origin")
        if origin is None:
            return
        if request.path.startswith(NO_PAGES) and request.method not in _SAFE:
            message = "Origin: expected none; pages of the web change nothing here"
            raise ForbiddenError(message, param="Origin")
        if origin not in {f"http://{host}", f"https://{host}"} and not self._is_named(origin):
            message = "Origin: expected this listener, as http://127.0.0.1:8081"
            raise ForbiddenError(message, param="Origin")

    def _check_site(self, request: Request) -> None:
        """Refuse what a browser marks as another site's, unless a link was followed."""
        site = _told(request, b"sec-fetch-site")
        if site is None or site in _OWN_SITES:
            return
        is_link = (
            request.method in _SAFE
            and _told(request, b"sec-fetch-mode") == "navigate"
            and _told(request, b"sec-fetch-dest") == "document"
        )
        if not is_link:
            message = "Sec-Fetch-Site: expected same-origin; other pages have no access here"
            raise ForbiddenError(message, param="Sec-Fetch-Site")

    def _is_own(self, host: str) -> bool:
        name = _name_of(host)
        if name is None or _plain(name) in self._names:
            return name is not None
        try:
            ip_address(name)
        except ValueError:
            return False
        return True

    def _is_named(self, origin: str) -> bool:
        """Return whether an origin is one of the names: a proxy in front may change ``Host``."""
        scheme, _, host = origin.partition("://")
        name = _name_of(host)
        return scheme in {"http", "https"} and name is not None and _plain(name) in self._names


def open_guard(config: Config) -> OriginGuard:
    """Return the guard of the configured listener; the name in its address is its own."""
    address = config.admin or ""
    if socket_path("admin", address) is not None:
        return OriginGuard(config.admin_hosts, has_names=False)
    return OriginGuard((*config.admin_hosts, split_address("admin", address)[0]))


def _told(request: Request, name: bytes) -> str | None:
    value = header_value(request.headers.received, name)
    return None if value is None else value.strip().decode("latin-1").lower()


def _name_of(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:
        return None


def _plain(name: str) -> str:
    return name.lower().removesuffix(".")
