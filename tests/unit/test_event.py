from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sidecar.event import (
    MAX_PAYLOAD_BYTES,
    ClearedPages,
    EventBatch,
    MalformedError,
    RemovedPages,
    StoredPages,
    decode_batch,
)
from state.model import Tier
from state.prefix import pack_tokens, salt_scope


def decode(*events: object) -> EventBatch:
    return decode_batch(msgspec.msgpack.encode([1.5, list(events), 0]))


def stored(**changes: object) -> dict[str, Any]:
    event = {
        "type": "BlockStored",
        "block_hashes": [11, 12],
        "parent_block_hash": None,
        "token_ids": [1, 2, 3, 4],
        "block_size": 2,
        "medium": "GPU",
    }
    return event | changes


def only_store(event: object) -> StoredPages:
    (found,) = decode(event).events
    assert isinstance(found, StoredPages)
    return found


def test_a_map_and_an_array_of_the_same_event_decode_alike() -> None:
    array = ["BlockStored", [11, 12], None, [1, 2, 3, 4], 2, None, "GPU", None]
    assert only_store(stored()) == only_store(array)
    assert only_store(array).packed_tokens == pack_tokens([1, 2, 3, 4])


def test_trailing_slots_and_the_rank_may_be_absent() -> None:
    payload = msgspec.msgpack.encode([1.5, [["BlockRemoved", [5]], ["AllBlocksCleared"]]])
    batch = decode_batch(payload)
    assert batch.dp_rank is None
    assert batch.events == (RemovedPages(handles=(5,)), ClearedPages())


def test_unknown_fields_and_tags_cost_nothing_else() -> None:
    """B10."""
    batch = decode(
        stored(foo=1), {"type": "BlockTransferred"}, ["Other", 1], {"type": "AllBlocksCleared"}
    )
    assert [type(event) for event in batch.events] == [StoredPages, ClearedPages]
    assert batch.unknown_events == 2
    assert batch.malformed_events == 0


@pytest.mark.parametrize(
    "bad",
    [
        stored(block_hashes="x"),
        stored(block_hashes=[None, 12]),
        stored(block_hashes=[b"short", 12]),
        stored(token_ids=[1, 2, 3, -4]),
        stored(token_ids=[1, 2, 3, 2**32]),
        stored(token_ids=["a", 2, 3, 4]),
        stored(token_ids=[[1, 2], 3, [], 4]),
        stored(token_ids=[1]),
        stored(token_ids=[1, 2, 3, 4, 5]),
        stored(block_size=0),
        stored(block_size=-1),
        stored(block_size=1 << 40),
        stored(lora_name="a" * 513),
        stored(parent_block_hash="x"),
        {"block_hashes": [1]},
        [],
        7,
        None,
    ],
)
def test_one_bad_event_never_costs_its_batch(bad: object) -> None:
    """B11."""
    batch = decode(stored(), bad, stored(block_hashes=[13, 14]))
    assert len(batch.events) == 2
    assert batch.malformed_events == 1


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", msgspec.msgpack.encode({"a": 1}), msgspec.msgpack.encode([1.5]), b"\x91" * 5000],
)
def test_a_payload_that_is_no_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(MalformedError):
        decode_batch(payload)


def test_an_oversized_payload_is_refused_unread() -> None:
    with pytest.raises(MalformedError, match="bytes"):
        decode_batch(bytes(MAX_PAYLOAD_BYTES + 1))


def test_digests_and_ints_of_either_sign_name_the_same_page() -> None:
    """B12."""
    pattern = 0xF9D217678CAB9B44
    for form in (pattern, pattern - 2**64, b"\0" * 24 + pattern.to_bytes(8, "big")):
        event = only_store(stored(block_hashes=[form, 1], parent_block_hash=form))
        assert event.handles[0] == event.parent == pattern


@pytest.mark.parametrize("session", ["s-1", "", "x" * (1 << 20), 7, ["s"], b"\xff", None, True])
def test_a_session_changes_nothing_and_goes_no_further(session: object) -> None:
    """A client chooses it, as long as it likes; the event is about pages all the same."""
    slots: list[object] = [[11, 12], None, [1, 2, 3, 4], 2, None, "GPU", None]
    slots += [None, 0, "full_attention", None, None, None, session]
    plain = only_store(stored(group_idx=0))
    assert only_store(["BlockStored", *slots]) == plain
    assert only_store(stored(group_idx=0, session_id=session)) == plain
    batch = decode(["BlockStored", *slots])
    assert (batch.unknown_events, batch.malformed_events) == (0, 0)


def test_an_offload_placeholder_without_tokens_is_kept_as_such() -> None:
    """B15."""
    event = only_store(stored(token_ids=[], block_size=0, medium="CPU"))
    assert event.handles == (11, 12)
    assert event.packed_tokens == b""
    assert event.tier is Tier.HOST
    assert only_store(stored(token_ids=[], block_size=None)).page_tokens == 0


