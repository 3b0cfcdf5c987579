"""What a mirror tells of clears, for whoever knows blocks that no event told of."""

from __future__ import annotations

from typing import TYPE_CHECKING

from support.fleet_state import A, B, batch, blocks, record

if TYPE_CHECKING:
    from support.state_backend import RedisBackend


async def test_each_clear_of_a_cache_is_counted_until_the_replica_leaves(
    redis_backend: RedisBackend,
) -> None:
    """By replica; stores and removals are none."""
    mirror, writer = await redis_backend.mirror(), redis_backend.writer
    for replica in (A, B):
        await writer.register(record(replica))
        await writer.apply([batch(1, stored=blocks(1, 2), replica=replica)])
    assert await mirror.settle(30)
    assert dict(mirror.clears()) == {}
    await writer.apply([batch(2, removed=blocks(1)), batch(3, is_clear=True)])
    assert await mirror.settle(30)
    assert dict(mirror.clears()) == {A: 1}
    await writer.apply([batch(4, stored=blocks(5), is_clear=True)])
    assert await mirror.settle(30)
    assert dict(mirror.clears()) == {A: 2}
    await writer.deregister(A, record().generation)
    assert await mirror.settle(30)
    assert dict(mirror.clears()) == {}
