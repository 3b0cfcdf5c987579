"""How few groups stand for how much, and what prompts have in common."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay.concentration import concentration, gini, sharing_facts, top_share
from support.replayed import outcome


def test_gini_of_a_case_by_hand() -> None:
    # Ascending 1, 2, 3, 10: (-3 * 1 - 1 * 2 + 1 * 3 + 3 * 10) / (4 * 16) = 28 / 64.
    assert gini([10, 1, 3, 2]) == 0.4375


def test_gini_is_0_for_equals_and_highest_where_one_has_all() -> None:
    assert gini([5, 5, 5]) == 0
    assert gini([0, 0, 0, 9]) == 0.75
    assert gini([0, 0]) is None
    assert gini([]) is None


@settings(deadline=None)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=30).filter(any))
def test_gini_is_half_the_relative_mean_difference(amounts: list[int]) -> None:
    differences = sum(abs(a - b) for a in amounts for b in amounts) / len(amounts) ** 2
    expected = differences / (2 * sum(amounts) / len(amounts))
    found = gini(amounts)
    assert found is not None
    assert math.isclose(found, expected, abs_tol=1e-12)


def test_top_shares_are_of_the_largest() -> None:
    amounts = [1, 5, 4]
    assert top_share(amounts, 1) == 0.5
    assert top_share(amounts, 2) == 0.9
    assert top_share(amounts, 99) == 1
    assert top_share([0], 1) is None


def test_a_concentration_by_hand() -> None:
    found = concentration({"a": 30, "b": 50, "c": 20, "d": 0, "": 7})
    assert found is not None
    assert (found.groups, found.amount, found.unnamed) == (4, 100, 7)
    assert (found.top_1_share, found.top_10_share, found.half_groups) == (0.5, 1, 1)
    # Ascending 0, 20, 30, 50: (-1 * 20 + 1 * 30 + 3 * 50) / (4 * 100).
    assert found.gini == pytest.approx(0.4)
    assert [(leader.name, leader.share) for leader in found.leaders] == [
        ("b", 0.5),
        ("a", 0.3),
        ("c", 0.2),
    ]


def test_half_of_an_even_amount_is_in_half_of_the_groups() -> None:
    found = concentration({str(number): 1 for number in range(10)})
    assert found is not None
    assert (found.half_groups, found.top_1_share) == (5, 0.1)


def test_groups_without_any_amount_have_unknown_shares() -> None:
    found = concentration({"a": 0, "b": 0})
    assert found is not None
    assert (found.groups, found.top_1_share, found.half_groups, found.gini) == (2, None, None, None)
    assert found.leaders == ()


def test_no_named_group_is_no_concentration() -> None:
    assert concentration({"": 5}) is None


def test_prompts_with_the_same_prefix_and_length_count_as_one() -> None:
    same = [outcome(n, prefix="p", prompt_tokens=100, cached_tokens=80) for n in range(9)]
    facts = sharing_facts([*same, outcome(9, prefix="", cached_tokens=0)])
    assert facts.repeated_prompts == 1
    assert facts.shared_request_share == 0.9
    assert (facts.distinct_prefixes, facts.requests) == (1, 10)
    assert facts.hit_ratio == 0.72


def test_one_system_prompt_before_questions_of_all_lengths_is_many_prompts() -> None:
    facts = sharing_facts([outcome(n, prefix="p", prompt_tokens=100 + n) for n in range(10)])
    assert facts.repeated_prompts == 9


def test_facts_of_nothing_are_unknown() -> None:
    facts = sharing_facts([])
    assert (facts.shared_request_share, facts.repeated_prompts, facts.hit_ratio) == (None,) * 3
