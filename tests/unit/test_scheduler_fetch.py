"""Sequences that wait for pages from the disk or from another worker."""

from __future__ import annotations

import pytest

from sidecar.step import Phase
from support.page_rig import FlatPrices, PageRig, plan

LONG = range(17)
PAGE = b"content"


def _rig(**options: object) -> PageRig:
    rig = PageRig(16, host_slots=4, disk_slots=16, **options)  # type: ignore[arg-type]
    rig.keep_on_disk(LONG)
    return rig


def test_a_fetching_sequence_holds_pages_and_lets_others_run() -> None:
    rig = _rig()
    fetching, other = rig.submit(LONG), rig.submit(range(100, 109), 2)
    step = rig.scheduler.schedule()
    assert (fetching.phase, other.phase) == (Phase.FETCHING, Phase.RUNNING)
    assert rig.cache.pool.states()["reserved"] == 4
    assert rig.disk is not None
    assert rig.disk.pool.held_pages == 4
    assert fetching.cached_tokens is None
    rig.finish(step)
    assert plan(rig.scheduler.schedule()) == [(1, 9)]
    assert rig.scheduler.is_fetching


@pytest.mark.parametrize(("came", "reused_tokens"), [(4, 16), (3, 12), (1, 4), (0, 0)])
def test_what_came_is_reused_and_what_follows_the_first_gap_is_computed(
    came: int, reused_tokens: int
) -> None:
    rig = _rig()
    sequence = rig.submit(LONG)
    assert rig.scheduler.schedule().works == []
    contents = [PAGE if index < came else None for index in range(4)]
    if came < 3:
        contents[3] = PAGE
    assert rig.scheduler.fetched(sequence, contents) == reused_tokens
    assert sequence.cached_tokens == reused_tokens
    assert rig.scheduler.counters.hit_tokens == reused_tokens
    step = rig.scheduler.schedule()
    assert plan(step) == [(17 - reused_tokens, reused_tokens)]
    assert [each.content for each in step.moves.arrivals] == [PAGE] * came
    assert [each.depth for each in step.moves.arrivals] == list(range(came))
    rig.finish(step)
    assert rig.cache.pool.cached_pages == 4
    assert rig.held() == [0, 0, 0]


def test_pages_that_came_are_found_by_others_from_the_step_that_loads_them() -> None:
    rig = _rig()
    sequence = rig.submit(LONG)
    rig.scheduler.schedule()
    rig.scheduler.fetched(sequence, [PAGE] * 4)
    assert rig.cache.tree.match(sequence.table.chain, 4) == []
    other = rig.submit(LONG)
    step = rig.scheduler.schedule()
    assert plan(step) == [(1, 16), (1, 16)]
    assert other.cached_tokens == 16
    rig.finish(step)
    assert rig.held() == [0, 0, 0]


def test_a_prefix_on_the_device_is_followed_by_what_the_disk_has() -> None:
    rig = PageRig(16, host_slots=4, disk_slots=16)
    rig.answer(range(9))
    rig.keep_on_disk(LONG)
    sequence = rig.submit(LONG)
    rig.scheduler.schedule()
    assert len(sequence.table.incoming) == 2
    assert rig.scheduler.fetched(sequence, [PAGE, PAGE]) == 16
    step = rig.scheduler.schedule()
    assert [each.depth for each in step.moves.arrivals] == [2, 3]
    rig.finish(step)


def test_host_pages_come_with_the_step_and_nobody_waits() -> None:
    rig = PageRig(5, host_slots=8)
    rig.answer(LONG)
    rig.answer(range(100, 117))
    sequence = rig.submit(LONG)
    step = rig.scheduler.schedule()
    assert plan(step) == [(1, 16)]
    assert sequence.cached_tokens == 16
    rig.finish(step)


def test_a_mixed_run_waits_for_the_disk_and_keeps_its_host_slots() -> None:
    rig = PageRig(5, host_slots=2, disk_slots=8)
    rig.answer(range(9))
    rig.answer(range(100, 117))  # pushes the two pages into the host
    rig.keep_on_disk(LONG)
    sequence = rig.submit(LONG)
    rig.scheduler.schedule()
    assert [each.source for each in sequence.table.incoming] == ["host", "host", "disk", "disk"]
    assert rig.held()[1:] == [2, 4 - 2]
    assert rig.scheduler.fetched(sequence, [None, None, PAGE, None]) == 12
    assert rig.held()[1:] == [2, 0]
    step = rig.scheduler.schedule()
    assert [each.slot is not None for each in step.moves.arrivals] == [True, True, False]
    rig.finish(step)
    assert rig.held() == [0, 0, 0]


@pytest.mark.parametrize("moment", ["fetching", "arrived", "loading"])
def test_an_abort_gives_slots_and_pages_back_whatever_came(moment: str) -> None:
    rig = PageRig(5, host_slots=2, disk_slots=8)
    rig.answer(range(9))
    rig.answer(range(100, 117))
    rig.keep_on_disk(LONG)
    sequence = rig.submit(LONG)
    rig.scheduler.schedule()
    step = None
    if moment != "fetching":
        rig.scheduler.fetched(sequence, [None, None, PAGE, PAGE])
    if moment == "loading":
        step = rig.scheduler.schedule()
    rig.scheduler.end(sequence, "cancelled")
    rig.scheduler.end(sequence, "cancelled")
    rig.audit()
    assert rig.cache.pool.held_pages == 0
    if step is not None:
        rig.finish(step)
    assert rig.held() == [0, 0, 0]
    assert not rig.scheduler.has_work
    assert not rig.scheduler.is_fetching


def test_a_peer_is_asked_once_and_not_again_after_a_preemption() -> None:
    rig = PageRig(16)
    sequence = rig.submit(LONG, 4, has_peer=True)
    rig.scheduler.schedule()
    assert [each.source for each in sequence.table.incoming] == ["peer"] * 4
    rig.scheduler.fetched(sequence, [None] * 4)
    step = rig.scheduler.schedule()
    rig.finish(step)
    rig.scheduler._running.remove(sequence)
    rig.scheduler._preempt(sequence)
    rig.cache.reset()
    step = rig.scheduler.schedule()
    assert sequence.phase is Phase.RUNNING
    assert plan(step) == [(18, 0)]


def test_what_is_cheaper_to_compute_is_not_fetched() -> None:
    rig = _rig(fetch="cheaper", prices=FlatPrices(disk=4.1))
    sequence = rig.submit(LONG)
    assert plan(rig.scheduler.schedule()) == [(17, 0)]
    assert sequence.cached_tokens == 0


def test_a_fetching_sequence_counts_against_the_most_that_may_run() -> None:
    rig = _rig(max_sequences=1)
    rig.submit(LONG)
    rig.submit(range(100, 105))
    assert rig.scheduler.schedule().works == []
    assert (rig.scheduler.running_sequences, rig.scheduler.waiting_sequences) == (1, 1)


def test_a_reset_during_a_fetch_lets_it_finish_unfound() -> None:
    rig = _rig()
    sequence = rig.submit(LONG, 2)
    rig.scheduler.schedule()
    rig.cache.reset()
    rig.scheduler.fetched(sequence, [PAGE] * 4)
    assert rig.run() == 2
    assert rig.cache.tree.copies() == {}
    assert rig.held() == [0, 0, 0]
