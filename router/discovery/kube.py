"""The EndpointSlices of a Service: listed, then watched from the list's version on.

Two requests of the API are all that is needed, so they are made here, with aiohttp. A watch ends
after a while by itself and goes on at the last version that was told; a version that the API server
has forgotten (410) makes a new list, and so does every ``resync_s``. The token is read anew for
each request, because it is replaced while the router runs.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from contextlib import aclosing
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import msgspec
from msgspec import Struct

from router.discovery.directory import found_member
from router.discovery.slice import SERVICE_LABEL, EndpointSlice, Metadata, SliceList, pods_of
from router.endpoint import Endpoint
from state.model import NAME_PATTERN, ReplicaId
from state.rhythm import Backoff

if TYPE_CHECKING:
    import random
    from collections.abc import AsyncGenerator, Iterator

    from router.discovery.directory import Bouncer, Shelf
    from router.discovery.setting import KubernetesSource
    from router.fleet import Member

SOURCE: Final = "kubernetes"
PAGE_SLICES: Final = 500
MOST_BYTES: Final = 16 << 20
"""Of a page, and of one event."""
MOST_REPLICAS: Final = 1_000
BACKOFF_S: Final = (0.5, 30.0)
AGAIN_S: Final = 1.0
"""An empty list is asked for again after this time."""
SLACK_S: Final = 10.0
"""So much later than asked for may the API server end a watch, before it counts as lost."""


class KubeError(Exception):
    """The API server did not answer as it should."""


class GoneError(KubeError):
    """It knows the version no longer: list again."""


class _Event(Struct, frozen=True):
    type: str
    object: msgspec.Raw = msgspec.Raw(b"{}")


class _Status(Struct, frozen=True):
    code: int | None = None


class _Mark(Struct, frozen=True):
    metadata: Metadata = Metadata()


class KubeWatch:
    """Keeps a shelf as the API server tells it."""

    def __init__(
        self, settings: KubernetesSource, shelf: Shelf, bouncer: Bouncer, rng: random.Random
    ) -> None:
        self._settings = settings
        self._shelf = shelf
        self._bouncer = bouncer
        self._backoff = Backoff(*BACKOFF_S, rng)
        self._slices: dict[str, EndpointSlice] = {}
        self._version = ""
        self._is_told = False

    async def run(self) -> None:
        """List and watch until cancelled."""
        while True:
            try:
                await self._follow()
            except GoneError:
                self._version = ""
                await asyncio.sleep(self._backoff.next_s())
            except (KubeError, OSError, ValueError, TimeoutError, aiohttp.ClientError) as error:
                self._shelf.fail(_words(error))
                await asyncio.sleep(self._backoff.next_s())

    async def _follow(self) -> None:
        """List and watch with one session, until the list is old or something fails."""
        settings = self._settings
        loop = asyncio.get_running_loop()
        async with self._session() as session:
            until_s = loop.time() + settings.resync_s
            is_believed = True
            if not self._version:
                await self._list(session)
                is_believed = self._show()
            while is_believed and (left_s := until_s - loop.time()) > 0:
                is_believed = await self._watch(session, left_s)
        self._version = ""
        if not is_believed:
            await asyncio.sleep(AGAIN_S)

    def _session(self) -> aiohttp.ClientSession:
        settings = self._settings
        context: ssl.SSLContext | bool = True
        if settings.ca_file is not None and settings.api_server.startswith("https"):
            context = ssl.create_default_context(cafile=settings.ca_file)
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=context),
            timeout=aiohttp.ClientTimeout(total=None, connect=settings.timeout_s),
        )

    def _path(self) -> str:
        settings = self._settings
        namespace = settings.namespace
        if namespace is None:
            namespace = Path(settings.namespace_file).read_text(encoding="utf-8").strip()
        if not re.fullmatch(r"[a-z0-9-]{1,63}", namespace):
            message = "the namespace is none"
            raise ValueError(message)
        base = settings.api_server.rstrip("/")
        return f"{base}/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"

    def _asked(
        self, session: aiohttp.ClientSession, timeout: aiohttp.ClientTimeout, **query: str
    ) -> Any:
        """Return the request's context, with the token as it is now."""
        settings = self._settings
        headers = {"Accept": "application/json"}
        if settings.token_file is not None:
            token = Path(settings.token_file).read_text(encoding="utf-8").strip()
            headers["Authorization"] = f"Bearer {token}"
        params = {"labelSelector": f"{SERVICE_LABEL}={settings.service}", **query}
        return session.get(
            self._path(), params=params, headers=headers, timeout=timeout, allow_redirects=False
        )

    async def _list(self, session: aiohttp.ClientSession) -> None:
        """Replace what is known by a list; raises KubeError and what aiohttp raises."""
        listed: dict[str, EndpointSlice] = {}
        timeout = aiohttp.ClientTimeout(total=self._settings.timeout_s)
        page = {"limit": str(PAGE_SLICES)}
        while True:
            async with self._asked(session, timeout, **page) as response:
                _check(response.status)
                body = await _body(response)
            answer = msgspec.json.decode(body, type=SliceList)
            listed.update((one.metadata.name, one) for one in answer.items or ())
            if not answer.metadata.continue_:
                break
            page["continue"] = answer.metadata.continue_
        self._slices, self._version = listed, answer.metadata.resource_version

    async def _watch(self, session: aiohttp.ClientSession, for_s: float) -> bool:
        """Take the changes of one watch, which ends after so long at most.

        Return False where what it told is not believed yet.
        """
        whole_s = max(1, int(for_s))
        timeout = aiohttp.ClientTimeout(
            total=None, connect=self._settings.timeout_s, sock_read=whole_s + SLACK_S
        )
        query = {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(whole_s),
        }
        self._is_told = False
        async with self._asked(session, timeout, **query) as response:
            _check(response.status)
            async with aclosing(_lines(response)) as lines:
                async for line in lines:
                    self._take(msgspec.json.decode(line, type=_Event))
                    if not self._show():
                        return False
        if not self._is_told:  # an API server that ends every watch at once is not asked at once
            await asyncio.sleep(self._backoff.next_s())
        return True

    def _take(self, event: _Event) -> None:
        if event.type == "ERROR":
            status = msgspec.json.decode(event.object, type=_Status)
            _check(status.code or HTTPStatus.INTERNAL_SERVER_ERROR)
            return
        self._is_told = True
        self._backoff.reset()
        if event.type == "BOOKMARK":
            mark = msgspec.json.decode(event.object, type=_Mark)
            self._version = mark.metadata.resource_version or self._version
        elif event.type in {"ADDED", "MODIFIED", "DELETED"}:
            told = msgspec.json.decode(event.object, type=EndpointSlice)
            if event.type == "DELETED":
                self._slices.pop(told.metadata.name, None)
            else:
                self._slices[told.metadata.name] = told
            self._version = told.metadata.resource_version or self._version

    def _show(self) -> bool:
        """Put what is known on the shelf; False where it is not believed yet."""
        return self._shelf.put(self._members())

    def _members(self) -> Iterator[Member]:
        settings = self._settings
        is_tls = settings.scheme == "https"
        for pod in pods_of(self._slices.values(), settings.port)[:MOST_REPLICAS]:
            endpoint = Endpoint(pod.address, pod.port, is_tls)
            if self._bouncer.admits(endpoint):
                name = pod.name if re.fullmatch(NAME_PATTERN, pod.name) else endpoint.name
                yield found_member(ReplicaId(name), endpoint, SOURCE, is_draining=pod.is_draining)


