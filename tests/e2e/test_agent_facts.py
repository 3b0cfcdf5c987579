"""What a running sidecar tells of its engine, life by life."""

from __future__ import annotations

from typing import TYPE_CHECKING

from state.facts import key_check
from state.model import EngineKind
from state.secret import ChainKeys
from support.kv_engine import KvEngine, removed, stored
from support.sidecar import REPLICA, Fleet, eventually, page, pages, settings_for, sidecar

if TYPE_CHECKING:
    from state.model import ReplicaFacts


def told(fleet: Fleet) -> ReplicaFacts | None:
    return fleet.reader.facts().get(REPLICA)


async def test_facts_follow_the_events_and_begin_anew_with_the_engine() -> None:
    """B03: another life of the engine has facts of its own."""
    fleet = Fleet()
    async with KvEngine() as engine, sidecar(settings_for(engine, chain_seed=7), fleet):
        await eventually(lambda: told(fleet) is not None)
        facts = told(fleet)
        assert facts is not None
        assert facts.events == f"tcp://127.0.0.1:{engine.events_port}"
        assert (facts.has_replay, facts.is_engine_up, facts.reason) == (True, True, "start")
        assert (facts.page_tokens, facts.block_tokens, facts.capacity_pages) == (4, 4, 1000)
        assert (facts.engine, facts.encodings, facts.counts.batches) == (EngineKind.UNKNOWN, (), 0)
        assert facts.key_check == key_check(ChainKeys(7))
        state = fleet.replica()
        assert state is not None
        assert facts.generation == state.record.generation
        await engine.publish(["BlockStored", [-1, 2], None, pages(1, 2), 4, None, "GPU"])
        await engine.publish(removed(2))
        await eventually(lambda: (now := told(fleet)) is not None and now.counts.batches == 2)
        facts = told(fleet)
        assert facts is not None
        assert (facts.encodings, facts.hash_kinds) == (("array", "map"), ("signed int",))
        counts = facts.counts
        assert (counts.last_sequence, counts.stored_pages, counts.removed_pages) == (1, 2, 1)
        assert (counts.held_pages, counts.plain_pages, counts.generations) == (1, 1, 1)
        await engine.restart()
        await eventually(lambda: (now := told(fleet)) is not None and not now.encodings)
        facts = told(fleet)
        assert facts is not None
        assert facts.counts.generations > 1
        assert facts.generation != state.record.generation
        await eventually(lambda: fleet.replica() is not None)
        await engine.publish(stored([5], page(5)))
        await eventually(lambda: (now := told(fleet)) is not None and now.encodings == ("map",))
        facts = told(fleet)
        assert facts is not None
        assert (facts.hash_kinds, facts.counts.last_sequence) == (("int",), 0)
    assert told(fleet) is None
