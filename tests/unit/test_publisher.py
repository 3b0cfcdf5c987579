from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sidecar.pagechange import PageChange, PagesCleared, PagesRemoved, PagesStored
from sidecar.publisher import BatchLog, EventEncoding, EventFormat, HashForm
from state.model import BlockId

FIRST, SECOND = BlockId(bytes(range(16))), BlockId(bytes(range(16, 32)))
STORED = PagesStored((FIRST, SECOND), None, [1, 2, 3, 4], "tenant")


def _decoded(
    change: PageChange, hashes: HashForm = "int", encoding: EventEncoding = "map"
) -> list[Any]:
    wire = EventFormat(page_tokens=2, hashes=hashes, encoding=encoding)
    return list(msgspec.msgpack.decode(wire.batch([change], 1.5)))


def test_a_stored_run_has_the_fields_that_vllm_sends() -> None:
    assert _decoded(STORED) == [
        1.5,
        [
            {
                "type": "BlockStored",
                "block_hashes": [0x08090A0B0C0D0E0F, 0x18191A1B1C1D1E1F],
                "parent_block_hash": None,
                "token_ids": [1, 2, 3, 4],
                "block_size": 2,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "extra_keys": [["tenant"], None],
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            }
        ],
        0,
    ]


def test_a_stored_run_as_array_has_its_fields_in_order() -> None:
    run = PagesStored((SECOND,), FIRST, [3, 4])
    assert _decoded(run, "bytes", "array")[1] == [
        ["BlockStored", [SECOND], FIRST, [3, 4], 2, None, "GPU", None, [None]]
    ]


@pytest.mark.parametrize(
    ("encoding", "removed", "cleared"),
    [
        (
            "map",
            {"type": "BlockRemoved", "block_hashes": [FIRST], "medium": "GPU", "group_idx": 0},
            {"type": "AllBlocksCleared"},
        ),
        ("array", ["BlockRemoved", [FIRST], "GPU"], ["AllBlocksCleared"]),
    ],
)
def test_removals_and_clears_have_both_encodings(
    encoding: EventEncoding, removed: Any, cleared: Any
) -> None:
    assert _decoded(PagesRemoved((FIRST,)), "bytes", encoding)[1] == [removed]
    assert _decoded(PagesCleared(), "bytes", encoding)[1] == [cleared]


def test_the_log_keeps_the_last_batches() -> None:
    log = BatchLog(kept_batches=3)
    assert [log.append(b"%d" % index) for index in range(5)] == [0, 1, 2, 3, 4]
    assert log.since(0) == [(2, b"2"), (3, b"3"), (4, b"4")]
    assert log.since(4) == [(4, b"4")]
    assert log.since(5) == []


def test_the_log_is_bounded_in_bytes_too() -> None:
    log = BatchLog(kept_bytes=10)
    for _ in range(4):
        log.append(b"four")
    assert [sequence for sequence, _ in log.since(0)] == [2, 3]
