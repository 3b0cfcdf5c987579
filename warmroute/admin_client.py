"""Asks a router's operators' listener; what it answers is decoded into the router's own structs."""

from __future__ import annotations

import asyncio
import os
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, TypeVar
from urllib.parse import urlsplit

import aiohttp
import msgspec

from state.model import UNIX_SCHEME
from state.tls import tls_fault
from warmroute.cli import UsageError
from warmroute.tls_option import told_context

if TYPE_CHECKING:
    from collections.abc import Mapping

TIMEOUT_S: Final = 5.0
MAX_BODY_BYTES: Final = 32 << 20
NOT_FOUND_HINT: Final = (
    "is this the address of --admin (`admin:`), and is the router as new as this command?"
)
_T = TypeVar("_T")


class _Said(msgspec.Struct):
    message: str
    code: str


class _Refusal(msgspec.Struct):
    error: _Said


class AdminError(Exception):
    """The router cannot be asked; the text says at which address, and what to do."""


def admin_url(text: str) -> str:
    """Return ``http://host:port``, without a path, or ``unix:/path``.

    Raises ValueError saying what was expected.
    """
    if text.startswith(UNIX_SCHEME + "/"):
        return text
    parts = urlsplit(text if "//" in text else f"http://{text}")
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.path.strip("/"):
        message = f"expected http://host:port, got {text!r}"
        raise ValueError(message)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


class AdminClient:
    """``base`` is what ``admin_url`` returned; the session was told it and stays the caller's."""

    def __init__(self, http: aiohttp.ClientSession, base: str) -> None:
        self._http = http
        self.base = base
        self._root = "http://localhost" if base.startswith(UNIX_SCHEME) else base

    async def get(self, path: str, kind: type[_T], hint: str = NOT_FOUND_HINT) -> _T:
        """Return what a path answers; raises AdminError, with ``hint`` where it is not found."""
        body, _ = await self.fetch(path, hint)
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

    async def fetch(self, path: str, hint: str = NOT_FOUND_HINT) -> tuple[bytes, Mapping[str, str]]:
        """Return body and headers of what a path answers; raises AdminError as ``get`` does."""
        status, body, headers = await self._answer(path)
        if status == HTTPStatus.NOT_FOUND:
            message = _what_is_not_there(body) or f"{self.base}{path} is not found: {hint}"
            raise AdminError(message)
        if status != HTTPStatus.OK:
            message = f"{self.base}{path} answered {status}"
            raise AdminError(message)
        return body, headers

    async def _answer(self, path: str) -> tuple[int, bytes, Mapping[str, str]]:
        timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
        try:
            async with self._http.get(
                self._root + path, allow_redirects=False, timeout=timeout
            ) as answer:
                body = await read_bounded(answer, MAX_BODY_BYTES)
                return answer.status, body, answer.headers
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            message = (
                f"no router answers at {self.base} ({_reason(error)}): it listens for operators "
                "where `warmroute serve --admin HOST:PORT` says, by default 127.0.0.1:8081 of its "
                "host"
            )
            raise AdminError(message) from None


def ask(admin: str, path: str, kind: type[_T], hint: str = NOT_FOUND_HINT) -> _T:
    """Return what one path of the router at ``admin`` answers; raises UsageError."""
    try:
        base = admin_url(admin)
    except ValueError as error:
        message = f"--admin: {error}"
        raise UsageError(message) from None
    try:
        return asyncio.run(_ask_once(base, path, kind, hint))
    except AdminError as error:
        raise UsageError(str(error)) from None


async def _ask_once(base: str, path: str, kind: type[_T], hint: str) -> _T:
    async with session(at=base) as http:
        return await AdminClient(http, base).get(path, kind, hint)


def _what_is_not_there(body: bytes) -> str:
    """Return a router's own words where it knows the path, but not what was asked for; else ""."""
    try:
        said = msgspec.json.decode(body, type=_Refusal).error
    except (msgspec.DecodeError, UnicodeDecodeError):
        return ""
    return "" if said.code != "not_found" or said.message == "no such path" else said.message


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {TIMEOUT_S:.0f} s"
    if isinstance(error, aiohttp.ClientResponseError):
        return "what answers does not speak HTTP"
    fault = tls_fault(error)
    if fault is not None:
        return fault
    number = getattr(error, "errno", None)
    return os.strerror(number) if number else str(error) or type(error).__name__


async def read_bounded(answer: aiohttp.ClientResponse, most_bytes: int) -> bytes:
    """Return the body of ``answer``; raises OSError when it is larger."""
    body = bytearray()
    async for part in answer.content.iter_chunked(1 << 16):
        body += part
        if len(body) > most_bytes:
            message = f"more than {most_bytes} bytes"
            raise OSError(message)
    return bytes(body)


def session(headers: Mapping[str, str] | None = None, at: str = "") -> aiohttp.ClientSession:
    """Return a session that takes no proxies from the environment, but what it says of TLS.

    Where ``at`` is ``unix:/path`` it only leads there. Raises UsageError.
    """
    connector: aiohttp.BaseConnector
    if at.startswith(UNIX_SCHEME):
        connector = aiohttp.UnixConnector(at.removeprefix(UNIX_SCHEME))
    else:
        connector = aiohttp.TCPConnector(ssl=told_context() or True)
    return aiohttp.ClientSession(connector=connector, headers=dict(headers or {}), trust_env=False)
