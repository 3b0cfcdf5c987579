"""Steps that break, preemption, and pools with no room to spare."""

from __future__ import annotations

import pytest

from sidecar.pagechange import PagesRemoved, PagesStored
from sidecar.scheduler import NeverFitsError
from sidecar.step import Phase
from support.page_rig import PageRig, plan


def test_a_failed_step_ends_what_took_part_and_nothing_else() -> None:
    rig = PageRig(max_step_tokens=9)
    runs, waits = rig.submit(range(9), 3), rig.submit(range(100, 109), 3)
    step = rig.scheduler.schedule()
    touched = rig.scheduler.fail(step)
    assert touched == [runs]
    rig.scheduler.end(runs, "failed")
    rig.audit()
    rig.run()
    assert (runs.phase, waits.output_tokens) == (Phase.ENDED, 3)


def test_what_a_failed_step_promised_is_found_by_nobody() -> None:
    rig = PageRig()
    first = rig.submit(range(9), 3)
    step = rig.scheduler.schedule()
    for each in rig.scheduler.fail(step):
        rig.scheduler.end(each, "failed")
    stored, removed = rig.cache.drain_changes()
    assert isinstance(stored, PagesStored)
    assert isinstance(removed, PagesRemoved)
    assert (stored.keys, removed.keys) == (tuple(first.table.chain), tuple(first.table.chain))
    assert rig.answer(range(9)) == 0


def test_pages_of_earlier_steps_survive_a_failed_one() -> None:
    rig = PageRig(max_step_tokens=8)
    rig.submit(range(17), 3)
    rig.finish(rig.scheduler.schedule())
    for each in rig.scheduler.fail(rig.scheduler.schedule()):
        rig.scheduler.end(each, "failed")
    assert rig.answer(range(17)) == 8


def test_one_who_shared_what_the_failed_step_promised_ends_too() -> None:
    rig = PageRig()
    both = [rig.submit(range(18)) for _ in range(2)]
    step = rig.scheduler.schedule()
    assert plan(step) == [(18, 0), (2, 16)]
    assert rig.scheduler.fail(step) == both


def test_one_who_left_during_the_failed_step_leaves_no_content_behind() -> None:
    rig = PageRig()
    gone = rig.submit(range(9))
    step = rig.scheduler.schedule()
    rig.scheduler.end(gone, "cancelled")
    assert rig.cache.pool.cached_pages == 2
    assert rig.scheduler.fail(step) == []
    rig.audit()
    assert rig.cache.pool.free_pages == rig.cache.pool.total_pages


def test_a_pin_on_what_a_failed_step_promised_ends_with_it() -> None:
    rig = PageRig()
    sequence = rig.submit(range(9))
    step = rig.scheduler.schedule()
    assert rig.cache.pin(sequence.table, 1e9) == 2
    for each in rig.scheduler.fail(step):
        rig.scheduler.end(each, "failed")
    rig.audit()
    assert rig.cache.pool.pinned() == []


@pytest.mark.parametrize("host_slots", [0, 16])
def test_a_preempted_sequence_gets_back_what_is_cached_or_was_swapped(host_slots: int) -> None:
    """Recompute: what is evicted meanwhile is lost. Swap: the host has it."""
    rig = PageRig(8, host_slots=host_slots)
    old = rig.submit(range(12), 20)
    young = rig.submit(range(100, 112), 8)
    back = []
    while rig.scheduler.has_work:
        step = rig.scheduler.schedule()
        if young in step.admitted and young.preemptions:
            (work,) = (each for each in step.works if each.sequence is young)
            back.append((work.context_tokens, work.new_tokens, len(step.moves.arrivals)))
        rig.finish(step)
    assert young.preemptions == 1
    assert (old.output_tokens, young.output_tokens, old.preemptions) == (20, 8, 0)
    assert young.cached_tokens == 0
    assert back == [(16, 1, 4) if host_slots else (0, 17, 0)]
    assert rig.held() == ([0, 0] if host_slots else [0])


def test_the_only_sequence_that_runs_is_not_stuck_behind_pins() -> None:
    """It gives its pages back, and in the same step the pins yield and it goes on."""
    rig = PageRig(4)
    rig.answer(range(100, 109))
    assert rig.cache.pin(rig.table(range(100, 109)), 1e9) == 2
    alone = rig.submit(range(8), 5)
    steps = rig.run()
    assert (alone.output_tokens, alone.preemptions) == (5, 1)
    assert steps == 5
    assert rig.cache.pool.pinned() == []


def test_a_waiting_prompt_ends_pins_only_when_nobody_else_could_make_room() -> None:
    rig = PageRig(6)
    rig.answer(range(100, 109))
    rig.cache.pin(rig.table(range(100, 109)), 1e9)
    rig.submit(range(12), 1)
    waits = rig.submit(range(200, 212), 1)
    step = rig.scheduler.schedule()
    assert waits.phase is Phase.WAITING
    assert len(rig.cache.pool.pinned()) == 2
    rig.finish(step)
    rig.run()
    assert waits.output_tokens == 1
    assert len(rig.cache.pool.pinned()) == 2


def test_a_refusal_is_not_repeated_until_pages_were_released() -> None:
    rig = PageRig(4)
    rig.submit(range(12), 4)
    blocked = rig.submit(range(100, 116), 1)
    rig.finish(rig.scheduler.schedule())
    asked = []
    acquire = rig.cache.acquire
    rig.cache.acquire = lambda *a, **k: asked.append(1) or acquire(*a, **k)  # type: ignore[method-assign, func-returns-value]
    rig.finish(rig.scheduler.schedule())
    assert asked == []
    rig.run()
    assert blocked.output_tokens == 1


def test_a_request_for_exactly_the_whole_pool_fits_and_one_token_more_never_does() -> None:
    rig = PageRig(4)
    assert rig.submit(range(16), 1).phase is Phase.WAITING
    assert rig.submit(range(1), 16).phase is Phase.WAITING
    with pytest.raises(NeverFitsError, match="4 pages of 4 tokens; this request needs 5 pages"):
        rig.submit(range(16), 2)
    with pytest.raises(NeverFitsError, match="1 prompt tokens and 17 output tokens"):
        rig.submit(range(1), 17)
    rig.run()


@pytest.mark.parametrize(("prompt", "outputs"), [(0, 1), (1, 0)])
def test_a_request_for_nothing_is_refused(prompt: int, outputs: int) -> None:
    rig = PageRig(4)
    with pytest.raises(ValueError, match="expected tokens"):
        rig.submit(range(prompt), outputs)
