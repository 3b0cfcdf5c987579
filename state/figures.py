"""What an operator watches of a mirror."""

from __future__ import annotations

from msgspec import Struct, field

from state.fault import Fault
from state.model import Rung


class MirrorHolding(Struct, frozen=True, kw_only=True):
    """What a mirror knows of one replica's cache, and the process memory that takes."""

    blocks: int
    bytes_estimate: int


class MirrorFigures(Struct, frozen=True, kw_only=True):
    """Counts since the start, and the index's estimated process memory.

    ``evicted_blocks`` went, counted once per holder, to keep the index within its bound.
    """

    rungs_entered: dict[Rung, int]
    snapshots: int
    evicted_blocks: int
    index_bytes: int
    faults: dict[Fault, int] = field(default_factory=dict)
