"""The layout of the state in Redis: key names and the encoding of values. docs/state.md says why.

All keys of one replica share a hash tag, so that they live in one slot of a cluster; keys of the
whole fleet share another. Values that come back are untrusted: decoders return None for anything
that does not have exactly the expected shape.
"""

from __future__ import annotations

import enum
import re
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple
from urllib.parse import quote, unquote

import msgspec

from state.model import (
    NAME_PATTERN,
    TIP_BYTES,
    BlockId,
    Generation,
    LeaseTotals,
    NamespaceId,
    ReplicaId,
    ReplicaLoad,
    ReplicaRecord,
    Tier,
    Tip,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from state.model import ChangeBatch

KEY_PREFIX: Final = "wr:1"
REPLICA_INDEX: Final = f"{KEY_PREFIX}:{{fleet}}:replicas"
REPLICA_NEWS: Final = f"{KEY_PREFIX}:{{fleet}}:news"
ROUTER_INDEX: Final = f"{KEY_PREFIX}:{{fleet}}:routers"
LEASES: Final = f"{KEY_PREFIX}:{{fleet}}:leases"

INDEX_HORIZON_S: Final = 60.0
"""How long the index remembers a replica without a heartbeat."""
BLOCK_ID_BYTES: Final = 16
MAX_CHUNK_BLOCKS: Final = 4096
"""Ids per stream entry and per command: 64 KiB, a few milliseconds of the server."""
STREAM_CAP_ENTRIES: Final = 1024
MAX_VALUE_BYTES: Final = 1 << 20
STREAM_START: Final = b"0-0"
ENTRY_FIELD: Final = b"e"
VALUE_FIELD: Final = "value"
LOAD_FIELD: Final = "load"
"""Of a record: whether the last heartbeat brought a load."""
NO_LOAD: Final = b"0"
MALFORMED: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding a value of somebody else's may raise."""
_NAME = re.compile(NAME_PATTERN)
_TIERS: Final = frozenset(Tier)


class ReplicaKeys:
    """The keys of one replica."""

    __slots__ = ("_base", "changes", "facts", "generation", "load", "record", "sets")

    def __init__(self, replica: ReplicaId) -> None:
        self._base = f"{KEY_PREFIX}:{{{replica}}}:"
        self.record = f"{self._base}record"
        """HASH generation, sidecar, value, load; lives as long as the heartbeats."""
        self.generation = f"{self._base}generation"
        """STRING: the generation that registered last; outlives the record."""
        self.load = f"{self._base}load"
        """STRING."""
        self.facts = f"{self._base}facts"
        """STRING: what the sidecar detected of the engine."""
        self.changes = f"{self._base}changes"
        """STREAM, capped."""
        self.sets = f"{self._base}sets"
        """SET: suffixes of the residency keys that exist, of every generation."""

    def residency(self, suffix: str) -> str:
        """Return the key of the SET of block ids named by ``residency_suffix``."""
        return f"{self._base}blocks:{suffix}"

    def copy(self, suffix: str) -> str:
        """Return the key under which a residency SET is written afresh before it is swapped in."""
        return f"{self._base}copy:{suffix}"


class SuffixParts(NamedTuple):
    """What sets one residency key of a replica apart from its others."""

    generation: Generation
    namespace: NamespaceId
    tier: Tier


def residency_suffix(generation: Generation, namespace: NamespaceId, tier: Tier) -> str:
    """Return what sets one residency key of a replica apart from its others."""
    return f"{quote(generation, safe='')}:{namespace}:{tier}"


def suffix_tier(suffix: str, generation: Generation) -> Tier | None:
    """Return the tier of a residency suffix; None when it is not one of ``generation``."""
    parts = suffix_parts(suffix)
    return parts.tier if parts is not None and parts.generation == generation else None


def suffix_parts(suffix: str) -> SuffixParts | None:
    """Return what ``residency_suffix`` put together; None when it did not."""
    quoted, _, rest = suffix.partition(":")
    namespace, _, tier = rest.partition(":")
    generation = Generation(unquote(quoted))
    if not namespace or tier not in _TIERS or quote(generation, safe="") != quoted:
        return None
    return SuffixParts(generation, NamespaceId(namespace), Tier(tier))


def is_name(text: str) -> bool:
    """Return whether ``text`` may name a replica or a router."""
    return _NAME.fullmatch(text) is not None


class EntryKind(enum.StrEnum):
    """What an entry of a replica's change stream tells."""

    REGISTERED = "r"
    CHANGED = "c"
    DEREGISTERED = "d"
    PURGED = "p"
    """A router removed blocks of a scope that ended; no batch of the sidecar's."""


class Entry(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One entry of a change stream; a batch of many blocks is several *parts* in order."""

    kind: EntryKind
    generation: Generation
    namespace: NamespaceId = NamespaceId("")
    tier: Tier = Tier.GPU
    sequence: int = 0
    part: int = 0
    parts: int = 1
    is_clear: bool = False
    removed: bytes = b""
    stored: bytes = b""
    seal: bytes = b""
    """The last bytes of the value where there is one, see ``state.seal``."""


class ChangePart(msgspec.Struct, frozen=True, kw_only=True):
    """A portion of a batch that is stored atomically; ``is_clear`` comes first, then removed."""

    part: int
    parts: int
    is_clear: bool
    removed: tuple[BlockId, ...]
    stored: tuple[BlockId, ...]


def parts_of(batch: ChangeBatch) -> Iterator[ChangePart]:
    """Cut ``batch`` into parts of at most MAX_CHUNK_BLOCKS ids: its removals first."""
    blocks = batch.removed + batch.stored
    parts = max(1, -(-len(blocks) // MAX_CHUNK_BLOCKS))
    removals = len(batch.removed)
    for part in range(parts):
        begin = part * MAX_CHUNK_BLOCKS
        end = min(begin + MAX_CHUNK_BLOCKS, len(blocks))
        split = min(max(removals, begin), end)
        yield ChangePart(
            part=part,
            parts=parts,
            is_clear=batch.is_clear and part == 0,
            removed=blocks[begin:split],
            stored=blocks[split:end],
        )


def change_entry(batch: ChangeBatch, part: ChangePart, seal: bytes = b"") -> Entry:
    """Return the stream entry of one part of ``batch``, with room for a seal."""
    return Entry(
        kind=EntryKind.CHANGED,
        generation=batch.generation,
        namespace=batch.namespace,
        tier=batch.tier,
        sequence=batch.sequence,
        part=part.part,
        parts=part.parts,
        is_clear=part.is_clear,
        removed=b"".join(part.removed),
        stored=b"".join(part.stored),
        seal=seal,
    )


_entry_decoder = msgspec.msgpack.Decoder(Entry)


def encode_entry(entry: Entry) -> bytes:
    """Return the value of a stream entry's only field: few replies to parse per entry."""
    return msgspec.msgpack.encode(entry)


def decode_entry(fields: Sequence[bytes]) -> Entry | None:
    """Return the entry of a stream entry's name and value; None when it is malformed."""
    if len(fields) != 2 or fields[0] != ENTRY_FIELD or len(fields[1]) > MAX_VALUE_BYTES:  # noqa: PLR2004
        return None
    try:
        entry = _entry_decoder.decode(fields[1])
    except MALFORMED:
        return None
    is_whole = not (len(entry.removed) % BLOCK_ID_BYTES or len(entry.stored) % BLOCK_ID_BYTES)
    return entry if is_whole and 0 <= entry.part < entry.parts else None


def unpack_blocks(packed: bytes) -> list[BlockId]:
    """Return the ids that ``packed`` concatenates."""
    starts = range(0, len(packed), BLOCK_ID_BYTES)
    return [BlockId(packed[start : start + BLOCK_ID_BYTES]) for start in starts]


_json_encode = msgspec.json.encode
_record_decoder = msgspec.json.Decoder(ReplicaRecord)
_load_decoder = msgspec.json.Decoder(ReplicaLoad)


_TipRow = tuple[
    Annotated[int, msgspec.Meta(ge=1)],
    Annotated[bytes, msgspec.Meta(min_length=TIP_BYTES, max_length=TIP_BYTES)],
]


class _LeaseRow(msgspec.Struct, array_like=True):
    """``LeaseTotals`` on the wire; a router of an earlier version sends the first two only."""

    inflight: Annotated[int, msgspec.Meta(ge=0)]
    uncached_tokens: Annotated[int, msgspec.Meta(ge=0)]
    prefilling: Annotated[int, msgspec.Meta(ge=0)] = 0
    backlog_ms: Annotated[float, msgspec.Meta(ge=0, le=1e9)] = 0.0
    tips: Annotated[tuple[_TipRow, ...], msgspec.Meta(max_length=1_024)] = ()


_NOBODY: Final = ""
"""Whose row of leases is a seal: to routers of an earlier version it is of no replica."""
_leases_decoder = msgspec.msgpack.Decoder(dict[str, _LeaseRow])


def encode_record(record: ReplicaRecord) -> bytes:
    """Return the stored form of a record."""
    return _json_encode(record)


def decode_record(value: bytes, replica: ReplicaId) -> ReplicaRecord | None:
    """Return the record; None when it is malformed or not that of ``replica``."""
    try:
        record = _record_decoder.decode(value) if len(value) <= MAX_VALUE_BYTES else None
    except MALFORMED:
        return None
    if record is None or record.replica != replica:
        return None
    return record if min(record.page_tokens, record.identity.block_tokens) > 0 else None


def encode_load(load: ReplicaLoad) -> bytes:
    """Return the stored form of a load report."""
    return _json_encode(load)


def decode_load(value: bytes) -> ReplicaLoad | None:
    """Return the load report; None when it is malformed."""
    try:
        return _load_decoder.decode(value) if len(value) <= MAX_VALUE_BYTES else None
    except MALFORMED:
        return None


def encode_leases(totals: Mapping[ReplicaId, LeaseTotals], seal: bytes = b"") -> bytes:
    """Return the stored form of one router's leases, with room for a seal at its end."""
    rows: dict[str, tuple[object, ...]] = {
        replica: (
            total.inflight,
            total.uncached_tokens,
            total.prefilling,
            round(total.backlog_ms, 1),
            total.tips,
        )
        for replica, total in totals.items()
    }
    if seal:
        rows[_NOBODY] = (0, 0, 0, 0.0, (), seal)
    return msgspec.msgpack.encode(rows)


def decode_leases(value: bytes) -> dict[ReplicaId, LeaseTotals] | None:
    """Return one router's leases; None when they are malformed."""
    try:
        rows = _leases_decoder.decode(value) if len(value) <= MAX_VALUE_BYTES else None
    except MALFORMED:
        return None
    if rows is None:
        return None
    return {
        ReplicaId(replica): LeaseTotals(
            inflight=row.inflight,
            uncached_tokens=row.uncached_tokens,
            prefilling=row.prefilling,
            backlog_ms=row.backlog_ms,
            tips=tuple(Tip(*tip) for tip in row.tips),
        )
        for replica, row in rows.items()
        if replica != _NOBODY
    }
