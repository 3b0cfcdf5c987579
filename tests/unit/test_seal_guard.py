"""What a router takes of the store, of what time it has to be, and what it says of the rest."""

from __future__ import annotations

import logging
import tracemalloc
from dataclasses import dataclass, field

import pytest
from msgspec import structs

from state.model import ReplicaId, ReplicaLoad
from state.registry import Registry, Row
from state.schema import ReplicaKeys, encode_load, encode_record
from state.seal import MOST_BYTES, Fault, Kind, Seal
from state.seal_guard import SEAL_AGE_S, SealGuard
from state.stamp import Stamps
from support.fleet_state import A, B, record

SECRET = b"k" * 32
KEYS = ReplicaKeys(A)
VALUE = encode_record(record(A))


@dataclass
class Stand:
    """A guard that requires seals, and a writer, with clocks of their own."""

    now_s: float = 10_000.0
    writer_s: float = 10_000.0
    seal: Seal = field(init=False)
    guard: SealGuard = field(init=False)

    def __post_init__(self) -> None:
        self.seal = Seal(SECRET, lambda: self.writer_s)
        self.guard = SealGuard(Seal(SECRET, lambda: self.now_s), is_required=True)

    def sealed(self, value: bytes = VALUE) -> bytes:
        return self.seal.sealed(Kind.RECORD, KEYS.record, value)

    def takes(self, value: bytes) -> bool:
        return self.guard.open(Kind.RECORD, KEYS.record, value) is not None


@pytest.mark.parametrize("off_s", [-SEAL_AGE_S - 1, SEAL_AGE_S + 1])
def test_a_value_of_another_time_is_not_taken(off_s: float) -> None:
    """A record that was kept for later use, or one that is made for later use."""
    stand = Stand()
    stand.writer_s += off_s
    assert not stand.takes(stand.sealed())
    assert stand.guard.faults == {(Kind.RECORD, Fault.OLD): 1}


@pytest.mark.parametrize("off_s", [1 - SEAL_AGE_S, 0.0, SEAL_AGE_S - 1])
def test_clocks_may_be_minutes_apart(off_s: float) -> None:
    stand = Stand()
    stand.writer_s += off_s
    assert stand.takes(stand.sealed())


def test_what_was_before_the_newest_is_not_taken_again() -> None:
    """A replay within the time: of before a drain, or of the generation before."""
    stand = Stand()
    before = stand.sealed()
    stand.writer_s += 1.0
    newest = stand.sealed(encode_record(record(A, "g2")))
    assert stand.takes(before)
    assert stand.takes(newest)
    assert not stand.takes(before)
    assert stand.takes(newest)


