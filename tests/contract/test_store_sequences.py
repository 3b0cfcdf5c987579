"""Whatever happens in whatever order: the mirror of a real server answers as memory does."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from random import Random
from typing import TYPE_CHECKING

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from state.model import Generation, ReplicaLoad, Tier
from support.fleet_state import A, B, batch, block, record
from support.state_backend import MemoryBackend, RedisBackend

if TYPE_CHECKING:
    from state.model import ReplicaId
    from state.store import FleetReader
    from support.state_backend import Backend, StateServer

_REPLICAS = st.sampled_from([A, B])
_SIDECARS = st.sampled_from(["s1", "s2"])
_BLOCKS = st.lists(st.integers(0, 7), max_size=5, unique=True)
_LIVES = st.sampled_from([0, 0, 0, 1])
"""How many generations before the newest one."""

_OPERATIONS = st.one_of(
    st.tuples(st.just("register"), _REPLICAS, _LIVES, _SIDECARS),
    st.tuples(st.just("restart"), _REPLICAS, _LIVES, _SIDECARS),
    st.tuples(st.just("heartbeat"), _REPLICAS, _LIVES, _SIDECARS),
    st.tuples(st.just("deregister"), _REPLICAS, _LIVES),
    st.tuples(st.just("lapse"), _REPLICAS),
    st.tuples(st.just("look"), _REPLICAS),
    *[
        st.tuples(
            st.just("apply"),
            _REPLICAS,
            _LIVES,
            _BLOCKS,
            _BLOCKS,
            st.sampled_from(list(Tier)),
            st.sampled_from([False, False, False, True]),
        )
    ]
    * 6,
)
_CHAIN = tuple(map(block, range(8)))
_PROBES = [_CHAIN[start:] for start in range(8)] + [_CHAIN[3:4] + _CHAIN[:3]]


class _Script:
    """Plays one sequence of operations to a backend and returns what each answered."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._lives: dict[ReplicaId, int] = {A: 1, B: 1}
        self._sequences: dict[tuple[ReplicaId, str], int] = {}

    def _generation(self, replica: ReplicaId, age: int) -> str:
        return f"g{max(1, self._lives[replica] - age)}"

    async def play(self, operation: tuple) -> object:  # type: ignore[type-arg]
        name, replica, *rest = operation
        writer = self._backend.writer
        if name == "lapse":
            await self._backend.lapse(replica)
        if name in {"lapse", "look"}:
            return None
        if name == "restart":
            self._lives[replica] += 1
        generation = self._generation(replica, rest[0])
        if name in {"register", "restart"}:
            await writer.register(record(replica, generation, rest[1]))
        if name == "heartbeat":
            load = ReplicaLoad(running=1)
            return await writer.heartbeat(record(replica, generation, rest[1]), load)
        if name == "deregister":
            await writer.deregister(replica, Generation(generation))
        if name == "apply":
            await self._apply(replica, generation, *rest[1:])
        return None

    async def _apply(
        self,
        replica: ReplicaId,
        generation: str,
        stored: list[int],
        removed: list[int],
        tier: Tier,
        is_clear: bool,  # noqa: FBT001
    ) -> None:
        sequence = self._sequences.get((replica, generation), 0) + 1
        self._sequences[replica, generation] = sequence
        change = batch(
            sequence,
            tuple(map(block, stored)),
            tuple(block(number) for number in removed if number not in stored),
            replica=replica,
            generation=generation,
            tier=tier,
            is_clear=is_clear,
        )
        await self._backend.writer.apply([change])


async def _answers(backend: Backend, reader: FleetReader) -> tuple[object, ...]:
    assert await reader.settle(30)
    overlaps = [dict(await backend.overlap(reader, probe)) for probe in _PROBES]
    return (dict(reader.replicas()), *overlaps)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(operations=st.lists(_OPERATIONS, min_size=1, max_size=25))
def test_any_sequence_leaves_equal_answers_in_memory_and_in_redis(
    state_server: StateServer, operations: list[tuple[object, ...]]
) -> None:
    """The mirror that followed all along, one that only took a snapshot, and direct lookup."""

    async def scenario() -> None:
        await state_server.flush()
        async with AsyncExitStack() as stack:
            memory, redis = MemoryBackend(), RedisBackend(state_server, stack)
            redis.writer = redis.open_writer(stream_cap_entries=4)
            expected, mirror = await memory.reader("r1"), await redis.reader("r1")
            direct = await redis.direct("r3")
            scripts = _Script(memory), _Script(redis)
            registered = [("register", A, 0, "s1"), ("register", B, 0, "s1")]
            for operation in [*registered, *operations]:
                answers = [await script.play(operation) for script in scripts]
                assert answers[0] == answers[1]
                if operation[0] == "look":
                    answer = await _answers(memory, expected)
                    assert await _answers(redis, mirror) == answer
                    assert await _answers(redis, direct) == answer
            answer = await _answers(memory, expected)
            for reader in (mirror, direct, await redis.reader("r2")):
                assert await _answers(redis, reader) == answer
            assert await state_server.keys_without_ttl() == []

    asyncio.run(scenario())


async def test_a_snapshot_taken_while_changes_pour_in_converges(
    redis_backend: RedisBackend,
) -> None:
    """Scan and log overlap in every possible way; what counts is where they end."""
    rng = Random(5)
    writer, held = redis_backend.writer, set[int]()
    await writer.register(record())
    await writer.apply([batch(1, stored=tuple(map(block, range(20_000))))])
    held.update(range(20_000))
    mirrors = []
    for sequence in range(2, 60):
        if sequence % 6 == 0:
            mirrors.append(await redis_backend.mirror(f"r{sequence}"))
        is_clear = sequence == 40
        if is_clear:
            held.clear()
        removed = set(rng.sample(sorted(held), min(len(held), 700)))
        stored = {rng.randrange(25_000) for _ in range(700)} - removed
        held = (held - removed) | stored
        change = batch(
            sequence,
            tuple(map(block, stored)),
            tuple(map(block, removed)),
            is_clear=is_clear,
        )
        await writer.apply([change])
    for mirror in mirrors:
        assert await mirror.settle(30)
        assert mirror._residency.blocks(A, Tier.GPU) == set(map(block, held))
