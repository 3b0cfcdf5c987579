"""Field cases of memory that a router may take: one bound for all replicas, nothing of failures."""

from __future__ import annotations

import logging
import weakref

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError
from redis.exceptions import TimeoutError as RedisTimeoutError

from state.fault import FaultBook
from state.model import ReplicaId, Tier
from state.residency import MIN_BYTES, Residency
from support.fleet_state import block


@pytest.mark.parametrize("replicas", [1, 16, 64])
def test_the_bound_of_the_index_is_one_for_all_replicas(replicas: int) -> None:
    """C41: with 16 replicas it is no larger, and something is evicted of each."""
    residency = Residency(MIN_BYTES)
    for round_ in range(4 * MIN_BYTES // 200 // 100 // replicas + 2):
        for number in range(replicas):
            start = (number << 48) + (round_ << 16)
            blocks = tuple(block(start + depth) for depth in range(100))
            residency.store(ReplicaId(f"r{number}"), Tier.GPU, blocks)
            assert residency.memory_bytes <= MIN_BYTES
    assert residency.evicted_blocks > 0
    assert residency.memory_bytes > MIN_BYTES // 2


class Large:
    """Stands for what a frame holds while it fails."""


@pytest.mark.parametrize("kind", [RedisTimeoutError, RedisConnectionError, OutOfMemoryError])
def test_an_error_of_the_store_is_counted_and_not_kept(kind: type[Exception]) -> None:
    """C69: with it would go its traceback, and with that all that its frames hold."""
    book = FaultBook("redis://h:1/0", logging.getLogger("x"))
    kept: list[weakref.ref[Large]] = []

    def fail(depth: int) -> None:
        large = Large()
        kept.append(weakref.ref(large))
        if depth:
            try:
                fail(depth - 1)
            except kind as error:
                message = "again"
                raise kind(message) from error
        message = "away"
        raise kind(message)

    for _ in range(200):
        try:
            fail(3)
        except kind as error:
            book.note(error)
    assert sum(book.counts.values()) == 200
    assert [one for one in kept if one() is not None] == []
