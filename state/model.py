"""The values that describe a fleet: replicas, their load, what they hold, what is in flight.

Everything here is a frozen value or a NewType; nothing does I/O. Unknown is None, never 0.
"""

from __future__ import annotations

import enum
from typing import Annotated, Final, NamedTuple, NewType

from msgspec import Meta, Struct

ReplicaId = NewType("ReplicaId", str)
"""A replica's stable name; it survives restarts. Characters: see ``NAME_PATTERN``."""

RouterId = NewType("RouterId", str)
"""One router process; fresh at each start."""

Generation = NewType("Generation", str)
"""One life of a replica's cache. Opaque: compared for equality only, never ordered."""

BlockId = NewType("BlockId", bytes)
"""A prefix block: 16 bytes, the hash of its parent and its own tokens."""

NamespaceId = NewType("NamespaceId", str)
"""16 hex digits: digest of everything besides tokens that makes KV shareable."""

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}$"
"""What a replica or router may be called: it ends up in keys, logs and metric labels."""


UNIX_SCHEME: Final = "unix:"
"""Before the path of a socket that an engine or a router listens at."""


def address_name(host: str, port: int) -> str:
    """Return what a replica at ``host:port`` is called by default; ``::1`` is spelled ``0::1``."""
    return f"{'0' if host.startswith(':') else ''}{host}:{port}".replace("%", "@")


MAX_RANKS: Final = 1_024
"""Data-parallel ranks behind one address."""


class Tier(enum.StrEnum):
    """Where a replica keeps a block. Only GPU blocks are usable without a fetch."""

    GPU = "gpu"
    HOST = "host"
    DISK = "disk"


class Rung(enum.StrEnum):
    """How good the router's knowledge is; each rung below LIVE gives up something.

    LOCAL: what this router sent where lately, and by load where that says nothing.
    """

    LIVE = "live"
    STALE = "stale"
    LOCAL = "local"


class Fence(enum.StrEnum):
    """What the state backend answers to a heartbeat."""

    HELD = "held"
    """The registry shows this generation: it lives on."""
    UNKNOWN = "unknown"
    """The registry does not know the replica (it was flushed or expired): register again."""
    FENCED = "fenced"
    """Another sidecar registered this replica: stop."""


class Adapter(Struct, frozen=True):
    """An adapter (LoRA) that a replica has loaded. ``key`` is its ``ModelIdentity.adapter``."""

    name: Annotated[str, Meta(min_length=1, max_length=512)]
    key: Annotated[str, Meta(min_length=1, max_length=544)]


MAX_ADAPTERS: Final = 1_024
"""Adapters of one replica that routers are told of."""


class ModelIdentity(Struct, frozen=True, kw_only=True):
    """What must be equal, besides tokens, for one replica's KV to serve another prompt.

    ``tokenizer`` is a digest of tokenizer and chat template when the sidecar was told them, else
    empty. ``scope`` separates tenants and cache salts. ``block_tokens`` is the index granularity.
    """

    model: str
    weights_revision: str = ""
    tokenizer: str = ""
    adapter: str = ""
    kv_parameters: str = ""
    scope: str = ""
    block_tokens: int = 64


class ReplicaRecord(Struct, frozen=True, kw_only=True):
    """A replica's entry in the registry, written by its sidecar.

    ``endpoint`` is ``http[s]://host:port`` alone. ``sidecar`` is the writing process's own
    id. ``capacity_pages`` is the size of the KV pool, None where the engine does not tell.
    ``has_events``: the engine publishes what it holds. ``can_fetch``: it takes KV pages of a prefix
    from another engine that says so, and gives them. ``salts_tails``: it keeps what follows a
    public prefix apart by its salt (``state.public``). ``rank``: what requests have to name to be
    computed by this one of the engine's data-parallel ranks, None where it is the whole engine.
    ``adapters`` of the model are served by their own names. ``cache_life`` is the same in several
    generations where only the store lost what was announced, empty where that is not known.
    """

    replica: ReplicaId
    endpoint: str
    generation: Generation
    identity: ModelIdentity
    page_tokens: int
    sidecar: str
    capacity_pages: int | None = None
    has_events: bool = True
    is_draining: bool = False
    can_fetch: bool = False
    salts_tails: bool = False
    rank: Annotated[int, Meta(ge=0, lt=MAX_RANKS)] | None = None
    adapters: Annotated[tuple[Adapter, ...], Meta(max_length=MAX_ADAPTERS)] = ()
    cache_life: Annotated[str, Meta(max_length=64)] = ""


Tally = Annotated[int, Meta(ge=0, le=2**53)]


class ReplicaLoad(Struct, frozen=True, kw_only=True):
    """What an engine reports of itself; None where it does not report."""

    running: Tally | None = None
    queued: Tally | None = None
    kv_used_fraction: Annotated[float, Meta(ge=0)] | None = None


class EngineKind(enum.StrEnum):
    """Which program an engine is, as far as its own answers tell."""

    VLLM = "vllm"
    SGLANG = "sglang"
    WORKER = "warmroute"
    UNKNOWN = "unknown"


