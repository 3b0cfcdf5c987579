"""What a decision was made on, packed while an answer goes on for long.

Views and candidates are one each for every replica of the fleet: as objects they take some 450
bytes a replica, packed some 180. Nobody looks at them before the request has ended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec import structs

from policies.model import Candidate, ReplicaView

if TYPE_CHECKING:
    from policies.model import Decision
    from router.chooser import Choice


class PackedLook:
    """The views of a choice and the candidates of its decision; names of replicas stay shared."""

    __slots__ = ("_rows", "_scored", "_viewed")

    def __init__(self, views: tuple[ReplicaView, ...], decision: Decision) -> None:
        candidates = decision.candidates
        self._viewed = tuple([view.replica for view in views])
        scored = tuple([candidate.replica for candidate in candidates])
        self._scored = self._viewed if scored == self._viewed else scored
        rows = [structs.astuple(one)[1:] for one in (*views, *candidates)]
        self._rows = msgspec.msgpack.encode(rows)

    @property
    def packed_bytes(self) -> int:
        """What it takes, besides two names of each replica."""
        return len(self._rows)

    def unpacked(self) -> tuple[tuple[ReplicaView, ...], tuple[Candidate, ...]]:
        """Return both as they were."""
        rows, count = msgspec.msgpack.decode(self._rows), len(self._viewed)
        views = zip(self._viewed, rows[:count], strict=True)
        candidates = zip(self._scored, rows[count:], strict=True)
        return (
            tuple([ReplicaView(replica, *row) for replica, row in views]),
            tuple([Candidate(replica, *row) for replica, row in candidates]),
        )


def pack(choice: Choice) -> None:
    """Let go of what ``unpack`` makes again."""
    if choice.packed is None:
        choice.packed = PackedLook(choice.views, choice.decision)
        choice.views = ()
        choice.decision = structs.replace(choice.decision, candidates=())


def unpack(choice: Choice) -> None:
    """Make a choice what it was before ``pack``; any other stays as it is."""
    packed, choice.packed = choice.packed, None
    if packed is not None:
        choice.views, candidates = packed.unpacked()
        choice.decision = structs.replace(choice.decision, candidates=candidates)
