"""The operators' page: files of this package, served as they are.

They are read once. Every answer carries a strong ETag and is asked for again each time, so that a
new router never meets an old page. What the page may load is bounded to this origin.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Final

from router.header import header_value
from router.reply import own_response

if TYPE_CHECKING:
    from collections.abc import Mapping

    from router.client import Handler
    from router.reply import Response
    from router.request import Request

FOLDER: Final = Path(__file__).with_name("dashboard")
START: Final = "index.html"
PAGE_PATH: Final = "/dashboard"
TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
SECURITY: Final = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "object-src 'none'; require-trusted-types-for 'script'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Page:
    """The files below ``FOLDER``, of the kinds that a browser loads."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._files: dict[str, _File] = {}
        for path in sorted(folder.rglob("*")):
            kind = TYPES.get(path.suffix)
            if kind is not None and path.is_file():
                name = path.relative_to(folder).as_posix()
                self._files[name] = _File(path.read_bytes(), kind)

    def routes(self) -> dict[str, Mapping[str, Handler]]:
        """Return the paths, for the operators' listener only."""
        routes: dict[str, Mapping[str, Handler]] = {"/": {"GET": _to_page, "HEAD": _to_page}}
        for name, file in self._files.items():
            path = PAGE_PATH if name == START else f"{PAGE_PATH}/{name}"
            routes[path] = {"GET": file.answer, "HEAD": file.answer}
        return routes


class _File:
    """One file and its ETag."""

    def __init__(self, body: bytes, kind: str) -> None:
        self._body = body
        self._kind = kind
        self._tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'

    async def answer(self, request: Request) -> Response:
        """Answer the file, or 304 where the browser has it."""
        headers = {"ETag": self._tag, "Cache-Control": "no-cache", **SECURITY}
        known = header_value(request.headers.received, b"if-none-match")
        if known is not None and is_known(known.decode("latin-1"), self._tag):
            return own_response(b"", self._kind, status=304, headers=headers)
        return own_response(self._body, self._kind, headers=headers)


def is_known(header: str, tag: str) -> bool:
    """Return whether an If-None-Match names ``tag``, strong or weak (RFC 9110, 13.1.2)."""
    names = [one.strip().removeprefix("W/") for one in header.split(",")]
    return "*" in names or tag in names


async def _to_page(_: Request) -> Response:
    """Lead from the listener's root to the page; relative, as there may be a proxy in front."""
    return own_response(
        b"", "text/plain; charset=utf-8", status=307, headers={"Location": "." + PAGE_PATH}
    )
