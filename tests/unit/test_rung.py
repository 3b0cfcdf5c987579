"""The ladder: down at once, up after a clean while, each move counted once."""

from __future__ import annotations

from state.model import Rung
from state.rung import Ladder
from state.timing import MirrorTiming

TIMING = MirrorTiming(stale_after_s=1.0, live_after_s=1.0, local_after_s=60.0)


def _live() -> Ladder:
    ladder = Ladder(TIMING)
    assert ladder.observe(0.0, 0.0)
    assert ladder.rung is Rung.LIVE
    return ladder


def test_without_a_view_it_is_local_and_the_first_view_is_live_at_once() -> None:
    ladder = Ladder(TIMING)
    rungs = [ladder.rung]
    assert not ladder.is_outdated  # what a first snapshot brings is believed at once
    assert not ladder.observe(None, 5.0)
    rungs.append(ladder.rung)
    assert ladder.observe(0.1, 5.1)
    rungs.append(ladder.rung)
    assert rungs == [Rung.LOCAL, Rung.LOCAL, Rung.LIVE]
    assert ladder.entered == {Rung.LIVE: 1}


def test_a_view_that_ages_goes_down_rung_by_rung() -> None:
    ladder = _live()
    rungs = []
    for age_s in (0.9, 1.0, 59.9, 60.0, 500.0):
        ladder.observe(age_s, age_s)
        rungs.append((ladder.rung, ladder.is_outdated))
    assert rungs == [
        (Rung.LIVE, False),
        (Rung.STALE, False),
        (Rung.STALE, False),
        (Rung.LOCAL, True),
        (Rung.LOCAL, True),
    ]
    assert ladder.entered == {Rung.LIVE: 1, Rung.STALE: 1, Rung.LOCAL: 1}


def test_a_fresh_view_is_live_again_only_after_a_while_without_failure() -> None:
    ladder = _live()
    ladder.observe(1.5, 1.5)
    moves = [ladder.observe(0.1, now_s) for now_s in (2.0, 2.5, 2.9)]
    ladder.note_failure()
    moves += [ladder.observe(0.1, now_s) for now_s in (3.0, 3.5, 3.9, 4.0)]
    assert moves == [False] * 6 + [True]
    assert ladder.rung is Rung.LIVE


def test_a_view_that_is_fresh_every_other_second_makes_one_transition() -> None:
    """R-05."""
    ladder = _live()
    for half_s in range(2, 200):
        age_s = 1.2 if half_s % 2 else 0.1
        ladder.observe(age_s, half_s / 2)
    assert ladder.rung is Rung.STALE
    assert ladder.entered == {Rung.LIVE: 1, Rung.STALE: 1}


def test_failures_alone_do_not_age_a_view() -> None:
    ladder = _live()
    for now_s in range(1, 50):
        ladder.note_failure()
        assert not ladder.observe(0.2, float(now_s))
    assert ladder.rung is Rung.LIVE