Word = Annotated[str, Meta(max_length=128, pattern=r"^[ -~]*$")]
"""A name that an engine gave: printable, because it is shown in terminals."""
Words = Annotated[tuple[Word, ...], Meta(max_length=16)]
Count = Annotated[int, Meta(ge=0)]
Numbers = Annotated[tuple[Count, ...], Meta(max_length=64)]


class EventCounts(Struct, frozen=True, kw_only=True):
    """What a sidecar counted of its engine's events since the sidecar began.

    ``last_sequence`` is that of the newest batch, None before the first. ``stored_pages`` and
    ``removed_pages`` are copies of pages that came and went in GPU memory; ``returned_pages`` came
    once more after they were evicted; ``held_pages`` are there now. ``plain_pages`` and
    ``salted_pages`` are known pages without and with a cache salt. ``generations`` counts how often
    all that was known became void.
    """

    last_sequence: Count | None = None
    batches: Count = 0
    gaps: Count = 0
    missed_batches: Count = 0
    dropped_batches: Count = 0
    malformed_events: Count = 0
    unknown_events: Count = 0
    stored_pages: Count = 0
    removed_pages: Count = 0
    returned_pages: Count = 0
    held_pages: Count = 0
    plain_pages: Count = 0
    salted_pages: Count = 0
    generations: Count = 0


class ReplicaFacts(Struct, frozen=True, kw_only=True):
    """What a sidecar detected of its engine, for people to read: no decision depends on it.

    ``events`` is the endpoint that is followed, None where the engine publishes none. ``encodings``
    are ``array`` and ``map``; ``hash_kinds`` are ``int``, ``signed int`` and ``bytes of N``;
    ``media`` are the engine's own names of tiers, ``unknown_media`` those that get no credit;
    ``ranks`` are data-parallel ranks and ``groups`` KV groups that events named, of which
    ``followed_group`` is indexed. ``is_silent``: the engine works and was never heard.
    ``has_unfit_pages``: its pages do not fit the blocks. ``key_check`` tells whether two processes
    derive the same ids (``state.facts.key_check``). ``reason`` says why the generation began.
    """

    engine: EngineKind = EngineKind.UNKNOWN
    engine_version: Word | None = None
    events: Word | None = None
    has_replay: bool = False
    encodings: Words = ()
    hash_kinds: Words = ()
    media: Words = ()
    unknown_media: Words = ()
    ranks: Numbers = ()
    groups: Numbers = ()
    followed_group: Count | None = None
    page_tokens: Count | None = None
    block_tokens: Count | None = None
    capacity_pages: Count | None = None
    is_engine_up: bool = False
    is_silent: bool = False
    has_unfit_pages: bool = False
    key_check: Word = ""
    generation: Generation = Generation("")
    reason: Word = ""
    counts: EventCounts = EventCounts()


class ReplicaState(Struct, frozen=True, kw_only=True):
    """A registered replica as a reader sees it: its record and its freshest load, if any."""

    record: ReplicaRecord
    load: ReplicaLoad | None = None


class ChangeBatch(Struct, frozen=True, kw_only=True):
    """Residency changes of one replica, in the order: clear, then removed, then stored.

    ``sequence`` counts the batches of one generation from 1. A block never occurs in both lists.
    """

    replica: ReplicaId
    generation: Generation
    namespace: NamespaceId
    sequence: int
    tier: Tier = Tier.GPU
    stored: tuple[BlockId, ...] = ()
    removed: tuple[BlockId, ...] = ()
    is_clear: bool = False
    """All blocks of this generation, every namespace and tier, are gone first."""


TIP_BYTES: Final = 8
"""So much of a block's id tells it from the others that are computed at the same time."""


class Tip(NamedTuple):
    """Where a chain ends: its blocks, and the first ``TIP_BYTES`` of the last one's id."""

    blocks: int
    mark: bytes


class LeaseTotals(Struct, frozen=True, kw_only=True):
    """What one router has in flight on one replica.

    ``inflight`` counts requests whose stream has not ended; ``uncached_tokens`` sums the prompt
    tokens still to be prefilled, over the ``prefilling`` requests without a first byte;
    ``backlog_ms`` is the time that takes at speed 1. ``tips`` are the ends of their chains, of the
    newest ones: what the replica is about to hold.
    """

    inflight: int = 0
    uncached_tokens: int = 0
    prefilling: int = 0
    backlog_ms: float = 0.0
    tips: tuple[Tip, ...] = ()


class ReplicaWork(Struct, frozen=True, gc=False):
    """The work of one router's leases on a replica; what each is, see ``policies.model``."""

    inflight: int = 0
    recent_assignments: float = 0.0
    prefilling: int = 0
    backlog_tokens: int = 0
    backlog_ms: float = 0.0
    prefill_load: float = 0.0
    hold_s: float | None = None


NO_WORK: Final = ReplicaWork()


class Overlap(Struct, frozen=True, gc=False):
    """The leading resident run of one chain on one replica, in blocks.

    ``gpu_blocks`` is the run in GPU memory. ``any_tier_blocks`` >= ``gpu_blocks`` is the run when
    host and disk copies count too.
    """

    gpu_blocks: int = 0
    any_tier_blocks: int = 0
