"""Telling ids of prefixes from ids of content in bounded memory."""

from __future__ import annotations

from replay.format.kind import IdsKind, IdsWatch

WATCHED = 100


def test_nothing_is_known_before_an_id_came_twice() -> None:
    watch = IdsWatch()
    watch.observe([1, 2, 3])
    watch.observe([])
    assert watch.kind is IdsKind.UNKNOWN


def test_ids_that_keep_their_parents_name_prefixes() -> None:
    watch = IdsWatch()
    watch.observe([1, 2, 3])
    watch.observe([1, 2, 4])
    assert watch.kind is IdsKind.PREFIX


def test_an_id_with_two_parents_names_content_from_then_on() -> None:
    for second in ([5, 2], [2], [2, 1], [1, 1]):
        watch = IdsWatch()
        watch.observe([1, 2])
        watch.observe(second)
        assert watch.kind is IdsKind.CONTENT
        watch.observe([1, 2])
        assert watch.kind is IdsKind.CONTENT


def test_memory_is_bounded_whatever_ids_have_in_common() -> None:
    for step in (1, 2**16, -7, 3):
        watch = IdsWatch(WATCHED)
        for number in range(5_000):
            watch.observe([number * step, number * step + step // 2 + 1])
            assert len(watch._parents) <= WATCHED


def test_content_that_comes_late_is_found_among_many_ids() -> None:
    watch = IdsWatch(WATCHED)
    for number in range(0, 40_000, 2):
        watch.observe([number, number + 1])
    before = watch.kind
    for number in range(0, 40_000, 2):
        watch.observe([number + 1])
    assert (before, watch.kind) == (IdsKind.UNKNOWN, IdsKind.CONTENT)
