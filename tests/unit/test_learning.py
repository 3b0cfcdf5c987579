"""Blocks that no event told of, learned from reports: what they do to the next decisions."""

from __future__ import annotations

import pytest

from policies.expected_ttft import ExpectedTtft
from support.closed_loop import A, B, ClosedLoop, view_of, warm_loop


@pytest.fixture(name="loop")
async def loop_of_two() -> ClosedLoop:
    """Two replicas, of which the first holds the prompt."""
    return await warm_loop(ExpectedTtft())


async def test_what_a_report_proves_counts_where_no_event_told_of_it(loop: ClosedLoop) -> None:
    """B06: blocks of before the sidecar's time are found again on the engine that has them."""
    old = range(90_000, 91_300)
    loop.engines = {B: lambda tokens, _: 1_280 if tokens == old else 0}
    loop.choosing.members = [m for m in loop.choosing.members if m.replica == B]
    assert view_of(loop.ask(old), B).cached_tokens == 0
    loop.rest(3.0)
    choice = loop.ask(old)
    assert view_of(choice, B).cached_tokens == 1_280
    assert loop.choosing.know.learned.resident(B) == 20
    routed = loop.calls[-1].routed
    assert routed is not None
    assert routed.forecasts[B][:3] == (0, 0, 1_280)  # nothing of it is certain
    loop.rest(3.0)
    row = next(r for r in loop.feedback.rows() if r.replica == B)
    assert row.recall == 0.0  # the events did not tell of either

    loop.engines = {B: lambda _, __: 640}
    loop.ask(old)
    assert loop.choosing.know.learned.resident(B) == 10
    loop.rest(3.0)
    assert view_of(loop.ask(old), B).cached_tokens == 640


async def test_an_eviction_that_is_told_ends_what_was_learned_before(loop: ClosedLoop) -> None:
    """Once events tell of a learned block, their word of its end counts, too."""
    old = range(90_000, 91_300)
    loop.engines = {A: lambda _, __: 1_280, B: lambda _, __: 1_280}
    loop.choosing.members = [m for m in loop.choosing.members if m.replica == B]
    loop.ask(old)
    loop.rest(3.0)
    await loop.hold(B, old)
    assert view_of(loop.ask(old), B).cached_tokens == 1_280
    loop.rest(3.0)
    await loop.evict(B, old)
    assert view_of(loop.ask(old), B).cached_tokens == 0


@pytest.mark.parametrize("why", ["choices", "lengths", "placements"])
async def test_what_proves_nothing_is_not_learned(loop: ClosedLoop, why: str) -> None:
    """Siblings share within one request; another prompt was answered; no event tells anyway."""
    old = range(90_000, 91_300)
    loop.engines = {A: lambda _, __: 1_280, B: lambda _, __: 1_280}
    if why == "choices":
        loop.ask(old, choices=2)
    elif why == "lengths":
        loop.ask(old, prompt_tokens=1_400)
    else:
        loop.ask(old, is_exact=False)
    loop.rest(3.0)
    assert not loop.choosing.know.learned


async def test_what_events_tell_within_the_half_second_is_theirs(loop: ClosedLoop) -> None:
    """So that their word of the eviction counts."""
    old = range(90_000, 91_300)
    loop.engines = {A: lambda _, __: 1_280, B: lambda _, __: 1_280}
    chosen = loop.ask(old).member.replica
    await loop.hold(chosen, old)
    loop.rest(3.0)
    assert not loop.choosing.know.learned


async def test_a_clear_and_a_new_life_void_what_was_learned(loop: ClosedLoop) -> None:
    """A clear leaves the trust; a new life begins with neither."""
    old = range(90_000, 91_300)
    loop.engines = {A: lambda _, __: 1_280, B: lambda _, __: 1_280}
    clears: dict[str, int] = {}
    loop.feedback.clears = lambda: clears  # type: ignore[assignment, return-value] # plain names
    chosen = loop.ask(old).member.replica
    loop.rest(3.0)
    assert loop.choosing.know.learned.resident(chosen) == 20
    clears[chosen] = 1
    loop.rest(1.0)
    assert not loop.choosing.know.learned
    assert loop.feedback.rows() != []
    loop.feedback.forget(chosen, "the replica left")
    assert loop.feedback.rows() == []
