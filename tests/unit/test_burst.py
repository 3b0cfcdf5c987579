"""Errors that burst on the candidate's side stop a canary at once, and those of a fleet do not."""

from __future__ import annotations

import random

from router.burst import FAILED, LAST, Burst


def test_ten_failures_of_the_candidate_while_the_control_is_well_are_a_burst() -> None:
    burst, numbers = Burst(), []
    for number in range(1_000):  # long without any
        assert not burst.add(is_candidate=number % 4 == 0, has_failed=False)
    for number in range(60):
        is_candidate = number % 3 == 0
        if burst.add(is_candidate=is_candidate, has_failed=is_candidate):
            numbers.append(number // 3 + 1)
    assert numbers[0] == FAILED
    assert f"{FAILED} of the last {LAST} requests" in burst.words


def test_a_fleet_that_fails_on_both_sides_is_none() -> None:
    for seed in range(200):
        rng, burst = random.Random(seed), Burst()
        for _ in range(400):
            assert not burst.add(is_candidate=rng.random() < 0.5, has_failed=False)
        for _ in range(400):
            is_candidate, has_failed = rng.random() < 0.5, rng.random() < 0.9
            assert not burst.add(is_candidate=is_candidate, has_failed=has_failed), seed


def test_where_the_control_has_nothing_all_of_the_last_have_to_fail() -> None:
    burst = Burst()
    assert not any(burst.add(is_candidate=True, has_failed=True) for _ in range(LAST - 1))
    assert burst.add(is_candidate=True, has_failed=True)
