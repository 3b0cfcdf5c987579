"""Errors that burst on the candidate's side stop a canary at once; those of a fleet do not.

Nor do those of one client.
"""

from __future__ import annotations

import random

import pytest

from router.burst import FAILED, LAST, PER_GROUP, Burst
from router.split import GROUPS

ENOUGH = FAILED // PER_GROUP
"""Conversations that have to fail."""


def pass_by(burst: Burst, requests: int, bad: set[int], *, is_candidate: bool = True) -> bool:
    """Let requests of all groups end in turn; return whether one of them made a burst."""
    made = False
    for number in range(requests):
        group = number % GROUPS
        made |= burst.add(group, is_candidate=is_candidate, has_failed=group in bad)
    return made


def test_ten_failures_of_the_candidate_while_the_control_is_well_are_a_burst() -> None:
    burst, numbers = Burst(), []
    for number in range(1_000):  # long without any
        group, is_candidate = number // 4 % GROUPS, number % 4 == 0
        assert not burst.add(group, is_candidate=is_candidate, has_failed=False)
    for number in range(60):
        is_candidate = number % 3 == 0
        if burst.add(number // 3 % GROUPS, is_candidate=is_candidate, has_failed=is_candidate):
            numbers.append(number // 3 + 1)
    assert numbers[0] == FAILED
    assert f"{FAILED} of the last {LAST} requests" in burst.words


def test_a_fleet_that_fails_on_both_sides_is_none() -> None:
    for seed in range(200):
        rng, burst = random.Random(seed), Burst()
        for _ in range(400):
            group, is_candidate = rng.randrange(GROUPS), rng.random() < 0.5
            assert not burst.add(group, is_candidate=is_candidate, has_failed=False)
        for _ in range(400):
            group, is_candidate = rng.randrange(GROUPS), rng.random() < 0.5
            has_failed = rng.random() < 0.9
            assert not burst.add(group, is_candidate=is_candidate, has_failed=has_failed), seed


def test_where_the_control_has_nothing_all_of_the_last_have_to_fail() -> None:
    burst = Burst()
    made = [burst.add(group, is_candidate=True, has_failed=True) for group in range(LAST)]
    assert made == [False] * (LAST - 1) + [True]


@pytest.mark.parametrize("by_tenant", [False, True])
def test_one_client_whose_requests_all_fail_makes_no_burst_and_hides_none(
    by_tenant: bool,  # noqa: FBT001 - a case
) -> None:
    """However many it sends, from the first request on, or between everybody else's."""
    burst = Burst(by_tenant=by_tenant)
    if not by_tenant:
        assert not any(burst.add(7, is_candidate=True, has_failed=True) for _ in range(1_000))
    assert not pass_by(burst, 100, set(), is_candidate=False)
    assert not pass_by(burst, 100, set())
    for _ in range(20):
        assert not any(burst.add(7, is_candidate=True, has_failed=True) for _ in range(50))
        assert not pass_by(burst, 50, {7}, is_candidate=False)
        assert not pass_by(burst, 5, set())
    assert pass_by(burst, 2 * LAST, set(range(GROUPS)))


@pytest.mark.parametrize(("failing", "is_burst"), [(ENOUGH - 1, False), (ENOUGH, True)])
def test_so_many_conversations_have_to_fail(failing: int, is_burst: bool) -> None:  # noqa: FBT001
    burst = Burst()
    pass_by(burst, 100, set())
    pass_by(burst, 100, set(), is_candidate=False)
    seen = False
    for _ in range(30):
        for group in range(failing):
            seen |= burst.add(group, is_candidate=True, has_failed=True)
            burst.add(20 + group, is_candidate=False, has_failed=False)
            burst.add(10 + group, is_candidate=False, has_failed=False)
    assert seen is is_burst


def test_one_client_that_fails_on_the_controls_side_hides_no_burst() -> None:
    burst = Burst()
    pass_by(burst, 100, set())
    for number in range(FAILED):
        burst.add(3, is_candidate=False, has_failed=True)
        for group in (4, 5):
            burst.add(group, is_candidate=False, has_failed=False)
        seen = burst.add(number, is_candidate=True, has_failed=True)
    assert seen


def test_two_tenants_that_are_nearly_all_there_is_make_one_where_all_of_theirs_fail() -> None:
    burst = Burst(by_tenant=True)
    made = [burst.add(number % 2, is_candidate=True, has_failed=True) for number in range(18)]
    assert made == [False] * 17 + [True]


@pytest.mark.parametrize(
    ("tenants", "bad", "is_burst"),
    [(1, 1, True), (2, 1, False), (2, 2, True), (4, 1, False), (4, 3, True), (12, 5, True)],
)
def test_of_several_tenants_one_is_not_enough_and_one_alone_is(
    tenants: int,
    bad: int,
    is_burst: bool,  # noqa: FBT001 - a case
) -> None:
    burst = Burst(by_tenant=True)
    for tenant in range(tenants):
        burst.add(tenant, is_candidate=True, has_failed=False)
    seen = False
    for number in range(200):
        for group in (20, 21):
            burst.add(group, is_candidate=False, has_failed=False)
        seen |= burst.add(number % bad, is_candidate=True, has_failed=True)
    assert seen is is_burst
