"""The index under a decision: what a lookup costs, and events that come in between."""

from __future__ import annotations

import asyncio
import random
from typing import ClassVar

import pytest

from router.fleet import FleetTable
from state.memory import MemoryState
from state.model import (
    BlockId,
    ChangeBatch,
    Generation,
    ReplicaId,
    ReplicaRecord,
    RouterId,
    Tier,
)
from state.prefix import namespace_of
from state.residency import Residency
from support.choosing import IDENTITY, Choosing, chain_for, prompt_for
from support.field_trace import prompt_at

NAMES = [ReplicaId(f"r{number}") for number in range(4)]


class Counted(bytes):
    """A block id that counts how often an index looks for it."""

    lookups: ClassVar[int] = 0

    __slots__ = ()

    def __hash__(self) -> int:
        Counted.lookups += 1
        return super().__hash__()


def lookups(replicas: int, chain: tuple[BlockId, ...]) -> int:
    """Return the lookups for a prompt that every fourth of the replicas has begun."""
    index = Residency()
    for number in range(replicas):
        name = ReplicaId(f"r{number}")
        index.store(name, Tier.GPU, prompt_at(0.0, (f"p{number}", 6_400)).chain)
        if number % 4 == 0:
            index.store(name, Tier.GPU, chain[:48])
    Counted.lookups = 0
    found = index.overlap([BlockId(Counted(block)) for block in chain])
    assert len(found) == -(-replicas // 4), "only who holds some of it"
    assert {overlap.gpu_blocks for overlap in found.values()} == {48}
    return Counted.lookups


def test_a_lookup_is_as_long_as_the_match_whatever_the_size_of_the_fleet() -> None:
    """A07: 300 replicas, a quarter of them with one prefix."""
    chain = prompt_at(0.0, ("hot", 3_072), ("own", 30_000)).chain
    assert lookups(4, chain) == lookups(300, chain) <= 2 * 49


def leading(chain: tuple[BlockId, ...], held: set[BlockId]) -> int:
    for depth, block in enumerate(chain):
        if block not in held:
            return depth
    return len(chain)


@pytest.mark.parametrize("seed", range(3))
async def test_evictions_and_decisions_that_mix_see_one_state_each(seed: int) -> None:
    """C34: an engine that stores and evicts beside two who choose: what they see is what holds."""
    draw = random.Random(seed)
    state = MemoryState(clock=lambda: 0.0)
    held: dict[ReplicaId, set[BlockId]] = {name: set() for name in NAMES}
    prompts = [range(10_000 * number, 10_000 * number + 1_280) for number in range(5)]
    chains = [chain_for(tokens) for tokens in prompts]
    for name in NAMES:
        record = ReplicaRecord(
            replica=name,
            endpoint=f"http://127.0.0.1:{1 + NAMES.index(name)}",
            generation=Generation("g"),
            identity=IDENTITY,
            page_tokens=16,
            sidecar=name,
        )
        await state.register(record)

    async def engine(name: ReplicaId) -> None:
        for sequence in range(1, 200):
            chain = draw.choice(chains)
            stored = chain[: draw.randrange(21)]
            removed = tuple(block for block in draw.choice(chains) if draw.random() < 0.3)
            removed = tuple(block for block in removed if block not in stored)
            change = ChangeBatch(
                replica=name,
                generation=Generation("g"),
                namespace=namespace_of(IDENTITY),
                sequence=sequence,
                stored=stored,
                removed=removed,
                is_clear=draw.random() < 0.05,
            )
            await state.apply([change])
            before = set() if change.is_clear else held[name]
            held[name] = (before - set(removed)) | set(stored)
            await asyncio.sleep(0)

    decisions = 0

    async def router(name: str) -> None:
        nonlocal decisions
        reader = state.reader(RouterId(name))
        chooser = Choosing(reader).chooser
        members = list(FleetTable(reader, ()).members().values())
        for _ in range(200):
            place = draw.randrange(len(prompts))
            decision = chooser.peek(chooser.route(prompt_for(prompts[place])), members)
            assert decision is not None
            for one in decision.candidates:
                run = leading(chains[place], held[one.replica])
                assert one.cached_tokens == min(64 * run, 1_279)
                decisions += run > 0
            await asyncio.sleep(0)

    await asyncio.gather(*map(engine, NAMES), router("one"), router("two"))
    assert decisions > 200
