"""What is placed before anybody asks: whole prefixes, wanted ones, hottest first, in the budget."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policies.hot import rendezvous
from policies.warm_plan import WarmPart, WarmPlace, plan_hand_over, plan_warm_up
from state.model import BlockId, ReplicaId

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK = 64
NAMES = [ReplicaId(f"r{index}") for index in range(5)]
LOTS = 10**9
Parts = dict[BlockId, WarmPart]


def part(
    name: str,
    parent: WarmPart | None = None,
    *,
    blocks: int = 4,
    rate: float = 1.0,
    wanted: int = 1,
    holders: tuple[str, ...] = (),
    begun: tuple[str, ...] = (),
) -> WarmPart:
    start = 0 if parent is None else parent.end_tokens
    return WarmPart(
        name=BlockId(name.encode()),
        parent=None if parent is None else parent.name,
        start_tokens=start,
        end_tokens=start + blocks * BLOCK,
        block_tokens=BLOCK,
        rate_per_s=rate,
        wanted_holders=wanted,
        holders=frozenset(map(ReplicaId, holders)),
        begun={ReplicaId(one): BLOCK for one in begun if one not in holders and blocks > 1},
    )


def named(*parts: WarmPart) -> Parts:
    return {one.name: one for one in parts}


def forest(seed: int) -> Parts:
    """Return prompts that share beginnings; whoever holds a part holds all before it."""
    draw = random.Random(seed)
    parts: list[WarmPart] = []
    for index in range(draw.randint(1, 10)):
        parent = draw.choice([None, *parts])
        most = sorted(parent.holders) if parent is not None else NAMES
        parts.append(
            part(
                f"p{index}",
                parent,
                blocks=draw.randint(1, 9),
                rate=draw.choice([0.5, 1.0, 2.0, 9.0]),
                wanted=draw.randint(1, 6),
                holders=tuple(draw.sample(most, draw.randint(0, len(most)))),
                begun=tuple(draw.sample(most, draw.randint(0, len(most)))),
            )
        )
    return named(*parts)


def with_places(parts: Parts, places: list[WarmPlace]) -> Parts:
    """Return the parts as they are held once ``places`` are there; cut ones are not."""
    held = dict(parts)
    for place in places:
        one = held[place.name]
        if place.end_tokens == one.end_tokens:
            held[place.name] = part_with(one, one.holders | {place.replica})
    return held


def part_with(one: WarmPart, holders: frozenset[ReplicaId]) -> WarmPart:
    return WarmPart(
        name=one.name,
        parent=one.parent,
        start_tokens=one.start_tokens,
        end_tokens=one.end_tokens,
        block_tokens=one.block_tokens,
        rate_per_s=one.rate_per_s,
        wanted_holders=one.wanted_holders,
        holders=holders,
        begun=one.begun,
    )


def check_places(parts: Parts, places: list[WarmPlace], budget: int, most: int) -> None:
    assert sum(place.new_tokens for place in places) <= budget
    assert len(places) <= most
    there = {(replica, one.name) for one in parts.values() for replica in one.holders}
    for place in places:
        one = parts[place.name]
        assert (place.replica, place.name) not in there
        assert one.parent is None or (place.replica, one.parent) in there
        begun = one.begun.get(place.replica, 0)
        assert place.end_tokens == one.start_tokens + begun + place.new_tokens
        assert place.new_tokens > 0
        assert place.new_tokens % BLOCK == 0
        if place.end_tokens < one.end_tokens:
            assert place is places[-1], "what follows a cut would be beyond the budget"
        there.add((place.replica, place.name))


forests = st.integers(0, 2**32).map(forest)
patient = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
budgets = st.integers(0, 4_000)
limits = st.integers(1, 12)


@patient
@given(parts=forests, budget=budgets, most=limits, empty=st.sets(st.sampled_from(NAMES)))
def test_a_warm_up_places_whole_ways_within_its_budget(
    parts: Parts, budget: int, most: int, empty: set[ReplicaId]
) -> None:
    replica = NAMES[0]
    places = plan_warm_up(
        parts, replica, NAMES, empty={replica, *empty}, budget_tokens=budget, most_places=most
    )
    assert {place.replica for place in places} <= {replica}
    check_places(parts, places, budget, most)


@patient
@given(parts=forests, budget=budgets, most=limits)
def test_a_hand_over_places_whole_ways_within_its_budget(
    parts: Parts, budget: int, most: int
) -> None:
    places = plan_hand_over(parts, NAMES[0], NAMES[1:], budget_tokens=budget, most_places=most)
    assert NAMES[0] not in {place.replica for place in places}
    check_places(parts, places, budget, most)


@patient
@given(parts=forests, empty=st.sets(st.sampled_from(NAMES), min_size=1))
def test_once_all_empty_replicas_are_warm_everything_has_a_holder_and_they_hold_their_share(
    parts: Parts, empty: set[ReplicaId]
) -> None:
    for name, one in parts.items():
        parts[name] = part_with(one, one.holders - empty)
    held = parts
    for replica in sorted(empty):
        places = plan_warm_up(
            held, replica, NAMES, empty=empty, budget_tokens=LOTS, most_places=LOTS
        )
        held = with_places(held, places)
    for one in held.values():
        assert one.holders
        wanted = set(rendezvous(one.name, NAMES)[: one.wanted_holders])
        assert wanted & empty <= one.holders
    for replica in empty:
        again = plan_warm_up(
            held, replica, NAMES, empty=empty, budget_tokens=LOTS, most_places=LOTS
        )
        assert again == []


@patient
@given(parts=forests)
def test_after_a_hand_over_as_many_others_hold_it_as_should(parts: Parts) -> None:
    leaving, others = NAMES[0], NAMES[1:]
    places = plan_hand_over(parts, leaving, others, budget_tokens=LOTS, most_places=LOTS)
    held = with_places(parts, places)
    for name, one in parts.items():
        if leaving in one.holders:
            left = held[name].holders - {leaving}
            assert len(left) >= min(one.wanted_holders, len(others))
    assert plan_hand_over(held, leaving, others, budget_tokens=LOTS, most_places=LOTS) == []


def warm_up_of(replica: str) -> Callable[[Parts, int], list[WarmPlace]]:
    def plan(parts: Parts, budget: int) -> list[WarmPlace]:
        return plan_warm_up(
            parts,
            ReplicaId(replica),
            NAMES,
            empty=[ReplicaId(replica)],
            budget_tokens=budget,
            most_places=9,
        )

    return plan


def test_the_part_that_comes_most_often_goes_first_with_all_before_it() -> None:
    header = part("header", blocks=2, rate=1.0, wanted=5)
    hot = part("hot", header, blocks=4, rate=9.0, wanted=5)
    other = part("other", blocks=4, rate=5.0, wanted=5)
    places = warm_up_of("r0")(named(other, header, hot), 10 * BLOCK)
    assert [(place.name, place.end_tokens, place.new_tokens) for place in places] == [
        (header.name, 2 * BLOCK, 2 * BLOCK),
        (hot.name, 6 * BLOCK, 4 * BLOCK),
        (other.name, 4 * BLOCK, 4 * BLOCK),
    ]


@pytest.mark.parametrize(
    ("left", "ends"), [(0, []), (BLOCK - 1, []), (BLOCK, [1]), (3 * BLOCK + 9, [3]), (LOTS, [4])]
)
def test_what_does_not_fit_is_cut_at_a_block(left: int, ends: list[int]) -> None:
    places = warm_up_of("r0")(named(part("p", blocks=4, wanted=5)), left)
    assert [place.end_tokens // BLOCK for place in places] == ends


def test_what_is_there_of_a_part_is_not_paid_for_again() -> None:
    begun = named(part("p", blocks=4, wanted=5, begun=("r0",)))
    assert warm_up_of("r0")(begun, LOTS)[0][2:] == (4 * BLOCK, 3 * BLOCK)
    assert warm_up_of("r0")(begun, BLOCK)[0][2:] == (2 * BLOCK, BLOCK)


def test_what_another_replica_holds_is_not_placed_where_it_is_not_wanted() -> None:
    one = part("p", wanted=2)
    [first, second, third, *_] = rendezvous(one.name, NAMES)
    held = named(part("p", wanted=2, holders=(first,)))
    assert warm_up_of(second)(held, LOTS)
    assert not warm_up_of(third)(held, LOTS)
    assert warm_up_of(third)(named(one), LOTS), "nobody has it"


def test_of_several_empty_replicas_one_gets_what_nobody_holds() -> None:
    one = part("p")
    [_, second, third, *_] = rendezvous(one.name, NAMES)
    plans = {
        replica: plan_warm_up(
            named(one), replica, NAMES, empty=[third, second], budget_tokens=LOTS, most_places=9
        )
        for replica in (second, third)
    }
    assert plans[second]
    assert not plans[third]


def test_heirs_are_the_next_holders_by_hash() -> None:
    one = part("p", wanted=3, holders=("r0",))
    places = plan_hand_over(
        named(one), ReplicaId("r0"), NAMES[1:], budget_tokens=LOTS, most_places=9
    )
    assert [place.replica for place in places] == rendezvous(one.name, NAMES[1:])[:3]