def test_each_kind_of_fault_is_logged_once_and_counted_always(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stand = Stand()
    with caplog.at_level(logging.WARNING):
        for number in range(50):
            assert not stand.takes(encode_record(record(A, f"g{number}")))
        assert not stand.takes(Seal(b"x" * 32, lambda: 0.0).sealed(Kind.RECORD, KEYS.record, VALUE))
    assert stand.guard.faults == {(Kind.RECORD, Fault.UNSEALED): 50, (Kind.RECORD, Fault.WRONG): 1}
    lines = [one.getMessage() for one in caplog.records]
    assert len(lines) == 2
    assert all("(record)" in line and "ignored" in line for line in lines)
    assert KEYS.record not in "".join(lines)


def test_what_has_no_good_seal_is_taken_and_counted_until_seals_are_required() -> None:
    guard = SealGuard(Seal(SECRET, lambda: 1.0))
    old = Seal(SECRET, lambda: 99_999.0).sealed(Kind.RECORD, KEYS.record, VALUE)
    theirs = Seal(b"x" * 32, lambda: 1.0).sealed(Kind.RECORD, KEYS.record, VALUE)
    for value in (VALUE, old, theirs):
        assert guard.open(Kind.RECORD, KEYS.record, value) == VALUE
    assert set(guard.faults.values()) == {1}
    assert {one for _, one in guard.faults} == set(Fault)


def test_without_a_key_nothing_is_sealed_and_nothing_is_looked_at() -> None:
    guard = SealGuard(None, is_required=True)
    assert guard.sealed(Kind.RECORD, KEYS.record, VALUE) == VALUE
    assert guard.open(Kind.RECORD, KEYS.record, b"anything") == b"anything"
    assert guard.faults == {}
    assert not guard.is_required
    assert Stamps(None, lambda: 0.0).sealed(Kind.RECORD, KEYS.record, VALUE) == VALUE


def registry_of(stand: Stand) -> Registry:
    return Registry(grace_s=30.0, load_ttl_s=3.0, guard=stand.guard)


def row(stand: Stand, generation: str = "g1", load: ReplicaLoad | None = None) -> Row:
    sealed = stand.sealed(encode_record(record(A, generation)))
    if load is None:
        return sealed, None
    return sealed, stand.seal.sealed(Kind.LOAD, KEYS.load, encode_load(load))


def test_a_forged_record_leaves_the_one_before_in_force() -> None:
    """Of a known replica; of an unknown one it is nothing."""
    stand = Stand()
    registry = registry_of(stand)
    registry.observe({A: row(stand)}, now_s=0.0)
    view = registry.view()
    forged = encode_record(structs.replace(record(A, "g2"), endpoint="http://10.9.9.9:1"))
    rows: dict[object, Row] = {A: (forged, None), B: (encode_record(record(B)), None)}
    for now_s in (1.0, 2.0, 3.0):
        registry.observe(rows, now_s)  # type: ignore[arg-type]
        assert registry.view() is view
    assert stand.guard.faults == {(Kind.RECORD, Fault.UNSEALED): 2}


def test_values_that_are_too_large_to_be_read_are_neither_hashed_nor_kept() -> None:
    """A record of a gigabyte would take a second each time, and its memory for good."""
    stand = Stand()
    registry = registry_of(stand)
    tracemalloc.start()
    for number in range(3):
        huge = stand.sealed(b'{"a":"%b%d"}' % (b"x" * MOST_BYTES, number))
        opened = stand.seal.opened(Kind.RECORD, KEYS.record, huge)
        assert opened.fault is Fault.UNSEALED
        registry.observe({ReplicaId(f"{number}"): (huge, None)}, float(number))
        del huge, opened
    kept_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept_bytes < MOST_BYTES
    assert stand.guard.faults == {(Kind.RECORD, Fault.UNSEALED): 3}


def test_a_dead_replica_cannot_be_kept_alive_by_what_it_wrote_last() -> None:
    stand = Stand()
    registry = registry_of(stand)
    last = row(stand)
    registry.observe({A: last}, now_s=0.0)
    registry.observe({A: last}, now_s=SEAL_AGE_S)
    assert list(registry.view()) == [A]
    stand.now_s += SEAL_AGE_S + 1
    for extra_s in (1.0, 2.0, 3.0):
        registry.observe({A: last}, now_s=SEAL_AGE_S + extra_s)
    assert list(registry.view()) == []


def test_a_record_that_is_sealed_anew_is_the_same_record() -> None:
    """So nothing is worked out again in a large fleet because of seals."""
    stand = Stand()
    registry = registry_of(stand)
    registry.observe({A: row(stand, load=ReplicaLoad(running=1))}, now_s=0.0)
    view, version = registry.view(), registry.version
    for round_ in range(1, 20):
        stand.now_s = stand.writer_s = stand.now_s + 60.0
        again = row(stand, load=ReplicaLoad(running=1))
        registry.observe({A: again}, now_s=round_ * 60.0)
    registry.observe({A: again}, now_s=19 * 60.0 + 1)
    assert registry.version == version
    assert registry.view()[A].record is view[A].record
    assert list(registry.view()) == [A]


def test_a_forged_load_is_no_load_and_the_one_before_goes_by_its_own_time() -> None:
    stand = Stand()
    registry = registry_of(stand)
    good = row(stand, load=ReplicaLoad(running=7))
    registry.observe({A: good}, now_s=0.0)
    forged = (good[0], encode_load(ReplicaLoad(running=0)))
    registry.observe({A: forged}, now_s=1.0)
    assert registry.view()[A].load == ReplicaLoad(running=7)
    registry.observe({A: forged}, now_s=3.5)
    assert registry.view()[A].load is None


def test_a_sidecar_seals_anew_what_changed_and_what_is_a_minute_old() -> None:
    times = {"s": 0.0}
    stamps = Stamps(Seal(SECRET, lambda: 1_000.0 + times["s"]), lambda: times["s"])
    first = stamps.sealed(Kind.RECORD, KEYS.record, VALUE)
    times["s"] = 59.0
    assert stamps.sealed(Kind.RECORD, KEYS.record, VALUE) == first
    other = stamps.sealed(Kind.RECORD, KEYS.record, encode_record(record(A, "g2")))
    assert other != first
    times["s"] = 120.0
    again = stamps.sealed(Kind.RECORD, KEYS.record, encode_record(record(A, "g2")))
    assert again != other
    assert Seal(SECRET, lambda: 0.0).opened(Kind.RECORD, KEYS.record, again).fault is None
