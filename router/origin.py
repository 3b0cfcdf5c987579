"""What pages in an operator's browser may ask of the operators' listener.

Browsers name where a request comes from (Fetch Metadata, ``Origin``); other clients name nothing.
"""

from __future__ import annotations

from ipaddress import ip_address
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from router.error import ForbiddenError
from router.header import header_value

if TYPE_CHECKING:
    from router.request import Request

_OWN_SITES: Final = frozenset({b"same-origin", b"none"})


def refuse_other_sites(request: Request) -> None:
    """Raise ForbiddenError for what a browser marks as the request of another site's page."""
    site = header_value(request.headers.received, b"sec-fetch-site")
    if site is not None and site.strip().lower() not in _OWN_SITES:
        message = "Sec-Fetch-Site: expected same-origin; other pages have no access here"
        raise ForbiddenError(message, param="Sec-Fetch-Site")


def refuse_other_origins(request: Request) -> None:
    """Raise ForbiddenError for what a page of another origin may have sent.

    A page's own origin counts only by address: a name may be one that was made to lead here.
    """
    refuse_other_sites(request)
    received = request.headers.received
    origin = header_value(received, b"origin")
    if origin is None:
        return
    host = (header_value(received, b"host") or b"").decode("latin-1").lower()
    told = origin.decode("latin-1").lower()
    if told not in {f"http://{host}", f"https://{host}"} or not _is_address(host):
        message = "Origin: expected this listener by its address, as http://127.0.0.1:8081"
        raise ForbiddenError(message, param="Origin")


def refuse_pages(request: Request) -> None:
    """Raise ForbiddenError for what any page may have sent, this listener's own ones, too."""
    refuse_other_sites(request)
    if header_value(request.headers.received, b"origin") is not None:
        message = "Origin: expected none; pages of the web change nothing here"
        raise ForbiddenError(message, param="Origin")


def _is_address(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
        if name == "localhost":
            return True
        ip_address(name)
    except ValueError:
        return False
    return True
