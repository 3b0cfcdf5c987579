"""Slots of host memory."""

from __future__ import annotations

import pytest

from sidecar.store import HostMemory, StoreError


def test_slots_are_apart_and_keep_what_is_written() -> None:
    memory = HostMemory(3, 8)
    for index in range(3):
        memory.slot(index)[:] = bytes([index + 1]) * 8
    assert [bytes(memory.slot(index)) for index in range(3)] == [
        bytes([index + 1]) * 8 for index in range(3)
    ]


@pytest.mark.parametrize(("slots", "slot_bytes"), [(2, 0), (0, 8), (0, 0)])
def test_memory_without_content_has_empty_slots(slots: int, slot_bytes: int) -> None:
    memory = HostMemory(slots, slot_bytes)
    assert [len(memory.slot(index)) for index in range(slots)] == [slot_bytes] * slots


@pytest.mark.parametrize("index", [-1, 3, 1 << 40])
def test_a_slot_outside_the_memory_is_refused(index: int) -> None:
    with pytest.raises(IndexError, match="of 3"):
        HostMemory(3, 8).slot(index)


def test_memory_that_cannot_be_had_is_a_clear_error() -> None:
    with pytest.raises(StoreError, match="cannot be had"):
        HostMemory(1 << 50, 1 << 30)
    with pytest.raises(ValueError, match="slots"):
        HostMemory(-1, 8)
