"""Pages under random lives: conserved, never aliased, and what they hold is what was computed."""

from __future__ import annotations

from hypothesis import settings

from support.page_machine import PageMachine
from support.soak import WORLD_OPERATIONS, Soak

TestPageMachine = PageMachine.TestCase
TestPageMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_a_slice_of_the_soak_sees_no_violation_and_everything_happens_in_it() -> None:
    soak = Soak(seed=7)
    for _ in range(20_000 // WORLD_OPERATIONS):
        soak.run_world()
    happened = set(soak.done)
    assert happened >= {
        "arrivals",
        "copies",
        "demotions",
        "empty steps",
        "failures",
        "fetches",
        "files",
        "forks",
        "pins",
        "preemptions",
        "refused",
        "abort FETCHING",
        "abort FORKING",
        "abort RUNNING",
        "abort WAITING",
    }