def test_pairs_of_tokens_fold_to_their_first() -> None:
    """B56."""
    event = only_store(stored(token_ids=[[1, 2], [2, 3], [3, 4], [4, 5]]))
    assert event.packed_tokens == pack_tokens([1, 2, 3, 4])


def test_a_short_last_page_is_left_out() -> None:
    event = only_store(stored(token_ids=[1, 2, 3]))
    assert event.handles == (11,)
    assert event.packed_tokens == pack_tokens([1, 2])


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        (None, Tier.GPU),
        ("GPU", Tier.GPU),
        ("CPU", Tier.HOST),
        ("CPU_PINNED", Tier.HOST),
        ("FS", Tier.DISK),
        ("OBJ", Tier.DISK),
        ("STORAGE", Tier.DISK),
        ("DISK", Tier.DISK),
        ("WARP", None),
        ("EXTERNAL", None),
        (7, None),
    ],
)
def test_a_medium_that_is_not_known_is_no_tier(medium: object, tier: Tier | None) -> None:
    """B22."""
    assert only_store(stored(medium=medium)).tier is tier
    (removed,) = decode(["BlockRemoved", [1], medium]).events
    assert isinstance(removed, RemovedPages)
    assert removed.tier is tier


def test_a_remote_copy_is_not_this_replicas() -> None:
    assert only_store(stored(locality="REMOTE")).tier is None
    assert only_store(stored(locality="LOCAL")).tier is Tier.GPU


def test_a_salt_becomes_a_scope_and_is_not_kept() -> None:
    event = only_store(stored(extra_keys=[["tenant-1"], None]))
    assert event.scope == salt_scope("tenant-1")
    assert event.opaque_from is None
    assert "tenant-1" not in repr(event)
    assert only_store(stored(cache_salt="tenant-1")).scope == salt_scope("tenant-1")
    array = [
        "BlockStored",
        [11, 12],
        None,
        [1, 2, 3, 4],
        2,
        None,
        "GPU",
        {"cache_salt": "tenant-1"},
    ]
    assert only_store(array).scope == salt_scope("tenant-1")
    assert only_store(stored()).scope is None


def test_adapter_and_salt_of_the_same_text_are_both_seen() -> None:
    """B18."""
    adapter_only = only_store(stored(lora_name="X", extra_keys=[["X"], ["X"]]))
    both = only_store(stored(lora_name="X", extra_keys=[["X", "X"], ["X"]]))
    salt_only = only_store(stored(extra_keys=[["X"], None]))
    assert (adapter_only.adapter, adapter_only.scope) == ("X", None)
    assert (both.adapter, both.scope) == ("X", salt_scope("X"))
    assert (salt_only.adapter, salt_only.scope) == ("", salt_scope("X"))


@pytest.mark.parametrize(
    ("changes", "opaque_from"),
    [
        ({"extra_keys": [None, [["image", 0]]]}, 1),
        ({"extra_keys": [[["image", -2]], None]}, 0),
        ({"extra_keys": [["image", "salt"], None]}, 0),
        ({"extra_keys": [None, ["image"]]}, 1),
        ({"extra_keys": [None, [["image", -1], ["image", 1]]]}, 1),
        ({"extra_keys": [[["image", 1], "salt"], [["image", -1]]]}, 0),
        ({"extra_keys": [["text"], None], "parent_block_hash": 9}, 0),
        ({"extra_keys": [[b"embeds"], None]}, 0),
        ({"extra_keys": [[7], None]}, 0),
        ({"extra_keys": [None]}, None),
        ({"extra_keys": "odd"}, None),
        ({"lora_id": 3}, 0),
        ({"lora_id": 3, "lora_name": "a"}, None),
    ],
)
def test_pages_that_depend_on_more_than_tokens_are_marked(
    changes: dict[str, Any], opaque_from: int | None
) -> None:
    assert only_store(stored(**changes)).opaque_from == opaque_from


@pytest.mark.parametrize(
    ("kind", "is_prefix_group"),
    [
        (None, True),
        ("full_attention", True),
        ("mla_attention", True),
        ("sink_full_attention", True),
        ("sliding_window", False),
        ("mamba", False),
        ("something_new", False),
    ],
)
def test_only_groups_that_hold_whole_prefixes_count(
    *, kind: str | None, is_prefix_group: bool
) -> None:
    event = only_store(stored(kv_cache_spec_kind=kind, group_idx=1))
    assert event.is_prefix_group is is_prefix_group
    assert event.group == 1


def test_a_window_group_may_have_fewer_pages_than_tokens() -> None:
    event = only_store(stored(kv_cache_spec_kind="sliding_window", block_hashes=[1]))
    assert event.handles == (1,)
