"""The order of event batches as a pure state machine: what is next, missing, repeated, or new.

A publisher counts its batches from 0, one by one, for as long as its process lives. Live batches
of one life only ever go up; so one that does not is the first that we see of another life.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Sequence

SEQUENCE_BYTES = 8
END_SEQUENCE = 2**64 - 1
_FRAMES_WITH_TOPIC = 3


class Batch(Struct, frozen=True):
    """One numbered payload."""

    sequence: int
    payload: bytes


class Step(enum.Enum):
    """What a live batch is."""

    NEXT = "next"
    REPEATED = "repeated"
    GAP = "gap"
    RESTARTED = "restarted"


def parse_frames(frames: Sequence[bytes]) -> Batch | None:
    """Return the batch of a message, live or replayed, with or without topic; None if it is none.

    The end of a replay is a batch with ``END_SEQUENCE``.
    """
    rest = list(frames)
    if len(rest) > _FRAMES_WITH_TOPIC and not rest[0]:
        rest = rest[1:]
    if len(rest) == _FRAMES_WITH_TOPIC:
        rest = rest[1:]  # a topic, or the empty delimiter of a reply without topic
    match rest:
        case [sequence, payload] if len(sequence) == SEQUENCE_BYTES:
            return Batch(int.from_bytes(sequence, "big"), payload)
    return None


class SequenceFence:
    """Follows one publisher life after another; None means that nothing was seen of this one."""

    def __init__(self) -> None:
        self.last_applied: Batch | None = None
        self._last_live_sequence: int | None = None

    @property
    def expected_sequence(self) -> int | None:
        """The batch that comes next, once one was applied."""
        return None if self.last_applied is None else self.last_applied.sequence + 1

    def classify(self, batch: Batch) -> Step:
        """Return what a live ``batch`` is, and note that it was seen."""
        last_live_sequence = self._last_live_sequence
        self._last_live_sequence = batch.sequence
        if last_live_sequence is not None and batch.sequence <= last_live_sequence:
            return Step.RESTARTED
        expected = self.expected_sequence
        if expected is None or batch.sequence == expected:
            return Step.NEXT
        return Step.REPEATED if batch.sequence < expected else Step.GAP

    def applied(self, batch: Batch) -> None:
        """Note that ``batch`` was handed on."""
        self.last_applied = batch

    def is_same_life(self, replayed: Batch) -> bool:
        """Tell whether a replayed batch is the one that was applied last (payloads carry time)."""
        return replayed == self.last_applied

    def begin(self) -> None:
        """Start over: everything known belongs to another life, or is lost."""
        self.last_applied = None
        self._last_live_sequence = None

    def reconnected(self) -> None:
        """Live batches may repeat what a replay already brought."""
        self._last_live_sequence = None
