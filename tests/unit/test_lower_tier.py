"""What the chooser tells a policy of lower tiers, beside placements and full pools."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec import structs

from state.lease import Outcome
from state.memory import MemoryState
from state.model import ChangeBatch, Generation, ReplicaId, ReplicaRecord, RouterId, Tier
from state.prefix import namespace_of
from support.choosing import IDENTITY, Choosing, chain_for, member_of, prompt_for

if TYPE_CHECKING:
    from policies.model import Candidate

A = ReplicaId("a")
RECORD = ReplicaRecord(
    replica=A,
    endpoint="http://127.0.0.1:1",
    generation=Generation("g"),
    identity=IDENTITY,
    page_tokens=16,
    sidecar="s",
)


async def choosing_on(*held: tuple[Tier, range, slice], capacity_pages: int = 10_000) -> Choosing:
    """Return a chooser on one replica that holds these parts of these prompts."""
    state = MemoryState(clock=lambda: 100.0)
    record = structs.replace(RECORD, capacity_pages=capacity_pages)
    await state.register(record)
    for number, (tier, tokens, part) in enumerate(held, 1):
        batch = ChangeBatch(
            replica=A,
            generation=Generation("g"),
            namespace=namespace_of(IDENTITY),
            sequence=number,
            tier=tier,
            stored=chain_for(tokens)[part],
        )
        await state.apply([batch])
    choosing = Choosing(state.reader(RouterId("me")))
    choosing.members = [member_of(record)]
    return choosing


def seen(choosing: Choosing, *prompts: range) -> tuple[int, int]:
    """Return the tokens that count as cached, and those in lower tiers."""
    choice = choosing.choose(prompt_for(*prompts), choosing.members)
    choice.finish(Outcome.FAILED, had_first_byte=False)
    only: Candidate = choice.decision.candidates[0]
    assert choice.decision.predicted_lower_tier_tokens == only.lower_tier_tokens
    return only.cached_tokens, only.lower_tier_tokens


PROMPT = range(1_280)
ALL = slice(None)


async def test_what_is_on_the_gpu_is_not_in_a_lower_tier_too() -> None:
    choosing = await choosing_on((Tier.GPU, PROMPT, ALL), (Tier.HOST, PROMPT, ALL))
    assert seen(choosing, PROMPT) == (1_279, 0)


@pytest.mark.parametrize("lower", [Tier.HOST, Tier.DISK])
async def test_a_gap_ends_what_lower_tiers_hold(lower: Tier) -> None:
    choosing = await choosing_on((Tier.GPU, PROMPT, slice(5)), (lower, PROMPT, slice(6, None)))
    assert seen(choosing, PROMPT) == (320, 0)


async def test_host_memory_and_disk_continue_each_other() -> None:
    choosing = await choosing_on(
        (Tier.GPU, PROMPT, slice(2)),
        (Tier.HOST, PROMPT, slice(2, 5)),
        (Tier.DISK, PROMPT, slice(5, 9)),
    )
    assert seen(choosing, PROMPT) == (128, 448)


async def test_a_placement_counts_before_what_lower_tiers_hold_behind_it() -> None:
    """What is on its way to the GPU is not fetched once more."""
    choosing = await choosing_on((Tier.GPU, PROMPT, slice(2)), (Tier.HOST, PROMPT, slice(12)))
    choosing.know.pending.of("").place(A, chain_for(PROMPT)[:8], 100.0)
    assert seen(choosing, PROMPT) == (512, 256)


async def test_several_prompts_of_one_request_add_up() -> None:
    other = range(2_000, 2_640)
    choosing = await choosing_on(
        (Tier.GPU, PROMPT, slice(2)), (Tier.HOST, PROMPT, slice(3)), (Tier.HOST, other, ALL)
    )
    choosing.members = [structs.replace(choosing.members[0], capacity_tokens=None)]
    assert seen(choosing, PROMPT, other) == (128, 64 + 639)


async def test_what_is_pushed_out_leaves_a_gap_before_lower_tiers() -> None:
    """The pool has 2,048 tokens; a request in flight of 1,600 takes most of them."""
    held = ((Tier.GPU, PROMPT, slice(10)), (Tier.HOST, PROMPT, ALL))
    choosing = await choosing_on(*held, capacity_pages=128)
    assert seen(choosing, PROMPT) == (640, 639)
    choosing.choose(prompt_for(range(5_000, 6_600)), choosing.members)
    cached, lower = seen(choosing, PROMPT)
    assert cached < 640
    assert lower == 0
