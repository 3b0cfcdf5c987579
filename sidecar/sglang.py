"""What SGLang tells of itself: its descriptor (``/server_info``) and its load (``/v1/loads``).

SGLang has no ``/kv_event_sources``. Its descriptor has a ``kv_events`` block (host, base port,
page, ranks, in the newest the replay's port); older versions only the text of
``--kv-events-config``. The publisher of rank r listens on the base port + r. Everything here is
untrusted: what is not as expected is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct

from sidecar.subscriber import EventSource
from state.model import MAX_RANKS, ReplicaLoad

if TYPE_CHECKING:
    from collections.abc import Callable

INFO_PATHS: Final = ("/server_info", "/get_server_info")
"""The newer name first."""
LOAD_PATHS: Final = ("/v1/loads?include=core", "/get_load")
MAX_PORT: Final = 65_535
_MARKS: Final = ("internal_states", "scheduler_info", "kv_events", "max_total_num_tokens")
"""At least one of them is in the descriptor of every version, and in no other engine's."""
_ZMQ: Final = "zmq"


class SglangInfo(Struct, frozen=True, kw_only=True):
    """An SGLang server's description of itself; None where it does not tell.

    ``sources`` is where each data-parallel rank publishes, by rank: empty when events are off, or
    go where no sidecar can follow. ``does_report_hits``: answers tell ``cached_tokens``.
    """

    version: str | None = None
    page_tokens: int | None = None
    capacity_tokens: int | None = None
    ranks: int = 1
    sources: Mapping[int, EventSource] = {}
    does_cache: bool = True
    does_report_hits: bool | None = None

    @property
    def capacity_pages(self) -> int | None:
        """The pages of one rank's pool."""
        if self.capacity_tokens is None or self.page_tokens is None:
            return None
        return self.capacity_tokens // self.page_tokens or None


def parse_info(body: bytes, reachable: Callable[[str], str | None]) -> SglangInfo | None:
    """Return what a descriptor says; None when it is not SGLang's.

    ``reachable`` turns an endpoint that was bound into one to dial, or None.
    """
    raw = _object(body)
    if raw is None or not any(mark in raw for mark in _MARKS):
        return None
    told = raw.get("kv_events")
    block = told if isinstance(told, dict) else {}
    config = _config_of(raw)
    ranks = min(_positive(block, "dp_size") or _positive(raw, "dp_size") or 1, MAX_RANKS)
    version = raw.get("version")
    does_report = raw.get("enable_cache_report")
    return SglangInfo(
        version=version if isinstance(version, str) else None,
        page_tokens=_positive(block, "block_size") or _positive(raw, "page_size"),
        capacity_tokens=_positive(raw, "max_total_num_tokens"),
        ranks=ranks,
        sources=_sources(block, config, ranks, reachable),
        does_cache=raw.get("disable_radix_cache") is not True,
        does_report_hits=does_report if isinstance(does_report, bool) else None,
    )


def parse_loads(body: bytes) -> ReplicaLoad | None:
    """Return the load in an answer of ``/v1/loads`` or ``/get_load``, all ranks together.

    The older path counts waiting requests among all (``num_reqs``).
    """
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    loads = raw.get("loads") if isinstance(raw, dict) else raw
    if not isinstance(loads, list) or not loads:
        return None
    running = queued = 0
    used: list[float] = []
    for load in loads:
        waiting = _count(load, "num_waiting_reqs")
        ours = _count(load, "num_running_reqs")
        both = _count(load, "num_reqs")
        if ours is None and both is not None and waiting is not None:
            ours = max(0, both - waiting)
        if ours is None or waiting is None:
            return None
        running, queued = running + ours, queued + waiting
        usage = load.get("token_usage")
        if isinstance(usage, int | float) and 0 <= usage <= 1:
            used.append(float(usage))
    return ReplicaLoad(
        running=running,
        queued=queued,
        kv_used_fraction=sum(used) / len(used) if used else None,
    )


def _config_of(raw: Mapping[str, object]) -> Mapping[str, object]:
    """Return what ``--kv-events-config`` was given; nothing where it is off or no JSON object."""
    text = raw.get("kv_events_config")
    config = _object(text.encode("utf-8", "replace")) if isinstance(text, str) else None
    return config if config is not None and config.get("publisher") == _ZMQ else {}


def _sources(
    block: Mapping[str, object],
    config: Mapping[str, object],
    ranks: int,
    reachable: Callable[[str], str | None],
) -> dict[int, EventSource]:
    told = config.get("endpoint", "tcp://*:5557" if config else None)
    base = _base_of(block, "endpoint_port_base") or _split(told)
    replay = _base_of(block, "replay_endpoint_port_base") or _split(config.get("replay_endpoint"))
    sources: dict[int, EventSource] = {}
    for rank in range(ranks):
        events = _of_rank(base, rank, reachable)
        if events is not None:
            sources[rank] = EventSource(events=events, replay=_of_rank(replay, rank, reachable))
    return sources


def _base_of(block: Mapping[str, object], name: str) -> tuple[str, int] | None:
    """Return host and port of rank 0 from the block, where ``name`` is the port."""
    host, port = block.get("endpoint_host"), _positive(block, name)
    is_whole = isinstance(host, str) and host and port is not None and port <= MAX_PORT
    if not is_whole or block.get("publisher") != _ZMQ:
        return None
    host = str(host)
    return f"[{host}]" if ":" in host and not host.startswith("[") else host, int(port or 0)


def _split(endpoint: object) -> tuple[str, int] | None:
    """Return host and port of a TCP endpoint; None for all others."""
    if not isinstance(endpoint, str) or not endpoint.startswith("tcp://"):
        return None
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    is_port = port.isascii() and port.isdigit() and 0 < int(port) <= MAX_PORT
    return (host, int(port)) if host and is_port else None


def _of_rank(
    base: tuple[str, int] | None, rank: int, reachable: Callable[[str], str | None]
) -> str | None:
    if base is None or base[1] + rank > MAX_PORT:
        return None
    return reachable(f"tcp://{base[0]}:{base[1] + rank}")


def _object(body: bytes) -> dict[str, object] | None:
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return raw if isinstance(raw, dict) else None


def _positive(fields: Mapping[str, object], name: str) -> int | None:
    value = fields.get(name)
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number and isinstance(value, int) and value > 0 else None


def _count(fields: object, name: str) -> int | None:
    value = fields.get(name) if isinstance(fields, dict) else None
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number and isinstance(value, int) and value >= 0 else None
