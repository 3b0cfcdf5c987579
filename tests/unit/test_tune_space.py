from __future__ import annotations

from typing import TYPE_CHECKING, get_args

import pytest

from policies.baselines.bounded_hash import BoundedHash
from policies.expected_ttft import ExpectedTtft
from policies.round_robin import RoundRobin
from policies.union import AnyPolicy
from policies.weighted import Weighted
from replay.space import (
    RANGES,
    Dimension,
    SpaceError,
    kind_of,
    parse_vary,
    point_of,
    policy_at,
    space_of,
)

if TYPE_CHECKING:
    from msgspec import Struct

POLICIES = tuple(dict.fromkeys((*get_args(AnyPolicy), ExpectedTtft)))
LOG = Dimension(name="w", low=0.1, high=10.0, is_log=True)
LINEAR = Dimension(name="w", low=2.0, high=4.0, is_log=False)
WHOLE = Dimension(name="w", low=1.0, high=6.0, is_log=False, is_whole=True)


def refused(policy: Struct, vary: str) -> str:
    with pytest.raises(SpaceError) as caught:
        space_of(policy, parse_vary(vary))
    return str(caught.value)


def test_fields_are_named_with_or_without_a_range() -> None:
    assert parse_vary("w_prefix, w_queue=0.1:10") == {"w_prefix": None, "w_queue": (0.1, 10.0)}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "expected FIELD or FIELD=LOW:HIGH, got ''"),
        ("w_queue=1", "expected FIELD or FIELD=LOW:HIGH, got 'w_queue=1'"),
        ("w_queue=1:2:3", "expected FIELD or FIELD=LOW:HIGH"),
        ("w_queue,w_queue=1:2", "w_queue: named twice"),
        ("w_queue=a:b", "w_queue: expected two numbers LOW:HIGH, got a:b"),
        ("w_queue=2:1", "w_queue: expected LOW below HIGH, got 2:1"),
        ("w_queue=1:1", "w_queue: expected LOW below HIGH"),
        ("w_queue=1:inf", "w_queue: expected LOW below HIGH"),
        ("w_queue=nan:1", "w_queue: expected LOW below HIGH"),
    ],
)
def test_a_bad_list_is_refused_by_its_part(text: str, told: str) -> None:
    with pytest.raises(SpaceError) as caught:
        parse_vary(text)
    assert told in str(caught.value)


def test_a_range_that_the_type_does_not_allow_names_the_field() -> None:
    assert refused(Weighted(), "w_queue=-1:1") == "w_queue: expected `float` >= 0.0, got -1"
    told = refused(Weighted(), "lower_tier_credit=0:2")
    assert told == "lower_tier_credit: expected `float` <= 1.0, got 2"


def test_an_unknown_field_is_told_the_known_ones() -> None:
    told = refused(Weighted(), "w_load")
    assert told.startswith("w_load: not a number of policy weighted, whose numbers are w_queue,")


def test_what_is_no_number_cannot_be_varied() -> None:
    assert "kv_wait: not a number" in refused(ExpectedTtft(), "kv_wait")


def test_a_field_at_zero_needs_a_range() -> None:
    told = refused(Weighted(w_queue=0.0), "w_queue")
    assert told == "w_queue: is 0 and has no range of its own, expected w_queue=LOW:HIGH"


def test_a_policy_without_numbers_says_so() -> None:
    with pytest.raises(SpaceError, match="policy round_robin has no numbers to tune"):
        space_of(RoundRobin())


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_with_keys_has_a_space(policy: type[Struct]) -> None:
    if policy.__struct_fields__:
        space = space_of(policy())
        assert space
        assert all(dimension.low < dimension.high for dimension in space)
    else:
        with pytest.raises(SpaceError, match="has no numbers to tune"):
            space_of(policy())


def test_the_table_names_fields_and_ranges_that_exist() -> None:
    policies = {kind_of(policy()): policy() for policy in POLICIES}
    for kind, ranges in RANGES.items():
        space = space_of(policies[kind])
        assert {d.name: (d.low, d.high) for d in space} == dict(ranges)
        for dimension, present in zip(space, point_of(policies[kind], space), strict=True):
            assert dimension.low < present < dimension.high


def test_a_narrow_type_says_its_whole_range_and_others_are_around_the_present_value() -> None:
    credit, margin = space_of(Weighted(), parse_vary("lower_tier_credit,tie_margin"))
    assert (credit.low, credit.high, credit.is_log) == (0.0, 1.0, False)
    assert (margin.low, margin.high, margin.is_log) == (0.002, 0.2, True)


def test_a_wide_positive_range_goes_by_factors_and_others_by_steps() -> None:
    wide, narrow, zero = space_of(
        Weighted(), parse_vary("w_prefix=0.1:1,w_queue=0.1:0.9,w_recent=0:5")
    )
    assert (wide.is_log, narrow.is_log, zero.is_log) == (True, False, False)


def test_places_and_values_go_both_ways() -> None:
    assert [LOG.value(at) for at in (0, 0.5, 1)] == [0.1, 1.0, 10.0]
    assert [LINEAR.value(at) for at in (0, 0.5, 1)] == [2.0, 3.0, 4.0]
    for dimension in (LOG, LINEAR):
        for at in (0.0, 0.3, 1.0):
            assert dimension.place(dimension.value(at)) == pytest.approx(at, abs=1e-3)


def test_values_stay_inside_and_are_short() -> None:
    assert LOG.value(-0.2) == 0.1
    assert LOG.value(1.2) == 10.0
    assert LOG.value(0.123456) == 0.1766
    assert LOG.place(100.0) == 1.0
    assert {WHOLE.value(at / 100) for at in range(101)} == {1, 2, 3, 4, 5, 6}


def test_a_point_changes_its_own_fields_only() -> None:
    policy = Weighted(tie_margin=0.5)
    space = space_of(policy)
    changed = policy_at(policy, space, (2.0, 0.3))
    assert changed == Weighted(w_prefix=2.0, w_recent=0.3, tie_margin=0.5)
    assert point_of(changed, space) == (2.0, 0.3)


def test_a_whole_field_stays_whole() -> None:
    policy = BoundedHash()
    (dimension,) = space_of(policy, parse_vary("prefix_blocks=1:8"))
    changed = policy_at(policy, (dimension,), (dimension.value(0.6),))
    assert type(changed.prefix_blocks) is int
    assert "prefix_blocks: expected whole numbers" in refused(policy, "prefix_blocks=1:2.5")
