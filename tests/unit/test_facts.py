"""What a sidecar detects of an engine's events, when it tells, and what a reader believes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from sidecar.event import decode_batch
from sidecar.facts import LOOK_EVERY, TELL_HEARTBEATS, FactPace, WireFacts, printable
from sidecar.ghost import Ghosts
from sidecar.sequence import Batch
from state.facts import decode_facts, encode_facts, facts_of, key_check
from state.model import EngineKind, EventCounts, Generation, ReplicaFacts, ReplicaId
from state.secret import ChainKeys
from support.fleet_state import A, record

if TYPE_CHECKING:
    from collections.abc import Callable

FACTS = ReplicaFacts(
    engine=EngineKind.VLLM,
    engine_version="0.32.0",
    events="tcp://127.0.0.1:5557",
    encodings=("map",),
    hash_kinds=("bytes of 32",),
    media=("GPU", "WARP"),
    unknown_media=("WARP",),
    ranks=(0,),
    groups=(0, 1),
    followed_group=0,
    page_tokens=16,
    key_check="0a0b0c0d",
    generation=Generation("g1"),
    counts=EventCounts(last_sequence=7, batches=8),
)


def seen(*events: Any, rank: int | None = 0, wire: WireFacts | None = None) -> WireFacts:
    wire = wire or WireFacts()
    payload = msgspec.msgpack.encode([1.0, list(events), rank])
    wire.look(Batch(3, payload), decode_batch(payload))
    return wire


def as_map(hashes: list[Any], **fields: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": None,
        "token_ids": [1, 2] * len(hashes),
        "block_size": 2,
        **fields,
    }


def as_array(hashes: list[Any], medium: str | None = "GPU") -> list[Any]:
    return ["BlockStored", hashes, None, [1, 2] * len(hashes), 2, None, medium]


@pytest.mark.parametrize(
    ("event", "encoding", "hash_kind"),
    [
        (as_map([1, 2]), "map", "int"),
        (as_map([b"x" * 32]), "map", "bytes of 32"),
        (as_array([5, -7, 9]), "array", "signed int"),
        (as_array([-7, 5]), "array", "signed int"),
        (as_array([b"x" * 16]), "array", "bytes of 16"),
    ],
)
def test_encoding_and_hashes_are_told_apart(event: Any, encoding: str, hash_kind: str) -> None:
    """B12: what the engine sends is shown as it is sent."""
    wire = seen(event)
    assert tuple(wire.encodings) == (encoding,)
    assert tuple(wire.hash_kinds) == (hash_kind,)
    assert tuple(wire.media) == ("GPU",)
    assert wire.last_sequence == 3


def test_media_groups_and_ranks_are_those_that_events_named() -> None:
    """B22: also a medium that nobody knows, with what a terminal must not see taken out."""
    wire = seen(as_map([1], medium="CPU", group_idx=1), as_map([2], group_idx=0), rank=2)
    wire = seen(["BlockRemoved", [1], "WA\x1bRP"], rank=2, wire=wire)
    assert tuple(wire.media) == ("CPU", "GPU", "WA?RP")
    assert wire.groups == {0, 1}
    assert wire.ranks == {2}


def test_a_new_tier_is_seen_at_once_and_a_new_medium_of_a_known_one_in_time() -> None:
    wire = seen(as_map([1]))
    for _ in range(20):
        seen(as_map([1]), wire=wire)
    seen(as_map([1], medium="DISK"), wire=wire)
    assert "DISK" in wire.media
    for _ in range(LOOK_EVERY + 1):
        seen(as_map([1], medium="FS"), wire=wire)
    assert "FS" in wire.media


def test_what_an_engine_makes_up_stays_within_bounds() -> None:
    wire = WireFacts()
    for number in range(200):
        event = as_map([b"x" * (8 + number)], medium=f"M{number}", group_idx=number)
        seen(event, rank=number, wire=wire)
    sizes = (wire.encodings, wire.hash_kinds, wire.media, wire.groups, wire.ranks)
    assert [len(each) for each in sizes] == [1, 16, 16, 64, 64]
    facts = ReplicaFacts(
        media=tuple(wire.media), ranks=tuple(wire.ranks), groups=tuple(wire.groups)
    )
    assert decode_facts(encode_facts(facts)) == facts


def test_odd_events_are_passed_over() -> None:
    wire = seen(17, ["BlockStored"], {"type": "BlockStored", "block_hashes": 5}, {"type": "New"})
    assert not wire.hash_kinds
    assert printable("a\n\x7fé" + "b" * 200) == "a???" + "b" * 124


def test_what_is_stored_comes_back_and_nothing_else_is_believed() -> None:
    """S-14: values of the store are untrusted."""
    assert decode_facts(encode_facts(FACTS)) == FACTS
    raw = msgspec.to_builtins(FACTS)
    wrong: list[Callable[[dict[str, Any]], object]] = [
        lambda fields: fields.update(events="tcp://\x1b[2J"),
        lambda fields: fields.update(engine_version="x" * 129),
        lambda fields: fields.update(media=["GPU"] * 17),
        lambda fields: fields.update(ranks=[-1]),
        lambda fields: fields.update(engine="other"),
        lambda fields: fields["counts"].update(batches=-1),
        lambda fields: fields.update(counts=[]),
    ]
    for spoil in wrong:
        fields = msgspec.json.decode(msgspec.json.encode(raw))
        spoil(fields)
        assert decode_facts(msgspec.json.encode(fields)) is None
    assert decode_facts(b"\xff") is None
    assert decode_facts(b"{}" + b" " * (1 << 20)) is None


def test_facts_of_another_generation_are_not_shown() -> None:
    assert facts_of(record(A, "g1"), {A: FACTS}) is FACTS
    assert facts_of(record(A, "g2"), {A: FACTS}) is None
    assert facts_of(record(A, "g1"), {ReplicaId("other"): FACTS}) is None
    assert facts_of(None, {A: FACTS}) is None


def test_equal_keys_have_equal_checks_and_no_check_tells_a_key() -> None:
    """C45."""
    secret = bytes(range(32))
    checks = [
        key_check(ChainKeys(seed, key)) for seed in (0, 1, 2**63 - 1) for key in (None, secret)
    ]
    assert key_check(ChainKeys(7, secret)) == key_check(ChainKeys(0, secret))
    assert len(set(checks)) == 4
    assert {len(check) for check in checks} == {8}


def test_facts_go_with_a_first_heartbeat_with_news_and_now_and_then() -> None:
    now_s = 0.0
    pace = FactPace(lambda: now_s, 0.5)
    first, second = record(A, "g1"), record(A, "g2")
    assert pace.due(first) is None
    pace.tell(FACTS)
    told = pace.due(first)
    assert told is not None
    assert told.generation == "g1"
    counted = msgspec.structs.replace(FACTS, counts=EventCounts(batches=9))
    pace.tell(counted)
    assert pace.due(first) is None
    now_s += 0.5 * TELL_HEARTBEATS
    again = pace.due(first)
    assert again is not None
    assert again.counts.batches == 9
    assert pace.due(first) is None
    renewed = pace.due(second)
    assert renewed is not None
    assert renewed.generation == "g2"
    pace.tell(msgspec.structs.replace(counted, is_silent=True))
    news = pace.due(second)
    assert news is not None
    assert news.is_silent
    assert pace.due(second) is None


def test_ghosts_are_the_newest_ones_and_come_back_once() -> None:
    ghosts = Ghosts(8)
    for handle in range(20):
        ghosts.leave(handle)
        assert len(ghosts) <= 8
    assert [handle for handle in range(20) if ghosts.is_back(handle)] == list(range(12, 20))
    assert not ghosts.is_back(19)
    ghosts.leave(1)
    ghosts.clear()
    assert not ghosts.is_back(1)
