"""Finds out what an engine is, before anything is set up for it: kind, model, cache, events.

Nothing here is configured, and nothing that an engine says is believed further than it can be
checked: an event endpoint counts when it can be reached, a model directory that a loopback
engine names when it has a tokenizer (``warmroute.local_tokenizer`` proves that).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from msgspec import Struct

from sidecar.scrape import EngineError, EngineMetrics
from sidecar.subscriber import EventSource
from state.model import EngineKind

if TYPE_CHECKING:
    from sidecar.scrape import EngineClient, ModelCard
    from sidecar.sglang import SglangInfo

CONNECT_S: Final = 1.0
SHOWN_CHARS: Final = 80
TOKENIZER_FILE: Final = "tokenizer.json"


class EngineLook(Struct, frozen=True, kw_only=True):
    """What one look at an engine found. None: it does not tell.

    ``base_models`` are its models without adapters, at least one. ``sources`` is where each rank
    publishes, ``unreachable`` of these endpoints the ones that this host cannot connect to.
    ``root`` is a directory that the engine, on this host, has its model from.
    """

    kind: EngineKind
    base_models: tuple[str, ...]
    sources: Mapping[int, EventSource]
    unreachable: tuple[str, ...] = ()
    ranks: int = 1
    page_tokens: int | None = None
    capacity_tokens: int | None = None
    root: Path | None = None
    does_report_hits: bool | None = None
    does_cache: bool = True

    @property
    def can_follow(self) -> bool:
        """Whether there are events, all of which can be had."""
        return bool(self.sources) and not self.unreachable


def is_loopback(url: str) -> bool:
    """Tell whether ``url`` leads to this machine."""
    host = urlsplit(url).hostname or ""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def shown(name: str) -> str:
    """Return what an engine called something, fit for a line of a log."""
    kept = "".join(letter if letter.isprintable() else "?" for letter in name[:SHOWN_CHARS])
    return kept + ("..." if len(name) > SHOWN_CHARS else "")


async def look_at(client: EngineClient) -> EngineLook:
    """Return what the engine is; raises EngineError while it does not serve yet."""
    if not await client.is_healthy():
        message = "/health does not answer 200"
        raise EngineError(message)
    cards = [card for card in await client.models() if card.parent is None]
    if not cards:
        message = "/v1/models names no model yet"
        raise EngineError(message)
    try:
        metrics = await client.metrics()
    except EngineError:
        metrics = EngineMetrics()
    info = await client.sglang_info() if metrics.page_tokens is None else None
    try:
        sources = await client.sources_by_rank()
    except EngineError:
        sources = {}
    page_tokens = info.page_tokens if info is not None else metrics.page_tokens
    return EngineLook(
        kind=_kind_of(cards, metrics, info),
        base_models=tuple(card.id for card in cards),
        sources=sources,
        unreachable=await _unreachable(sources),
        ranks=max(1, len(sources), info.ranks if info is not None else 1),
        page_tokens=page_tokens,
        capacity_tokens=_capacity_of(metrics, info),
        root=root_of(cards, client),
        does_report_hits=info.does_report_hits if info is not None else None,
        does_cache=info is None or info.does_cache,
    )


def _kind_of(cards: list[ModelCard], metrics: EngineMetrics, info: SglangInfo | None) -> EngineKind:
    owner = cards[0].owned_by
    for kind in (EngineKind.WORKER, EngineKind.VLLM, EngineKind.SGLANG):
        if owner == kind.value:
            return kind
    if info is not None:
        return EngineKind.SGLANG
    return EngineKind.VLLM if metrics.page_tokens is not None else EngineKind.UNKNOWN


def _capacity_of(metrics: EngineMetrics, info: SglangInfo | None) -> int | None:
    if info is not None:
        return info.capacity_tokens
    if metrics.page_tokens is None or metrics.capacity_pages is None:
        return None
    return metrics.page_tokens * metrics.capacity_pages


async def _unreachable(sources: Mapping[int, EventSource]) -> tuple[str, ...]:
    """Return the event endpoints that nothing listens on, as far as this host can see."""
    endpoints = sorted({source.events for source in sources.values()})
    found = await asyncio.gather(*map(_can_connect, endpoints))
    return tuple(
        endpoint for endpoint, is_there in zip(endpoints, found, strict=True) if not is_there
    )


async def _can_connect(endpoint: str) -> bool:
    """Return whether ``endpoint`` takes a connection; ``ipc://`` is a socket on this host."""
    try:
        async with asyncio.timeout(CONNECT_S):
            if endpoint.startswith("ipc://"):
                opened = asyncio.open_unix_connection(endpoint.removeprefix("ipc://"))
            else:
                host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
                opened = asyncio.open_connection(host.strip("[]"), int(port))
            _, writer = await opened
    except (OSError, TimeoutError, ValueError):
        return False
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return True


def root_of(cards: list[ModelCard], client: EngineClient) -> Path | None:
    """Return the directory of the served model, where the engine runs on this host and tells it."""
    if not is_loopback(client.endpoint):
        return None
    for card in cards:
        path = Path(card.root) if card.root else None
        with contextlib.suppress(OSError, ValueError):  # what another user may not see, or no path
            if path is not None and path.is_absolute() and (path / TOKENIZER_FILE).is_file():
                return path
    return None
