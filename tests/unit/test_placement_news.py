"""A placement gives way to what the engine tells, so that it can not hide an eviction."""

from __future__ import annotations

from state.placement import NEWS_S, Placements
from support.fleet_state import A, B, blocks

PROMPT = blocks(0, 1, 2)


def nothing(*_: object) -> bool:
    return False


def everything(*_: object) -> bool:
    return True


def test_a_computed_prompt_counts_until_the_engine_tells_of_it() -> None:
    placements = Placements()
    placement = placements.place(A, PROMPT, now_s=0.0)
    placements.settle(everything, now_s=0.0)
    assert placements.overlap(PROMPT, now_s=0.0) == {A: 3}
    assert placements.await_news(placement, now_s=0.1)
    placements.settle(nothing, now_s=0.1)
    assert placements.overlap(PROMPT, now_s=0.1) == {A: 3}
    placements.settle(lambda replica, block: (replica, block) == (A, PROMPT[-1]), now_s=0.1)
    assert placements.overlap(PROMPT, now_s=0.1) == {}


def test_an_engine_that_tells_nothing_is_waited_for_briefly() -> None:
    placements = Placements()
    placements.await_news(placements.place(A, PROMPT, now_s=0.0), now_s=1.0)
    placements.settle(nothing, now_s=1.0 + NEWS_S / 2)
    assert placements.overlap(PROMPT, now_s=1.0 + NEWS_S / 2) == {A: 3}
    placements.settle(nothing, now_s=1.0 + NEWS_S)
    assert placements.overlap(PROMPT, now_s=1.0 + NEWS_S) == {}


def test_news_of_one_prompt_leave_what_else_was_sent() -> None:
    placements = Placements()
    told = placements.place(A, PROMPT, now_s=0.0)
    placements.place(A, PROMPT[:2], now_s=0.0)
    placements.place(B, PROMPT, now_s=0.0)
    placements.await_news(told, now_s=0.0)
    placements.settle(everything, now_s=0.0)
    assert placements.overlap(PROMPT, now_s=0.0) == {A: 2, B: 3}


def test_a_withdrawn_or_an_empty_placement_awaits_nothing() -> None:
    placements = Placements()
    failed = placements.place(A, PROMPT, now_s=0.0)
    assert placements.withdraw(failed)
    assert not placements.await_news(failed, now_s=0.0)
    assert placements.await_news(placements.place(A, (), now_s=0.0), now_s=0.0)
    placements.place(A, PROMPT, now_s=0.0)
    placements.settle(everything, now_s=0.0)
    assert placements.overlap(PROMPT, now_s=0.0) == {A: 3}
