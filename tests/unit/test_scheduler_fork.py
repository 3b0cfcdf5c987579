"""Several answers to one prompt: computed once, shared, and copied when they part."""

from __future__ import annotations

from sidecar.step import Phase
from support.page_rig import PageRig, plan

PROMPT = range(10)  # two full pages and a half


def test_the_prompt_is_computed_once_for_all_answers() -> None:
    rig = PageRig()
    first = rig.submit(PROMPT, 3)
    others = [rig.submit(PROMPT, 3, parent=first) for _ in range(3)]
    step = rig.scheduler.schedule()
    assert plan(step) == [(10, 0)]
    assert step.works[0].forks == tuple(others)
    assert rig.cache.pool.held_pages == 3
    sampling = rig.scheduler.complete(step)
    assert set(sampling) == {first, *others}
    assert [each.cached_tokens for each in others] == [0, 0, 0]
    assert rig.scheduler.counters.prompt_tokens == 10


def test_a_shared_page_is_copied_before_it_is_written_and_the_last_holder_keeps_it() -> None:
    rig = PageRig()
    first = rig.submit(PROMPT, 3)
    others = [rig.submit(PROMPT, 3, parent=first) for _ in range(2)]
    rig.finish(rig.scheduler.schedule())
    shared = first.table.pages[2]
    step = rig.scheduler.schedule()
    assert [source for source, _ in step.moves.copies] == [shared, shared]
    last_pages = [each.table.pages[2] for each in (first, *others)]
    assert len(set(last_pages)) == 3
    assert shared in last_pages
    assert {target for _, target in step.moves.copies} == set(last_pages) - {shared}
    assert all(each.table.pages[:2] == first.table.pages[:2] for each in others)
    rig.finish(step)
    rig.run()
    assert rig.held() == [0]


def test_a_prompt_of_whole_pages_needs_no_copy() -> None:
    rig = PageRig()
    first = rig.submit(range(8), 3)
    rig.submit(range(8), 3, parent=first)
    rig.finish(rig.scheduler.schedule())
    step = rig.scheduler.schedule()
    assert step.moves.copies == []
    rig.finish(step)
    rig.run()


def test_forks_wait_through_all_chunks_and_take_part_in_the_last() -> None:
    rig = PageRig(max_step_tokens=4)
    first = rig.submit(PROMPT, 2)
    fork = rig.submit(PROMPT, 2, parent=first)
    for chunk in range(2):
        step = rig.scheduler.schedule()
        assert (plan(step), step.works[0].forks) == ([(4, 4 * chunk)], ())
        rig.finish(step)
    assert fork.phase is Phase.FORKING
    step = rig.scheduler.schedule()
    assert step.works[0].forks == (fork,)


def test_forks_beyond_the_most_that_may_run_go_their_own_way_and_find_the_pages() -> None:
    rig = PageRig(max_sequences=2)
    first = rig.submit(PROMPT, 1)
    forks = [rig.submit(PROMPT, 1, parent=first) for _ in range(3)]
    step = rig.scheduler.schedule()
    assert step.works[0].forks == (forks[0],)
    assert [each.phase for each in forks[1:]] == [Phase.WAITING] * 2
    rig.finish(step)
    assert plan(rig.scheduler.schedule()) == [(2, 8), (2, 8)]


def test_a_parent_that_leaves_before_the_fork_lets_the_others_compute() -> None:
    rig = PageRig(max_step_tokens=4)
    first = rig.submit(PROMPT, 2)
    forks = [rig.submit(PROMPT, 2, parent=first) for _ in range(2)]
    step = rig.scheduler.schedule()
    rig.scheduler.end(first, "cancelled")
    assert [each.phase for each in forks] == [Phase.WAITING] * 2
    rig.finish(step)
    rig.run()
    assert [each.output_tokens for each in forks] == [2, 2]
    assert rig.held() == [0]


def test_a_parent_that_leaves_in_the_step_that_forks_takes_nobody_with_it() -> None:
    rig = PageRig()
    first = rig.submit(PROMPT, 2)
    fork = rig.submit(PROMPT, 2, parent=first)
    step = rig.scheduler.schedule()
    rig.scheduler.end(first, "cancelled")
    assert rig.scheduler.complete(step) == [fork]
    rig.audit()


def test_a_fork_that_leaves_while_it_waits_or_runs_leaves_the_parent_alone() -> None:
    rig = PageRig()
    first = rig.submit(PROMPT, 2)
    waiting, running = (rig.submit(PROMPT, 2, parent=first) for _ in range(2))
    rig.scheduler.end(waiting, "cancelled")
    step = rig.scheduler.schedule()
    assert step.works[0].forks == (running,)
    rig.scheduler.end(running, "cancelled")
    rig.scheduler.end(running, "cancelled")
    rig.finish(step)
    rig.run()
    assert first.output_tokens == 2
    assert rig.held() == [0]


def test_a_late_sibling_does_not_fork_from_one_that_has_begun_to_answer() -> None:
    rig = PageRig()
    first = rig.submit(PROMPT, 5)
    fork = rig.submit(PROMPT, 5, parent=first)
    rig.finish(rig.scheduler.schedule())
    for parent in (first, fork):
        late = rig.submit(PROMPT, 1, parent=parent)
        assert late.phase is Phase.WAITING
    rig.run()
    assert rig.held() == [0]


def test_a_fork_of_a_fork_that_waits_computes_by_itself() -> None:
    rig = PageRig()
    first = rig.submit(PROMPT, 1)
    fork = rig.submit(PROMPT, 1, parent=first)
    third = rig.submit(PROMPT, 1, parent=fork)
    assert third.phase is Phase.WAITING
    rig.run()
    assert third.output_tokens == 1


def test_a_failed_step_ends_parent_and_forks_and_believes_nothing() -> None:
    rig = PageRig()
    first = rig.submit(PROMPT, 2)
    fork = rig.submit(PROMPT, 2, parent=first)
    step = rig.scheduler.schedule()
    assert set(rig.scheduler.fail(step)) == {first, fork}
    for each in (first, fork):
        rig.scheduler.end(each, "failed")
    rig.audit()
    assert rig.cache.pool.free_pages == rig.cache.pool.total_pages


def test_forks_in_a_pool_that_barely_holds_one_answer_all_finish() -> None:
    """Copies need a page that is not there: the youngest gives way until they do not."""
    rig = PageRig(4)
    first = rig.submit(PROMPT, 7)
    forks = [rig.submit(PROMPT, 7, parent=first) for _ in range(3)]
    rig.run()
    assert [each.output_tokens for each in (first, *forks)] == [7] * 4
    assert rig.scheduler.counters.preemptions > 0
    assert first.preemptions == 0


def test_a_preempted_parent_still_forks_when_it_is_back() -> None:
    rig = PageRig(7, max_step_tokens=8)
    old = rig.submit(range(100, 104), 12)
    first = rig.submit(range(18), 2)
    fork = rig.submit(range(18), 2, parent=first)
    rig.run()
    assert (old.output_tokens, first.output_tokens, fork.output_tokens) == (12, 2, 2)
    assert rig.held() == [0]


def test_pages_of_an_answer_are_not_wasted_beyond_its_last_one() -> None:
    rig = PageRig()
    first = rig.submit(PROMPT, 20)
    forks = [rig.submit(PROMPT, 20, parent=first) for _ in range(2)]
    while rig.scheduler.has_work:
        rig.finish(rig.scheduler.schedule())
        for each in (first, *forks):
            if each.phase is Phase.RUNNING:
                room_tokens = 4 * len(each.table.pages)
                assert 0 <= room_tokens - each.computed_tokens < 4