def _check(status: int) -> None:
    if status == HTTPStatus.GONE:
        message = "the version is gone"
        raise GoneError(message)
    if status != HTTPStatus.OK:
        message = f"the API server answered {status}"
        raise KubeError(message)


def _words(error: Exception) -> str:
    """Return what may be logged of an error: no token is in it."""
    if isinstance(error, KubeError):
        return str(error)
    if isinstance(error, OSError) and error.strerror and not isinstance(error, aiohttp.ClientError):
        return f"{error.filename or 'the API server'}: {error.strerror}"
    return f"the API server was not reached or not understood: {type(error).__name__}"


async def _body(response: aiohttp.ClientResponse) -> bytes:
    parts: list[bytes] = []
    async for part in response.content.iter_any():
        parts.append(part)
        if sum(map(len, parts)) > MOST_BYTES:
            message = "a page is too long"
            raise KubeError(message)
    return b"".join(parts)


async def _lines(response: aiohttp.ClientResponse) -> AsyncGenerator[bytes, None]:
    """Yield the lines of a watch; a line that was cut off is none."""
    rest = bytearray()
    async for part in response.content.iter_any():
        rest += part
        *whole, last = rest.split(b"\n")
        for line in whole:
            if line.strip():
                yield bytes(line)
        rest = last
        if len(rest) > MOST_BYTES:
            message = "an event is too long"
            raise KubeError(message)
