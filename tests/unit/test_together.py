"""Several prompts, or several answers, in one request: it goes to one replica, as it is."""

from __future__ import annotations

import pytest
from msgspec import structs

from state.lease import Outcome
from state.memory import MemoryState
from state.model import ChangeBatch, Generation, ReplicaId, ReplicaRecord, RouterId
from state.prefix import namespace_of
from support.choosing import IDENTITY, Choosing, chain_for, member_of, prompt_for

SHARED = range(3_200)
OTHER = range(50_000, 53_200)
THIRD = range(70_000, 73_200)


async def choosing_with(held: dict[str, tuple[range, ...]]) -> tuple[Choosing, list[ReplicaId]]:
    """Return a chooser on replicas that hold the prompts named."""
    state = MemoryState(clock=lambda: 100.0)
    choosing = Choosing(state.reader(RouterId("me")))
    for name, prompts in held.items():
        record = ReplicaRecord(
            replica=ReplicaId(name),
            endpoint=f"http://127.0.0.1:{ord(name)}",
            generation=Generation("g"),
            identity=IDENTITY,
            page_tokens=16,
            sidecar="s",
        )
        await state.register(record)
        choosing.members.append(member_of(record))
        for sequence, tokens in enumerate(prompts, 1):
            batch = ChangeBatch(
                replica=record.replica,
                generation=record.generation,
                namespace=namespace_of(IDENTITY),
                sequence=sequence,
                stored=chain_for(tokens),
            )
            await state.apply([batch])
    return choosing, [member.replica for member in choosing.members]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
async def test_prompts_of_one_request_go_where_most_of_all_of_them_is(
    order: tuple[int, int, int],
) -> None:
    """A66: by the sum, whatever stands first."""
    choosing, [_, b] = await choosing_with({"a": (SHARED,), "b": (OTHER, THIRD)})
    prompts = (SHARED, OTHER, THIRD)
    prompt = prompt_for(*(prompts[at] for at in order))
    choice = choosing.choose(prompt, choosing.members)
    assert choice.member.replica == b
    assert choice.decision.predicted_cached_tokens == 2 * 3_199
    assert choosing.know.leases.inflight(b) == 1


async def test_what_one_request_repeats_is_predicted_for_each_of_its_prompts() -> None:
    """Each prompt looks up the cache by itself, as in the engine."""
    choosing, [a] = await choosing_with({"a": (SHARED,)})
    choice = choosing.choose(prompt_for(SHARED, SHARED), choosing.members)
    assert choice.decision.predicted_cached_tokens == 2 * 3_199
    assert [placement.replica for placement in choice.placements] == [a, a]


async def test_several_answers_are_one_prompt_and_room_for_each() -> None:
    """A45: one lease, one prefill; what the answers take up counts for each."""
    choosing, [a] = await choosing_with({"a": (SHARED,)})
    one = structs.replace(prompt_for(SHARED), max_output_tokens=100)
    claimed = []
    for choices in (1, 4):
        # The mean of answers is not known before one has ended.
        choosing.know.footprints.learn(100)
        choice = choosing.choose(structs.replace(one, choices=choices), choosing.members)
        claimed.append(choosing.know.footprints.claimed_tokens(a))
        assert choice.decision.predicted_cached_tokens == 3_199
        choice.footprint.end(None)
        choice.lease.finish(Outcome.DONE, 100.0)
    assert claimed == [3_200 + 100, 3_200 + 400]
