"""Which missing records mean that a replica is gone, and which that the store has forgotten."""

from __future__ import annotations

import pytest
from msgspec import structs

from state.model import Generation, ReplicaLoad
from state.registry import Registry, Row
from state.schema import encode_load, encode_record
from support.fleet_state import A, B, record


def _row(generation: str = "g1", load: ReplicaLoad | None = None) -> Row:
    return encode_record(record(A, generation)), encode_load(load) if load else None


def _registry() -> Registry:
    registry = Registry(grace_s=30.0, load_ttl_s=3.0)
    registry.observe({A: _row(load=ReplicaLoad(running=1))}, now_s=0.0)
    return registry


def test_an_indexed_replica_without_a_record_is_gone() -> None:
    registry = _registry()
    registry.observe({A: (None, None)}, now_s=1.0)
    registry.observe({A: (None, None)}, now_s=1.25)
    assert registry.view() == {}


def test_a_store_that_is_emptied_while_it_is_read_empties_no_fleet() -> None:
    """C72, A85: the index was read before the flush, the records after it."""
    registry = _registry()
    registry.observe({A: (None, None)}, now_s=1.0)
    registry.observe({}, now_s=1.25)
    registry.observe({}, now_s=31.2)
    assert list(registry.view()) == [A]
    registry.observe({A: _row("g2")}, now_s=31.3)
    registry.observe({A: (None, None)}, now_s=31.4)
    assert list(registry.view()) == [A]


def test_a_replica_that_the_index_forgot_stays_for_the_grace_period() -> None:
    registry = _registry()
    registry.observe({}, now_s=1.0)
    registry.observe({}, now_s=30.9)
    assert list(registry.view()) == [A]
    registry.observe({}, now_s=31.0)
    assert registry.view() == {}


def test_after_an_outage_a_missing_record_is_no_evidence_until_one_was_written_since() -> None:
    """R-08: one that is read within its life after the outage may be of before it."""
    registry = _registry()
    registry.doubt_all(now_s=10.0)
    registry.observe({A: (None, None)}, now_s=10.0)
    registry.doubt_all(now_s=39.0)
    assert list(registry.view()) == [A]
    registry.observe({A: _row()}, now_s=39.0)
    registry.observe({A: (None, None)}, now_s=39.5)
    registry.observe({A: (None, None)}, now_s=43.9)
    assert list(registry.view()) == [A]
    registry.observe({A: _row()}, now_s=44.1)
    registry.observe({A: (None, None)}, now_s=44.5)
    registry.observe({A: (None, None)}, now_s=44.75)
    assert registry.view() == {}


def test_grace_is_counted_from_the_first_doubt() -> None:
    registry = _registry()
    registry.doubt_all(now_s=10.0)
    registry.doubt_all(now_s=35.0)
    registry.observe({A: (None, None)}, now_s=40.0)
    assert registry.view() == {}


def test_the_version_moves_with_records_and_not_with_loads() -> None:
    registry = _registry()
    version = registry.version
    registry.observe({A: _row(load=ReplicaLoad(running=2))}, now_s=1.0)
    assert registry.version == version
    registry.observe({A: _row("g2")}, now_s=2.0)
    assert registry.version == version + 1
    assert registry.generation(A) == "g2"


def test_only_the_present_generation_can_be_dropped() -> None:
    registry = _registry()
    registry.drop(A, Generation("g0"), now_s=1.0)
    assert list(registry.view()) == [A]
    registry.drop(A, Generation("g1"), now_s=1.0)
    assert registry.view() == {}


def test_a_load_becomes_unknown_while_the_store_is_away() -> None:
    registry = _registry()
    registry.expire_loads(now_s=2.9)
    assert registry.view()[A].load == ReplicaLoad(running=1)
    registry.expire_loads(now_s=3.0)
    assert registry.view()[A].load is None


def test_a_record_under_another_name_is_ignored() -> None:
    registry = Registry(grace_s=30.0, load_ttl_s=3.0)
    registry.observe({B: _row()}, now_s=0.0)
    assert (registry.view(), registry.malformed_values) == ({}, 1)


@pytest.mark.parametrize(("page_tokens", "block_tokens"), [(0, 64), (16, 0), (16, -64)])
def test_a_record_that_no_chain_can_be_cut_by_is_ignored(
    page_tokens: int, block_tokens: int
) -> None:
    """S-14: one replica's wrong record must not fail the requests of all."""
    sound = record(A, "g1")
    identity = structs.replace(sound.identity, block_tokens=block_tokens)
    bad = structs.replace(sound, page_tokens=page_tokens, identity=identity)
    registry = Registry(grace_s=30.0, load_ttl_s=3.0)
    registry.observe({A: (encode_record(bad), None)}, now_s=0.0)
    assert (registry.view(), registry.malformed_values) == ({}, 1)


def test_grace_begins_anew_while_the_store_takes_no_heartbeats() -> None:
    registry = _registry()
    for now_s in (10.0, 39.0, 68.0):
        registry.doubt_all(now_s, anew=True)
        registry.observe({A: (None, None)}, now_s)
    registry.observe({A: (None, None)}, now_s=97.9)
    assert list(registry.view()) == [A]
    registry.observe({A: (None, None)}, now_s=98.0)
    assert registry.view() == {}


def test_the_view_is_another_one_when_something_changed_and_else_the_same() -> None:
    """Whoever makes something of it makes it once."""
    registry = _registry()
    before = registry.view()
    registry.observe({A: _row(load=ReplicaLoad(running=1))}, now_s=1.0)
    assert registry.view() is before
    registry.observe({A: _row(load=ReplicaLoad(running=2))}, now_s=1.25)
    assert registry.view()[A].load == ReplicaLoad(running=2)
    registry.observe({A: _row()}, now_s=1.5)
    assert registry.view()[A].load is None
    registry.observe({A: _row(load=ReplicaLoad(running=2))}, now_s=1.75)
    assert registry.view()[A].load == ReplicaLoad(running=2)
    registry.expire_loads(now_s=4.75)
    assert registry.view()[A].load is None
    assert before[A].load == ReplicaLoad(running=1)
