"""What the entries of a change stream do to a mirror's residency, one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec.structs import replace

from state.mirror_sync import Follow, Follower
from state.model import Generation, ReplicaId
from state.residency import Residency
from state.schema import ENTRY_FIELD, Entry, EntryKind, change_entry, encode_entry, parts_of
from support.fleet_state import A, batch, block, blocks

if TYPE_CHECKING:
    from state.model import ChangeBatch

G1, G2 = Generation("g1"), Generation("g2")


class _Tail:
    """A follower of one replica whose snapshot was empty."""

    def __init__(self) -> None:
        self.residency = Residency()
        self.registered = 0
        self.gone: list[tuple[ReplicaId, Generation]] = []
        self.follower = Follower(
            self.residency, self._on_registered, lambda *gone: self.gone.append(gone)
        )
        self.follower.expect({A: G1})
        [self.follow] = self.follower.unsynced()
        self.synced()

    def _on_registered(self, replica: ReplicaId) -> None:
        assert replica == A
        self.registered += 1

    def synced(self) -> Follow:
        self.follower._start_at(self.follow, [])
        return self.follow

    async def take(self, *entries: Entry) -> None:
        rows = [(b"1-%d" % number, _fields(entry)) for number, entry in enumerate(entries)]
        await self.follower.apply(self.follow, rows)

    def run(self, *numbers: int) -> int:
        overlap = self.residency.overlap(blocks(*numbers)).get(A)
        return overlap.gpu_blocks if overlap else 0


def _fields(entry: Entry) -> list[bytes]:
    return [ENTRY_FIELD, encode_entry(entry)]


def _entries(change: ChangeBatch) -> list[Entry]:
    return [change_entry(change, part) for part in parts_of(change)]


def _change(sequence: int, *numbers: int, generation: str = "g1") -> Entry:
    return _entries(batch(sequence, stored=blocks(*numbers), generation=generation))[0]


async def test_a_new_generation_voids_the_old_one_at_once() -> None:
    """R-18: before any poll of the registry has seen it."""
    tail = _Tail()
    await tail.take(_change(1, 1, 2), Entry(kind=EntryKind.REGISTERED, generation=G2))
    assert (tail.run(1, 2), tail.registered) == (0, 1)
    await tail.take(_change(1, 1, generation="g2"), _change(2, 2))
    assert (tail.run(1, 2), tail.follow.is_synced) == (1, True)


async def test_entries_of_a_generation_that_is_not_followed_have_no_effect() -> None:
    tail = _Tail()
    clear = replace(_change(9, generation="g0"), is_clear=True)
    goodbye = Entry(kind=EntryKind.DEREGISTERED, generation=Generation("g0"))
    await tail.take(_change(1, 1), clear, goodbye, _change(7, 2, generation="g0"))
    assert (tail.run(1, 2), tail.gone, tail.follow.is_synced) == (1, [], True)


async def test_the_same_generation_registering_again_keeps_what_it_holds() -> None:
    tail = _Tail()
    await tail.take(_change(1, 1), Entry(kind=EntryKind.REGISTERED, generation=G1), _change(2, 2))
    assert (tail.run(1, 2), tail.registered) == (2, 0)


async def test_a_deregistered_replica_is_gone_at_once() -> None:
    tail = _Tail()
    await tail.take(_change(1, 1), Entry(kind=EntryKind.DEREGISTERED, generation=G1))
    assert (tail.run(1), tail.gone) == (0, [(A, G1)])
    assert not tail.follower.has_reached(A, G1, b"0-0")


@pytest.mark.parametrize("sequence", [3, 9])
async def test_a_gap_asks_for_a_snapshot_and_applies_nothing_beyond(sequence: int) -> None:
    tail = _Tail()
    await tail.take(_change(1, 1), _change(sequence, 2))
    assert (tail.run(1, 2), tail.follow.is_synced) == (1, False)
    assert tail.follow.position == b"1-0"


async def test_nothing_but_a_beginning_follows_an_unknown_place() -> None:
    tail = _Tail()
    await tail.take(_change(2, 2))
    assert not tail.follow.is_synced
    tail.synced()
    await tail.take(replace(_change(8, 1), is_clear=True))
    assert (tail.run(1), tail.follow.is_synced) == (1, True)


async def test_a_batch_that_is_stored_again_is_no_gap() -> None:
    many = batch(2, stored=tuple(map(block, range(10, 9010))))
    parts = _entries(many)
    assert len(parts) == 3
    tail = _Tail()
    await tail.take(_change(1, 1), *parts[:2], *parts, _change(3, 3))
    assert tail.follow.is_synced
    assert tail.residency.resident(A) == 9002


@pytest.mark.parametrize("kept", [[1], [0, 2], [0, 1]])
async def test_a_missing_part_is_a_gap(kept: list[int]) -> None:
    parts = _entries(batch(2, stored=tuple(map(block, range(10, 9010)))))
    tail = _Tail()
    await tail.take(_change(1, 1), *[parts[number] for number in kept], _change(3, 3))
    assert not tail.follow.is_synced


def test_parts_of_a_batch_clear_once_and_remove_before_they_store() -> None:
    change = batch(
        1,
        stored=tuple(map(block, range(6000, 11_000))),
        removed=tuple(map(block, range(6000))),
        is_clear=True,
    )
    parts = list(parts_of(change))
    assert [part.is_clear for part in parts] == [True, False, False]
    assert sum((part.removed for part in parts), ()) == change.removed
    assert sum((part.stored for part in parts), ()) == change.stored
    assert [(len(part.removed), len(part.stored)) for part in parts] == [
        (4096, 0),
        (1904, 2192),
        (0, 2808),
    ]
