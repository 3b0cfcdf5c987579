"""Pages between the device and the tiers below: what is announced, held and undone."""

from __future__ import annotations

from sidecar.journal import Transition
from sidecar.pagechange import PageChange, PagesRemoved, PagesStored
from sidecar.step import Phase
from support.page_rig import PageRig

LONG = range(17)


def _fill(rig: PageRig, *numbers: int) -> None:
    for number in numbers:
        rig.answer(range(1000 * number, 1000 * number + 17))


def _told(changes: list[PageChange], tier: str) -> list[str]:
    return [
        f"{type(change).__name__} {len(change.keys)}"
        for change in changes
        if isinstance(change, PagesStored | PagesRemoved) and change.tier == tier
    ]


def test_evicted_pages_go_to_the_host_and_both_tiers_tell_so() -> None:
    rig = PageRig(5, host_slots=4)
    rig.answer(LONG)
    rig.cache.drain_changes()
    rig.submit(range(1000, 1017))
    step = rig.scheduler.schedule()
    chain = rig.table(LONG).chain
    assert [each.key for each in step.moves.demotions] == chain[::-1]
    changes = rig.cache.drain_changes()
    assert _told(changes, "device") == ["PagesRemoved 4", "PagesStored 4"]
    assert _told(changes, "host") == ["PagesStored 1"] * 4
    stored = [each for each in changes if isinstance(each, PagesStored) and each.tier == "host"]
    assert [(each.parent, each.token_ids) for each in stored] == [
        (chain[2], [12, 13, 14, 15]),
        (chain[1], [8, 9, 10, 11]),
        (chain[0], [4, 5, 6, 7]),
        (None, [0, 1, 2, 3]),
    ]


def test_a_page_with_another_copy_on_the_device_does_not_go_down() -> None:
    rig = PageRig(6, host_slots=8)
    rig.answer(range(8))
    rig.answer(range(8))  # its last page again, as a second copy
    assert max(rig.cache.tree.copies().values()) == 2
    rig.submit(range(1000, 1017))
    moves = rig.scheduler.schedule().moves
    assert len(moves.demotions) == len({each.key for each in moves.demotions}) == 1


def test_host_slots_are_held_while_a_step_reads_them_though_its_request_has_left() -> None:
    rig = PageRig(5, host_slots=4)
    rig.answer(LONG)
    _fill(rig, 1)
    sequence = rig.submit(LONG)
    step = rig.scheduler.schedule()
    assert [each.source for each in step.moves.arrivals] == ["host"] * 4
    assert rig.host is not None
    rig.scheduler.end(sequence, "cancelled")
    assert rig.host.pool.held_pages == 4
    releases = [each for each in rig.transitions if each.request == sequence.table.request]
    assert releases[-1] == Transition(
        op="release",
        pages=releases[-1].pages,
        request=sequence.table.request,
        why="cancelled",
    )
    rig.finish(step)
    assert rig.held() == [0, 0]


def test_a_host_full_of_slots_that_are_read_takes_nothing_and_counts_it() -> None:
    rig = PageRig(5, host_slots=4)
    rig.answer(LONG)
    _fill(rig, 1)
    rig.submit(LONG)
    step = rig.scheduler.schedule()
    assert rig.host is not None
    assert (len(step.moves.demotions), len(step.moves.arrivals)) == (0, 4)
    assert rig.host.dropped == 4
    rig.finish(step)


def test_what_a_failed_step_should_have_saved_is_taken_back() -> None:
    rig = PageRig(5, host_slots=8)
    rig.answer(LONG)
    rig.submit(range(1000, 1017))
    step = rig.scheduler.schedule()
    rig.cache.drain_changes()
    assert rig.host is not None
    assert len(rig.host) == 4
    for sequence in rig.scheduler.fail(step):
        rig.scheduler.end(sequence, "failed")
    rig.audit()
    assert len(rig.host) == 0
    assert _told(rig.cache.drain_changes(), "host") == ["PagesRemoved 4"]
    assert rig.held() == [0, 0]


def test_a_key_is_unsettled_until_its_step_has_run() -> None:
    rig = PageRig(5, host_slots=8)
    rig.answer(LONG)
    rig.submit(range(1000, 1017))
    step = rig.scheduler.schedule()
    exchange = rig.cache.exchange
    assert exchange is not None
    keys = [each.key for each in step.moves.demotions]
    assert not any(map(exchange.is_settled, keys))
    rig.finish(step)
    assert all(map(exchange.is_settled, keys))


def test_moves_of_a_step_without_works_are_in_the_next_one() -> None:
    rig = PageRig(5, host_slots=8, disk_slots=8)
    rig.keep_on_disk(LONG)
    _fill(rig, 1)
    fetching = rig.submit(LONG)
    empty = rig.scheduler.schedule()
    assert (empty.works, empty.moves.demotions) == ([], [])
    assert empty.admitted == [fetching]
    rig.scheduler.fetched(fetching, [b"x"] * 4)
    step = rig.scheduler.schedule()
    assert (len(step.moves.demotions), len(step.moves.arrivals)) == (4, 4)
    rig.finish(step)
    assert rig.held() == [0, 0, 0]


def test_who_counted_on_what_a_failed_step_had_to_save_ends_with_it() -> None:
    """Admitted before any step ran, fetching host pages that were never written."""
    rig = PageRig(9, host_slots=8, disk_slots=8)
    rig.answer(range(1000, 1009))
    _fill(rig, 2)
    rig.keep_on_disk(LONG)
    first = rig.submit(LONG)
    assert rig.scheduler.schedule().works == []  # it pushed the two oldest pages down
    second = rig.submit(range(1000, 1013))
    assert rig.host is not None
    assert rig.disk is not None
    assert rig.host.leading(second.table.chain) == 2
    rig.disk.restore(second.table.chain[2:], lambda _: None)
    assert rig.scheduler.schedule().works == []
    assert [each.source for each in second.table.incoming] == ["host", "host", "disk"]
    rig.scheduler.fetched(first, [None] * 4)
    step = rig.scheduler.schedule()
    assert [work.sequence for work in step.works] == [first]
    touched = rig.scheduler.fail(step)
    assert set(touched) == {first, second}
    for sequence in touched:
        rig.scheduler.end(sequence, "failed")
    rig.audit()
    assert rig.held() == [0, 0, 0]
    assert len(rig.host) == 0


def test_who_was_admitted_before_a_step_that_ran_does_not_end_with_a_later_one() -> None:
    rig = PageRig(16, host_slots=8, disk_slots=8)
    rig.keep_on_disk(LONG)
    waits, runs = rig.submit(LONG), rig.submit(range(1000, 1009), 3)
    rig.finish(rig.scheduler.schedule())
    step = rig.scheduler.schedule()
    assert rig.scheduler.fail(step) == [runs]
    assert waits.phase is Phase.FETCHING
