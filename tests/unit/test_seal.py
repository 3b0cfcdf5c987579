"""What a seal binds together: the value, its place, its kind, its time and the key."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.canary_sums import no_sums, pack, unpack
from state.facts import decode_facts, encode_facts
from state.model import LeaseTotals, ReplicaFacts, ReplicaLoad
from state.schema import (
    ENTRY_FIELD,
    LEASES,
    ReplicaKeys,
    change_entry,
    decode_entry,
    decode_leases,
    decode_load,
    decode_record,
    encode_entry,
    encode_leases,
    encode_load,
    encode_record,
    parts_of,
)
from state.seal import NO_SEAL, SEAL_BYTES, Fault, Kind, Seal
from state.setting_book import SettingDocument, decoded, encoded
from state.setting_store import DOCUMENT_KEY
from support.fleet_state import A, B, batch, blocks, record

if TYPE_CHECKING:
    from collections.abc import Callable

SECRET = b"k" * 32
KEYS = ReplicaKeys(A)
CHANGE = batch(1, stored=blocks(1, 2), removed=blocks(3))
DOCUMENT = SettingDocument(
    version=3, settings={"a": 1}, author="ann", reason="test", unix_s=1.0, previous=2
)
VALUES = {
    Kind.RECORD: (KEYS.record, encode_record(record(A)), ""),
    Kind.LOAD: (KEYS.load, encode_load(ReplicaLoad(running=1)), ""),
    Kind.FACTS: (KEYS.facts, encode_facts(ReplicaFacts()), ""),
    Kind.CHANGE: (
        KEYS.changes,
        encode_entry(change_entry(CHANGE, next(parts_of(CHANGE)), NO_SEAL)),
        "",
    ),
    Kind.LEASES: (LEASES, encode_leases({A: LeaseTotals(inflight=2)}, NO_SEAL), "r1"),
    Kind.SETTINGS: (DOCUMENT_KEY, encoded(DOCUMENT).value, ""),
    Kind.CANARY: ("canary", pack(no_sums()), "r1"),
}


def seal(secret: bytes = SECRET, unix_s: float = 1_000.0) -> Seal:
    return Seal(secret, lambda: unix_s)


def fault(kind: Kind, key: str, value: bytes, field: str = "", by: Seal | None = None) -> object:
    return (by or seal()).opened(kind, key, value, field).fault


def decode_change(value: bytes) -> object:
    entry = decode_entry((ENTRY_FIELD, value))
    return entry and msgspec.structs.replace(entry, seal=b"")


DECODERS: dict[Kind, Callable[[bytes], object]] = {
    Kind.RECORD: lambda value: decode_record(value, A),
    Kind.LOAD: decode_load,
    Kind.FACTS: decode_facts,
    Kind.CHANGE: decode_change,
    Kind.LEASES: decode_leases,
    Kind.SETTINGS: decoded,
    Kind.CANARY: unpack,
}


def decode(kind: Kind, value: bytes) -> object:
    """Return what a reader that may be of an earlier version makes of ``value``."""
    return DECODERS[kind](value)


@pytest.mark.parametrize("kind", list(Kind))
def test_what_was_sealed_opens_and_says_the_same(kind: Kind) -> None:
    key, value, field = VALUES[kind]
    sealed = seal().sealed(kind, key, value, field)
    opened = seal().opened(kind, key, sealed, field)
    assert opened.fault is None
    assert decode(kind, opened.value) == decode(kind, value)
    assert decode(kind, opened.value) is not None
    is_timed = kind in {Kind.RECORD, Kind.LOAD, Kind.FACTS, Kind.LEASES}
    assert opened.issued_ms == (1_000_000 if is_timed else 0)


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind is not Kind.CANARY])
def test_a_reader_without_the_key_reads_what_was_sealed(kind: Kind) -> None:
    """So does one of an earlier version: a deployment is upgraded process by process."""
    key, value, field = VALUES[kind]
    assert decode(kind, seal().sealed(kind, key, value, field)) == decode(kind, value)


@pytest.mark.parametrize("kind", list(Kind))
def test_what_nobody_sealed_is_told_from_what_somebody_else_sealed(kind: Kind) -> None:
    key, value, field = VALUES[kind]
    assert fault(kind, key, value.removesuffix(NO_SEAL), field) is Fault.UNSEALED
    theirs = seal(b"x" * 32).sealed(kind, key, value, field)
    assert fault(kind, key, theirs, field) is Fault.WRONG


@pytest.mark.parametrize("kind", list(Kind))
def test_a_value_that_was_moved_is_not_good(kind: Kind) -> None:
    """To another key, to another field of its key, or to where another kind is expected."""
    key, value, field = VALUES[kind]
    sealed = seal().sealed(kind, key, value, field)
    assert fault(kind, key + "x", sealed, field) is Fault.WRONG
    assert fault(kind, key, sealed, field + "x") is Fault.WRONG
    for other in Kind:
        if other is not kind:
            assert fault(other, key, sealed, field) is not None


@pytest.mark.parametrize("kind", list(Kind))
def test_every_bit_of_a_value_and_its_seal_counts(kind: Kind) -> None:
    key, value, field = VALUES[kind]
    sealed = seal().sealed(kind, key, value, field)
    for place in range(len(sealed)):
        for bit in (1, 0x80):
            other = sealed[:place] + bytes((sealed[place] ^ bit,)) + sealed[place + 1 :]
            assert fault(kind, key, other, field) is not None, place


@pytest.mark.parametrize("kind", list(Kind))
def test_no_part_of_a_sealed_value_is_good(kind: Kind) -> None:
    key, value, field = VALUES[kind]
    sealed = seal().sealed(kind, key, value, field)
    for size in range(len(sealed)):
        assert fault(kind, key, sealed[:size], field) is not None
        assert fault(kind, key, sealed[size + 1 :], field) is not None
    assert fault(kind, key, sealed + sealed[-SEAL_BYTES:], field) is not None
    assert fault(kind, key, sealed * 2, field) is not None


def test_names_that_run_together_alike_are_told_apart() -> None:
    """The bytes of key, field, time and value are the same; where each ends is not."""
    value = VALUES[Kind.CANARY][1]
    sealed = seal().sealed(Kind.CANARY, "key", value, "field")
    for key, field in (("keyf", "ield"), ("ke", "yfield"), ("keyfield", ""), ("", "keyfield")):
        assert fault(Kind.CANARY, key, sealed, field) is Fault.WRONG


def test_a_time_or_a_name_cannot_be_taken_for_the_beginning_of_a_value() -> None:
    """Whoever chooses a value cannot make it the seal of another one."""
    one = seal(unix_s=0.0)
    nested = one.sealed(Kind.RECORD, KEYS.record, VALUES[Kind.RECORD][1])
    twice = one.sealed(Kind.RECORD, KEYS.record, nested)
    assert fault(Kind.RECORD, KEYS.record, twice) is None
    outer = twice[:-1].rpartition(b',"seal":')[2]
    assert fault(Kind.RECORD, KEYS.record, nested[:-1] + b"}") is None
    swapped = VALUES[Kind.RECORD][1][:-1] + b',"seal":' + outer + b"}"
    assert fault(Kind.RECORD, KEYS.record, swapped) is Fault.WRONG


def test_documents_of_settings_are_sealed_to_the_same_bytes_by_every_router() -> None:
    """Else two routers would replace each other's document of one version for ever."""
    key, value, field = VALUES[Kind.SETTINGS]
    sealed = [seal(unix_s=at_s).sealed(Kind.SETTINGS, key, value, field) for at_s in (1.0, 2.0)]
    assert sealed[0] == sealed[1]


def test_places_of_replicas_are_their_own() -> None:
    sealed = seal().sealed(Kind.LOAD, KEYS.load, VALUES[Kind.LOAD][1])
    assert fault(Kind.LOAD, ReplicaKeys(B).load, sealed) is Fault.WRONG


@given(
    st.sampled_from(list(Kind)),
    st.binary(max_size=80),
    st.sampled_from([b"", b',"seal":"', b"\xc4\x18"]),
    st.binary(min_size=20, max_size=40),
    st.sampled_from([b"", b'"}']),
)
def test_whatever_bytes_come_they_are_told_to_have_no_good_seal(
    kind: Kind, head: bytes, mark: bytes, rest: bytes, tail: bytes
) -> None:
    assert fault(kind, "key", head + mark + rest + tail) is not None
