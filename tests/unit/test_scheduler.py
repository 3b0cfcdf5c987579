from __future__ import annotations

import pytest

from sidecar.cache import PagedCache
from sidecar.scheduler import NeverFitsError, Scheduler
from sidecar.scope import Place
from sidecar.step import Phase, SchedulerLimits, Sequence, Step
from state.model import BlockId
from state.prefix import pack_tokens

ROOT = BlockId(b"root".ljust(16))


def _scheduler(pages: int, page_tokens: int = 4, **limits: int) -> Scheduler:
    return Scheduler(PagedCache(pages, page_tokens), SchedulerLimits(**limits))


def _submit(
    scheduler: Scheduler, tokens: int, max_output_tokens: int = 1, first: int = 0
) -> Sequence:
    packed = pack_tokens(range(first, first + tokens))
    return scheduler.submit(scheduler.cache.open_table(packed, Place(ROOT)), max_output_tokens)


def _plan(step: Step) -> list[tuple[int, int]]:
    return [(work.new_tokens, work.context_tokens) for work in step.works]


def _finish(scheduler: Scheduler, step: Step) -> None:
    """Sample token 7 wherever a token is due, and end what reached its limit."""
    for sequence in scheduler.complete(step):
        scheduler.append(sequence, 7)
        if sequence.output_tokens == sequence.max_output_tokens:
            scheduler.end(sequence)


def _run(scheduler: Scheduler) -> int:
    steps = 0
    while scheduler.has_work:
        _finish(scheduler, scheduler.schedule())
        scheduler.cache.pool.audit()
        steps += 1
        assert steps < 10_000
    return steps


def test_a_long_prompt_is_prefilled_in_chunks_of_the_token_budget() -> None:
    scheduler = _scheduler(64, max_step_tokens=16)
    _submit(scheduler, 40, max_output_tokens=2)
    plans = []
    while scheduler.has_work:
        step = scheduler.schedule()
        plans.append(_plan(step))
        _finish(scheduler, step)
    assert plans == [[(16, 0)], [(16, 16)], [(8, 32)], [(1, 40)]]


def test_decoding_sequences_come_before_prefill_and_share_the_budget() -> None:
    scheduler = _scheduler(64, max_step_tokens=16)
    _submit(scheduler, 4, max_output_tokens=5)
    _finish(scheduler, scheduler.schedule())
    _submit(scheduler, 40, first=100)
    assert _plan(scheduler.schedule()) == [(1, 4), (15, 0)]


def test_generated_tokens_fill_pages_and_the_last_one_is_never_cached() -> None:
    scheduler = _scheduler(64, 32)
    _submit(scheduler, 30, max_output_tokens=35)
    _run(scheduler)
    assert scheduler.cache.pool.cached_pages == (30 + 35 - 1) // 32 == 2
    _submit(scheduler, 30, max_output_tokens=34, first=500)
    _run(scheduler)
    assert scheduler.cache.pool.cached_pages == 2 + (30 + 34 - 1) // 32 == 3


def test_the_cached_tokens_of_a_request_are_those_of_its_first_admission() -> None:
    scheduler = _scheduler(64)
    both = [_submit(scheduler, 16)]
    assert [sequence.cached_tokens for sequence in both] == [None]
    _run(scheduler)
    both.append(_submit(scheduler, 16))
    _run(scheduler)
    assert [sequence.cached_tokens for sequence in both] == [0, 12]
    assert (scheduler.counters.queried_tokens, scheduler.counters.hit_tokens) == (32, 12)


def test_equal_prompts_of_one_step_are_prefilled_once() -> None:
    scheduler = _scheduler(64)
    both = [_submit(scheduler, 18) for _ in range(2)]
    assert _plan(scheduler.schedule()) == [(18, 0), (2, 16)]
    assert [sequence.cached_tokens for sequence in both] == [0, 16]


def test_the_youngest_is_preempted_and_still_completes() -> None:
    scheduler = _scheduler(8)
    old = _submit(scheduler, 12, max_output_tokens=20)
    young = _submit(scheduler, 12, max_output_tokens=8, first=100)
    _run(scheduler)
    assert (old.preemptions, young.preemptions > 0) == (0, True)
    assert (old.output_tokens, young.output_tokens) == (20, 8)
    assert scheduler.counters.preemptions == young.preemptions
    assert young.cached_tokens == 0
    assert scheduler.counters.queried_tokens == 24


def test_a_pool_that_barely_fits_one_request_serves_many() -> None:
    scheduler = _scheduler(4)
    for index in range(10):
        _submit(scheduler, 9, max_output_tokens=8, first=100 * index)
    _run(scheduler)
    assert scheduler.counters.generated_tokens == 80
    assert scheduler.cache.pool.held_pages == 0


def test_admission_is_first_come_first_served() -> None:
    scheduler = _scheduler(4)
    _submit(scheduler, 12, max_output_tokens=4)
    large = _submit(scheduler, 16, first=100)
    small = _submit(scheduler, 4, first=200)
    scheduler.schedule()
    assert (large.phase, small.phase) == (Phase.WAITING, Phase.WAITING)
    assert scheduler.cache.pool.free_pages == 1


def test_no_more_sequences_run_than_allowed() -> None:
    scheduler = _scheduler(64, max_sequences=2)
    for index in range(3):
        _submit(scheduler, 4, first=100 * index)
    scheduler.schedule()
    assert (scheduler.running_sequences, scheduler.waiting_sequences) == (2, 1)


def test_an_abort_frees_pages_at_once_in_every_phase() -> None:
    """A18, A30: whatever the moment, nothing stays behind."""
    scheduler = _scheduler(8, max_step_tokens=8)
    running, waiting = _submit(scheduler, 24), _submit(scheduler, 24, first=100)
    step = scheduler.schedule()
    scheduler.end(running)
    scheduler.end(running)
    assert scheduler.cache.pool.held_pages == 0
    assert scheduler.complete(step) == []
    scheduler.end(waiting)
    assert not scheduler.has_work
    scheduler.cache.pool.audit()


def test_what_can_never_fit_is_refused_with_the_limit_in_the_way() -> None:
    scheduler = _scheduler(4, max_sequence_tokens=100)
    with pytest.raises(NeverFitsError, match=r"maximum context length is 100 tokens.*needs 101"):
        _submit(scheduler, 91, max_output_tokens=10)
    with pytest.raises(NeverFitsError, match=r"4 pages of 4 tokens.*needs 5 pages"):
        _submit(scheduler, 16, max_output_tokens=2)
    assert _submit(scheduler, 16, max_output_tokens=1).phase is Phase.WAITING


def test_the_load_of_a_step_counts_pairs_of_prefill_and_contexts_of_decode() -> None:
    scheduler = _scheduler(64, max_step_tokens=16)
    _submit(scheduler, 10, max_output_tokens=3)
    _finish(scheduler, scheduler.schedule())
    _submit(scheduler, 3, first=100)
    load = scheduler.schedule().load()
    assert (load.prefill_tokens, load.attention_pairs) == (3, 1 + 2 + 3)
    assert (load.decode_sequences, load.kv_tokens_read) == (1, 10)
