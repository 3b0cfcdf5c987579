"""An API server that knows EndpointSlices only, with the faults that real ones have."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from aiohttp import web
from aiohttp.test_utils import TestServer

if TYPE_CHECKING:
    import ssl
    from types import TracebackType

Json = dict[str, Any]
PATH = "/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"


def endpoint(pod: str, address: str, **conditions: bool) -> Json:
    """Return an endpoint as a slice has it."""
    return {
        "addresses": [address],
        "conditions": {"ready": True, "serving": True, "terminating": False, **conditions},
        "nodeName": "node-1",
        "targetRef": {"kind": "Pod", "name": pod, "namespace": "llm", "uid": f"uid-{pod}"},
    }


def endpoint_slice(name: str, *endpoints: Json, family: str = "IPv4", port: int = 8000) -> Json:
    """Return a slice as the API server tells it, with more than anyone reads."""
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": name,
            "namespace": "llm",
            "labels": {"kubernetes.io/service-name": "vllm"},
            "managedFields": [{"manager": "kube-controller-manager"}],
        },
        "addressType": family,
        "endpoints": list(endpoints),
        "ports": [
            {"name": "metrics", "port": 9100, "protocol": "TCP"},
            {"name": "http", "port": port, "protocol": "TCP"},
        ],
    }


@dataclass(slots=True)
class KubeServer:
    """``token`` is the one that is accepted; ``status`` the answer to everything where it is set.

    ``oldest`` is the first version that a watch may begin at; ``page_slices`` bounds a page.
    """

    context: ssl.SSLContext | None = None
    token: str = "first"  # noqa: S105 - the test's own
    status: int | None = None
    oldest: int = 0
    page_slices: int = 100
    delay_s: float = 0.0
    slices: dict[str, Json] = field(default_factory=dict)
    asked: list[Json] = field(default_factory=list)
    version: int = 100
    url: str = ""
    _watches: list[asyncio.Queue[bytes | None]] = field(default_factory=list)
    _log: list[tuple[int, bytes]] = field(default_factory=list)
    _server: TestServer | None = None

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_get(PATH, self._answer)
        self._server = TestServer(app, scheme="https" if self.context else "http")
        await self._server.start_server(ssl=self.context, shutdown_timeout=0.1)
        scheme = "https" if self.context else "http"
        self.url = f"{scheme}://127.0.0.1:{self._server.port}"
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._server is not None
        self.drop()
        await self._server.close()

    @property
    def lists(self) -> int:
        """How often a first page was asked for."""
        return sum("watch" not in one and "continue" not in one for one in self.asked)

    @property
    def watches(self) -> list[Json]:
        """The queries of all watches."""
        return [one for one in self.asked if "watch" in one]

    @property
    def open_watches(self) -> int:
        """How many watches are open."""
        return len(self._watches)

    def put(self, told: Json, *, is_announced: bool = True) -> None:
        """Create or replace a slice; tell the watches."""
        name = told["metadata"]["name"]
        kind = "MODIFIED" if name in self.slices else "ADDED"
        self.version += 1
        told["metadata"]["resourceVersion"] = str(self.version)
        self.slices[name] = told
        if is_announced:
            self.tell(kind, told)

    def delete(self, name: str) -> None:
        """Delete a slice; tell the watches."""
        self.version += 1
        told = self.slices.pop(name)
        told["metadata"]["resourceVersion"] = str(self.version)
        self.tell("DELETED", told)

    def bookmark(self, version: int) -> None:
        """Tell the watches how far they are."""
        metadata = {"resourceVersion": str(version)}
        self.tell("BOOKMARK", {"kind": "EndpointSlice", "metadata": metadata})

    def tell(self, kind: str, told: Json) -> None:
        """Send an event to all watches, in two parts."""
        line = json.dumps({"type": kind, "object": told}).encode() + b"\n"
        if kind in {"ADDED", "MODIFIED", "DELETED"}:
            self._log.append((self.version, line))
        for watch in self._watches:
            watch.put_nowait(line[:40])
            watch.put_nowait(line[40:])

    def fail_watches(self, code: int) -> None:
        """End all watches with an error event."""
        self.tell("ERROR", {"kind": "Status", "status": "Failure", "code": code})

    def drop(self) -> None:
        """Cut the connections of all watches."""
        for watch in self._watches:
            watch.put_nowait(None)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        query = dict(request.query)
        self.asked.append(query)
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        assert query["labelSelector"] == "kubernetes.io/service-name=vllm"
        assert request.match_info["namespace"] == "llm"
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.json_response({"kind": "Status", "code": 401}, status=401)
        if self.status is not None:
            return web.json_response({"kind": "Status", "code": self.status}, status=self.status)
        if query.get("watch") == "1":
            return await self._watch(request)
        names = sorted(self.slices)
        start = int(query.get("continue", "0"))
        page = names[start : start + self.page_slices]
        metadata = {"resourceVersion": str(self.version)}
        if start + len(page) < len(names):
            metadata["continue"] = str(start + len(page))
        items = [self.slices[name] for name in page]
        return web.json_response(
            {"kind": "EndpointSliceList", "metadata": metadata, "items": items}
        )

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        since = int(request.query["resourceVersion"])
        response = web.StreamResponse()
        await response.prepare(request)
        if since < self.oldest:
            status = {"kind": "Status", "code": 410, "reason": "Expired"}
            event = json.dumps({"type": "ERROR", "object": status})
            await response.write(event.encode() + b"\n")
            return response
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        for version, line in self._log:
            if version > since:
                queue.put_nowait(line)
        self._watches.append(queue)
        try:
            async with asyncio.timeout(float(request.query["timeoutSeconds"])):
                while (line_part := await queue.get()) is not None:
                    await response.write(line_part)
            if request.transport is not None:
                request.transport.abort()
        except TimeoutError:
            pass
        finally:
            self._watches.remove(queue)
        return response
