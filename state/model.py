"""The values that describe a fleet: replicas, their load, what they hold, what is in flight.

Everything here is a frozen value or a NewType; nothing does I/O. Unknown is None, never 0.
"""

from __future__ import annotations

import enum
from typing import Final, NamedTuple, NewType

from msgspec import Struct

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

    ``endpoint`` is ``http://host:port`` without a path. ``sidecar`` is the writing process's own
    id. ``capacity_pages`` is the size of the KV pool, None where the engine does not tell.
    ``has_events``: the engine publishes what it holds. ``can_fetch``: it takes KV pages of a prefix
    from another engine that says so, and gives them.
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


class ReplicaLoad(Struct, frozen=True, kw_only=True):
    """What an engine reports of itself; None where it does not report."""

    running: int | None = None
    queued: int | None = None
    kv_used_fraction: float | None = None


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


class ReplicaWork(Struct, frozen=True, kw_only=True):
    """The work of one router's leases on a replica; what each is, see ``policies.model``."""

    inflight: int = 0
    recent_assignments: float = 0.0
    prefilling: int = 0
    backlog_tokens: int = 0
    backlog_ms: float = 0.0
    prefill_load: float = 0.0
    hold_s: float | None = None


NO_WORK: Final = ReplicaWork()


class Overlap(Struct, frozen=True, kw_only=True):
    """The leading resident run of one chain on one replica, in blocks.

    ``gpu_blocks`` is the run in GPU memory. ``any_tier_blocks`` >= ``gpu_blocks`` is the run when
    host and disk copies count too.
    """

    gpu_blocks: int = 0
    any_tier_blocks: int = 0
