"""What an engine says of itself, as far as it matters for hits."""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import TYPE_CHECKING, Final

from sidecar.facts import identify
from sidecar.scrape import EngineError, parse_metrics
from state.model import EngineKind
from warmroute.doctor_case import EngineReport

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sidecar.scrape import EngineClient
    from sidecar.subscriber import EventSource

GREETING_S: Final = 1.0
_GREETING_BYTES: Final = 10
_GREETING_FIRST: Final = 0xFF
_GREETING_LAST: Final = 0x7F
_QUERIES: Final = ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total")
_HITS: Final = ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total")
_PREEMPTIONS: Final = ("vllm:num_preemptions_total",)
_CACHING: Final = re.compile(r'enable_prefix_caching="(True|False)"')


async def examine_engine(client: EngineClient) -> EngineReport:
    """Return what the engine answers; raises EngineError when it serves no model."""
    await client.get("/health")
    cards = await client.models()
    kind, version = await identify(client)
    try:
        text = (await client.get("/metrics")).decode("utf-8", "replace")
    except EngineError:
        text = ""
    info = await client.sglang_info() if kind is EngineKind.SGLANG else None
    sources = await _sources(client)
    caching = _CACHING.search(text)
    is_caching = None if caching is None else caching[1] == "True"
    metrics = parse_metrics(text)
    return EngineReport(
        url=client.endpoint,
        kind=kind,
        version=version,
        models=tuple(card.id for card in cards),
        metrics=metrics,
        sources=sources,
        deaf=await deaf_endpoints(source.events for source in sources or ()),
        is_caching=info.does_cache if info is not None else is_caching,
        does_report_hits=info.does_report_hits if info is not None else None,
        cache_queries=_sum(text, _QUERIES),
        cache_hits=_sum(text, _HITS),
        preemptions=_sum(text, _PREEMPTIONS),
    )


async def _sources(client: EngineClient) -> tuple[EventSource, ...] | None:
    try:
        return tuple((await client.sources_by_rank()).values())
    except EngineError:
        return None


def _sum(text: str, names: Iterable[str]) -> int | None:
    """Return the sum of the first name's samples over all labels; None where there are none."""
    for name in names:
        found = re.findall(rf"^{re.escape(name)}(?:\{{[^\n]*\}})? (\S+)$", text, re.MULTILINE)
        with contextlib.suppress(ValueError, OverflowError):
            if found:
                return int(sum(float(value) for value in found))
    return None


async def deaf_endpoints(endpoints: Iterable[str]) -> tuple[str, ...]:
    """Return the endpoints where nothing listens, or something that does not speak ZMTP.

    One that takes long to answer is no such endpoint: its host may be busy.
    """
    listed = sorted(set(endpoints))
    greeted = await asyncio.gather(*map(_is_greeted, listed))
    return tuple(name for name, is_there in zip(listed, greeted, strict=True) if not is_there)


async def _is_greeted(endpoint: str) -> bool:
    """Return whether a ZMTP greeting comes (RFC 23: 10 bytes, of which the ends are fixed)."""
    writer = None
    try:
        async with asyncio.timeout(GREETING_S):
            if endpoint.startswith("ipc://"):
                opened = asyncio.open_unix_connection(endpoint.removeprefix("ipc://"))
            else:
                host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
                opened = asyncio.open_connection(host.strip("[]"), int(port))
            reader, writer = await opened
            greeting = await reader.readexactly(_GREETING_BYTES)
    except TimeoutError:
        return True
    except (OSError, ValueError, EOFError):
        return False
    finally:
        if writer is not None:
            writer.close()
    return greeting[0] == _GREETING_FIRST and greeting[-1] == _GREETING_LAST
