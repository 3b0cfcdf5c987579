"""Asks one engine about itself over HTTP: health, models, load, cache shape, event endpoints.

Everything that comes back is untrusted: bodies are bounded, redirects are refused, and what cannot
be read is None.
"""

from __future__ import annotations

import os
import re
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, Self
from urllib.parse import urlsplit

import aiohttp
import msgspec
from msgspec import Struct

from sidecar.deed import (
    ANSWERED_BYTES,
    ANSWERS,
    HTTP_REQUESTS,
    SLEEP_STATE,
    Deeds,
    deeds_of,
)
from sidecar.sglang import INFO_PATHS, LOAD_PATHS, MAX_PORT, SglangInfo, parse_info, parse_loads
from sidecar.subscriber import EventSource
from state.model import UNIX_SCHEME, ReplicaLoad, address_name
from state.tls import ClientTls, TlsFileError, client_context, fingerprint, tls_fault

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from types import TracebackType

MAX_BODY_BYTES: Final = 4 << 20
REQUEST_TIMEOUT_S: Final = 2.0
HEALTH_PATH: Final = "/health"
HEALTH_TIMES: Final = 1.5
"""So many times as long may a check take: SGLang computes a token, and looks each 1 s for it."""
PORTS: Final = {"http": 80, "https": 443}
_RUNNING: Final = ("vllm:num_requests_running", "sglang:num_running_reqs")
_QUEUED: Final = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")
_KV_USED: Final = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
_PROMPT_TOKENS: Final = ("vllm:prompt_tokens_total", "sglang:prompt_tokens_total")
_CACHE_CONFIG: Final = "vllm:cache_config_info"
_FIRST_WEIGHTS: Final = "default"
_START_TIME: Final = "process_start_time_seconds"
_DEEDS: Final = (HTTP_REQUESTS, SLEEP_STATE, ANSWERS, ANSWERED_BYTES)
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ANY_HOSTS: Final = frozenset({"*", "0.0.0.0", "::", "[::]"})  # noqa: S104 - compared, not bound


class EngineMetrics(Struct, frozen=True, kw_only=True):
    """What ``/metrics`` tells; None where it does not. ``started_at_s`` is Unix time.

    ``prompt_tokens`` counts those of all requests since the start.
    """

    load: ReplicaLoad = ReplicaLoad()
    prompt_tokens: int | None = None
    page_tokens: int | None = None
    capacity_pages: int | None = None
    started_at_s: float | None = None
    deeds: Deeds = Deeds()


class ModelCard(Struct, frozen=True):
    """One entry of ``/v1/models``; an adapter names its base model as ``parent``.

    ``salts_tails``: the engine reads which prefix of a prompt is public (``state.public``).
    """

    id: str
    parent: str | None = None
    max_model_len: int | None = None
    owned_by: str | None = None
    root: str | None = None
    salts_tails: bool = False


class _ModelList(Struct, frozen=True):
    data: list[ModelCard]


class _Publisher(Struct, frozen=True):
    endpoint: str
    replay_endpoint: str | None = None


class _WeightInfo(Struct, frozen=True):
    weight_version: str


