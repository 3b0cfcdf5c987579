"""Asks a router's operators' listener; what it answers is decoded into the router's own structs."""

from __future__ import annotations

import os
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

TIMEOUT_S: Final = 5.0
MAX_BODY_BYTES: Final = 32 << 20
_T = TypeVar("_T")


class AdminError(Exception):
    """The router cannot be asked; the text says at which address, and what to do."""


def admin_url(text: str) -> str:
    """Return ``http://host:port`` without a path; raises ValueError saying what was expected."""
    parts = urlsplit(text if "//" in text else f"http://{text}")
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.path.strip("/"):
        message = f"expected http://host:port, got {text!r}"
        raise ValueError(message)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


class AdminClient:
    """``base`` is ``http://host:port``; the session stays the caller's."""

    def __init__(self, http: aiohttp.ClientSession, base: str) -> None:
        self._http = http
        self.base = base

    async def get(self, path: str, kind: type[_T]) -> _T:
        """Return what a path answers; raises AdminError."""
        status, body = await self._body(path)
        if status == HTTPStatus.NOT_FOUND:
            message = (
                f"{self.base}{path} is not found: is this the address of --admin (`admin:`), and "
                "is the router as new as this command?"
            )
            raise AdminError(message)
        if status != HTTPStatus.OK:
            message = f"{self.base}{path} answered {status}"
            raise AdminError(message)
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            message = f"{self.base}{path}: not a router's answer ({error})"
            raise AdminError(message) from None

    async def find(self, path: str, kind: type[_T]) -> _T | None:
        """Return what a path answers, None where it does not answer 200 as expected."""
        try:
            return await self.get(path, kind)
        except AdminError:
            return None

    async def _body(self, path: str) -> tuple[int, bytes]:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        try:
            async with self._http.get(
                self.base + path, allow_redirects=False, timeout=timeout
            ) as answer:
                return answer.status, await read_bounded(answer, MAX_BODY_BYTES)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            number = getattr(error, "errno", None)
            reason = os.strerror(number) if number else type(error).__name__
            message = (
                f"no router answers at {self.base} ({reason}): it listens for operators where "
                "`warmroute serve --admin HOST:PORT` says, by default 127.0.0.1:8081 of its host"
            )
            raise AdminError(message) from None


async def read_bounded(answer: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    """Return the body of ``answer``; raises OSError when it is larger."""
    body = bytearray()
    async for part in answer.content.iter_chunked(1 << 16):
        body += part
        if len(body) > most_bytes:
            message = f"more than {most_bytes} bytes"
            raise OSError(message)
    return bytes(body)


def session(headers: Mapping[str, str] | None = None) -> aiohttp.ClientSession:
    """Return a session that takes no proxies from the environment."""
    return aiohttp.ClientSession(headers=dict(headers or {}), trust_env=False)
