"""Intervals beside values that are known otherwise."""

from __future__ import annotations

import math
import random
from statistics import NormalDist

import pytest

from router.confidence import (
    Estimate,
    Interval,
    Known,
    adjusted,
    difference,
    effective_requests,
    evenness,
    multiplier,
    ratio_of_sums,
    student,
    wilson,
)


@pytest.mark.parametrize(
    ("freedom", "quantile", "z"),
    [(14, 2.145, 1.95996), (30, 2.042, 1.95996), (14, 4.140, 3.29053), (60, 3.460, 3.29053)],
)
def test_students_quantiles_are_those_of_the_tables(
    freedom: int, quantile: float, z: float
) -> None:
    assert student(z, freedom) == pytest.approx(quantile, abs=0.01)


def test_wilson_and_newcombe_are_as_newcombe_printed_them() -> None:
    """Newcombe 1998, table II: 56/70 against 48/80, method 10."""
    z = NormalDist().inv_cdf(0.975)
    one, two = (Interval(k / n, *wilson(k / n, n, z)) for k, n in ((56, 70), (48, 80)))
    told = difference(one, two)
    assert (told.low, told.high) == pytest.approx((0.0524, 0.3339), abs=0.0001)


def test_the_mean_of_groups_that_are_alike_is_less_sure_than_that_of_single_requests() -> None:
    rng = random.Random(3)
    parts = []
    for _ in range(32):
        pace, count = rng.lognormvariate(0, 0.5), rng.randrange(5, 50)
        parts.append((pace * count, float(count)))
    told = ratio_of_sums(parts)
    assert told is not None
    single = math.sqrt(sum(n * (total / n - told.value) ** 2 for total, n in parts)) / sum(
        n for _, n in parts
    )
    assert told.error > 3 * single
    few = ratio_of_sums(parts[:7])
    assert few is not None
    assert few.error == math.inf
    assert ratio_of_sums([(0.0, 0.0)]) is None


def test_evenness_does_not_grow_where_a_side_is_small_or_conversations_stay() -> None:
    rng = random.Random(4)

    def side(conversations: int) -> float:
        parts: list[dict[str, float]] = [{} for _ in range(32)]
        for _ in range(conversations):
            part, replica = rng.choice(parts), rng.choice("abcd")
            part[replica] = part.get(replica, 0) + rng.randrange(1, 20)
        told = evenness(parts)
        assert told is not None
        return told.value

    small = [side(60) for _ in range(200)]
    assert sum(small) / len(small) == pytest.approx(0.25, abs=0.01)
    one = evenness([{"a": 3.0} for _ in range(32)])
    assert one == Estimate(1.0, 0.0, 32)


def test_what_was_known_before_makes_the_same_change_sure_sooner() -> None:
    rng = random.Random(5)
    sides: list[list[Known]] = []
    for factor in (1.0, 1.2):
        groups = []
        for _ in range(32):
            rows = [(rng.lognormvariate(0, 1), rng.lognormvariate(0, 1)) for _ in range(50)]
            total = sum(factor * (x + 0.5 * z + rng.gauss(0, 0.1)) for x, z in rows)
            groups.append(Known(total, 50.0, sum(x for x, _ in rows), sum(z for _, z in rows)))
        sides.append(groups)
    plain = [ratio_of_sums([(one.total, one.counted) for one in side]) for side in sides]
    told = adjusted(sides)
    assert told is not None
    for before, after in zip(plain, told, strict=True):
        assert before is not None
        assert after.error < before.error / 4
        assert abs(after.value - before.value) < 4 * before.error
    assert told[1].value / told[0].value == pytest.approx(1.2, abs=0.03)
    same = adjusted([[one._replace(second=2 * one.first) for one in side] for side in sides])
    assert same is not None, "two figures that are one"


def test_a_running_mean_that_is_looked_at_always_leaves_its_interval_in_few_runs() -> None:
    """A normal interval would be left by most of them in so many looks."""
    left = often = 0
    for seed in range(400):
        rng, total = random.Random(seed), 0.0
        has_left = has_left_normal = False
        for number in range(1, 2_001):
            total += rng.gauss(0, 1)
            if number >= 20:
                error = 1 / math.sqrt(number)
                has_left |= abs(total / number) > error * multiplier(error, 0.1, 0.05, 10**6)
                has_left_normal |= abs(total / number) > 1.96 * error
        left += has_left
        often += has_left_normal
    assert left <= 0.05 * 400
    assert often > 0.3 * 400


def test_requests_in_groups_that_fail_together_count_as_fewer() -> None:
    share = ratio_of_sums([(float(10 * (at % 8 == 0)), 10.0) for at in range(32)])
    assert share is not None
    assert effective_requests(share, 320) < 60
    assert effective_requests(Estimate(0.0, 0.0, 32), 320) == 320