class EngineError(Exception):
    """The engine did not give a usable answer; ``status`` is the one that it gave, if any."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


def parse_metrics(text: str) -> EngineMetrics:
    """Return the needed numbers of a Prometheus text; counts are summed over data-parallel ranks.

    A scrape has 60 KB of lines that do not matter here, so only lines of wanted names are taken
    apart.
    """
    samples: dict[str, list[tuple[str, float]]] = {}
    wanted = frozenset(
        (*_RUNNING, *_QUEUED, *_KV_USED, *_PROMPT_TOKENS, _CACHE_CONFIG, _START_TIME, *_DEEDS)
    )
    for name, labels, value in _samples(text, wanted):
        samples.setdefault(name, []).append((labels, value))
    used = _values(samples, _KV_USED)
    config = dict(_LABEL.findall(samples[_CACHE_CONFIG][0][0])) if _CACHE_CONFIG in samples else {}
    started = _values(samples, (_START_TIME,))
    return EngineMetrics(
        load=ReplicaLoad(
            running=_total(_values(samples, _RUNNING)),
            queued=_total(_values(samples, _QUEUED)),
            kv_used_fraction=sum(used) / len(used) if used else None,
        ),
        prompt_tokens=_total(_values(samples, _PROMPT_TOKENS)),
        page_tokens=_positive(config, "block_size"),
        capacity_pages=_positive(config, "num_gpu_blocks"),
        started_at_s=started[0] if started else None,
        deeds=deeds_of(*([_labelled(*one) for one in samples.get(name, ())] for name in _DEEDS)),
    )


def _labelled(labels: str, value: float) -> tuple[dict[str, str], float]:
    return dict(_LABEL.findall(labels)), value


def _samples(text: str, wanted: frozenset[str]) -> Iterator[tuple[str, str, float]]:
    for line in text.splitlines():
        name = line.partition("{")[0] if "{" in line else line.partition(" ")[0]
        if name not in wanted:
            continue
        labels, _, value = line[len(name) :].rpartition(" ")
        try:
            yield name, labels, float(value)
        except ValueError:
            continue


def _values(samples: Mapping[str, list[tuple[str, float]]], names: tuple[str, ...]) -> list[float]:
    for name in names:
        if name in samples:
            return [value for _, value in samples[name] if 0 <= value < float("inf")]
    return []


def _total(values: list[float]) -> int | None:
    return int(sum(values)) if values else None


def _positive(config: Mapping[str, str], name: str) -> int | None:
    value = config.get(name, "")
    return int(value) if value.isascii() and value.isdigit() and int(value) > 0 else None


def reachable_endpoint(endpoint: str, engine_host: str) -> str | None:
    """Return ``endpoint`` as a sidecar can dial it, None for a transport that it cannot use.

    Engines tell the address that they bound, often a wildcard.
    """
    if endpoint.startswith("ipc://"):
        return endpoint
    scheme, _, address = endpoint.partition("://")
    host, _, port = address.rpartition(":")
    is_port = port.isascii() and port.isdigit() and 0 < int(port) <= MAX_PORT
    if scheme != "tcp" or not is_port or not host:
        return None
    if host in _ANY_HOSTS:
        host = f"[{engine_host}]" if ":" in engine_host else engine_host
    return f"tcp://{host}:{port}"


class EngineClient:
    """HTTP client of one engine; an async context manager.

    ``pin`` is what requests name to be computed by one of the engine's data-parallel ranks; None
    for an engine as a whole. ``path`` is the unix socket of an engine at ``unix:/path``. Raises
    ValueError for other URLs, TlsFileError for files of ``tls`` that cannot be used.
    """

    pin: int | None = None

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = REQUEST_TIMEOUT_S,
        tls: ClientTls = ClientTls(),  # noqa: B008 - frozen
    ) -> None:
        self.path = url.removeprefix(UNIX_SCHEME) if url.startswith(UNIX_SCHEME + "/") else None
        parts = urlsplit("http://localhost" if self.path is not None else url)
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            message = "engine: expected http://host:port or https://host:port"
            raise ValueError(message)
        self.host = parts.hostname
        address = parts.netloc.rpartition("@")[2]
        self.endpoint = f"{parts.scheme}://{address}"
        is_ipv6 = ":" in parts.hostname
        port = parts.port or PORTS[parts.scheme]
        self.address = address_name(parts.hostname, port) if is_ipv6 else address
        self.tls = tls
        self._context = client_context(tls) if parts.scheme == "https" else None
        self._seen = fingerprint(tls.paths)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._load_path: str | None = None

    async def __aenter__(self) -> Self:
        self._session = self._opened()
        return self

    def _opened(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=self.connector(),
            headers=self._headers,
            trust_env=False,
        )

    async def _read_again(self) -> None:
        """Take the files of ``tls`` as they are now, if they changed since they were read."""
        found = fingerprint(self.tls.paths)
        if found == self._seen:
            return
        self._seen = found
        try:
            self._context = client_context(self.tls)
        except TlsFileError:
            return  # half of a pair: the other half is another change
        before, self._session = self._session, self._opened()
        if before is not None:
            await before.close()

    def connector(self) -> aiohttp.BaseConnector:
        """Return what connects another session to the same engine in the same way."""
        if self.path is not None:
            return aiohttp.UnixConnector(self.path)
        return aiohttp.TCPConnector(ssl=self._context or True)

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def is_healthy(self) -> bool:
        """Return whether ``/health`` answers 200 in time."""
        try:
            await self._get(HEALTH_PATH)
        except EngineError:
            return False
        return True

    async def metrics(self) -> EngineMetrics:
        """Return the engine's numbers; raises EngineError.

        SGLang has ``/metrics`` only with ``--enable-metrics``: then its load is asked for.
        """
        try:
            body = await self._get("/metrics")
        except EngineError as error:
            if error.status is None:
                raise
            return EngineMetrics(load=await self._sglang_load())
        return parse_metrics(body.decode("utf-8", "replace"))

    async def _sglang_load(self) -> ReplicaLoad:
        for path in (self._load_path,) if self._load_path else LOAD_PATHS:
            try:
                load = parse_loads(await self._get(path))
            except EngineError as error:
                if error.status is None:
                    raise
                continue
            if load is not None:
                self._load_path = path
                return load
        message = "neither /metrics nor /v1/loads tells of the load"
        raise EngineError(message)

    async def sglang_info(self) -> SglangInfo | None:
        """Return SGLang's description of itself; None where the engine is none, or not ready."""
        for path in INFO_PATHS:
            try:
                body = await self._get(path)
            except EngineError as error:
                if error.status is None:
                    return None
                continue
            return parse_info(body, lambda bound: reachable_endpoint(bound, self.host))
        return None

    async def models(self) -> list[ModelCard]:
        """Return the served models; raises EngineError."""
        try:
            return msgspec.json.decode(await self._get("/v1/models"), type=_ModelList).data
        except (msgspec.DecodeError, RecursionError) as error:
            message = "/v1/models: not a model list"
            raise EngineError(message) from error

    async def event_sources(self) -> tuple[EventSource, ...]:
        """Return where each data-parallel rank publishes; raises EngineError."""
        return tuple((await self.sources_by_rank()).values())

    async def sources_by_rank(self) -> dict[int, EventSource]:
        """Return where each rank publishes, in the order of the ranks; raises EngineError."""
        try:
            body = await self._get("/kv_event_sources")
        except EngineError as error:
            info = await self.sglang_info() if error.status is not None else None
            if info is None:
                raise
            return dict(info.sources)
        try:
            raw = msgspec.json.decode(body, type=dict[int, _Publisher | None])
        except (msgspec.DecodeError, RecursionError) as error:
            message = "/kv_event_sources: not a map of publishers"
            raise EngineError(message) from error
        sources = {}
        for rank, publisher in sorted(raw.items()):
            if publisher is None:
                continue
            events = reachable_endpoint(publisher.endpoint, self.host)
            if events is None:
                continue
            replay = publisher.replay_endpoint
            sources[rank] = EventSource(
                events=events, replay=reachable_endpoint(replay, self.host) if replay else None
            )
        return sources

    async def weight_version(self) -> str:
        """Return what vLLM calls its weights since they were changed in place; empty if nothing.

        Raises EngineError where it does not answer.
        """
        try:
            told = msgspec.json.decode(await self._get("/weight_info"), type=_WeightInfo)
        except (msgspec.DecodeError, RecursionError):
            return ""
        except EngineError as error:
            if error.status is None:  # no answer: not to be taken for the first weights
                raise
            return ""
        return "" if told.weight_version == _FIRST_WEIGHTS else told.weight_version

    async def can_transfer(self) -> bool:
        """Return whether ``/kv_transfer`` answers 200: the engine fetches KV pages, and gives."""
        try:
            await self._get("/kv_transfer")
        except EngineError:
            return False
        return True

    async def get(self, path: str) -> bytes:
        """Return the body of a GET; raises EngineError."""
        return await self._get(path)

    async def _get(self, path: str) -> bytes:
        if self._session is None:
            message = "the client is not open"
            raise RuntimeError(message)
        total_s = self._timeout_s * (HEALTH_TIMES if path == HEALTH_PATH else 1.0)
        url, limit = self.endpoint + path, aiohttp.ClientTimeout(total=total_s)
        try:
            async with self._session.get(url, allow_redirects=False, timeout=limit) as response:
                if response.status != HTTPStatus.OK:
                    message = f"{path}: status {response.status}"
                    raise EngineError(message, response.status)
                body = bytearray()
                async for chunk in response.content.iter_chunked(1 << 16):
                    body += chunk
                    if len(body) > MAX_BODY_BYTES:
                        message = f"{path}: more than {MAX_BODY_BYTES} bytes"
                        raise EngineError(message)
                return bytes(body)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            number = None if (fault := tls_fault(error)) else getattr(error, "errno", None)
            fault = fault or (os.strerror(number) if number else type(error).__name__)
            message = f"{path}: {fault}"
            if self._context is not None:
                await self._read_again()
            raise EngineError(message) from error
