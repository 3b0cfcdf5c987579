"""The mean of a stream and its interval: as from the textbook, and right for values that depend."""

from __future__ import annotations

import random
from statistics import fmean, stdev

import pytest

from replay.interval import student_quantile
from router.running_mean import BATCH, MIN_BATCHES, RunningMean, student_975


def mean_of(values: list[float]) -> RunningMean:
    mean = RunningMean()
    for value in values:
        mean.add(value)
    return mean


def test_the_interval_is_students_over_the_means_of_batches() -> None:
    rng = random.Random(1)
    values = [rng.gauss(3.0, 5.0) for _ in range(BATCH * 20 + 7)]
    told = mean_of(values).told()
    batches = [fmean(values[at * BATCH : (at + 1) * BATCH]) for at in range(20)]
    half = student_quantile(0.95, 19) * stdev(batches) / 20**0.5
    assert told.count == len(values)
    assert told.mean == pytest.approx(fmean(values))
    assert told.low == pytest.approx(fmean(values) - half, rel=1e-3)
    assert told.high == pytest.approx(fmean(values) + half, rel=1e-3)


@pytest.mark.parametrize("freedom", [9, 12, 30, 200])
def test_the_quantile_is_students(freedom: int) -> None:
    assert student_975(freedom) == pytest.approx(student_quantile(0.95, freedom), rel=1e-3)


def test_with_few_values_there_is_a_mean_and_no_interval() -> None:
    assert RunningMean().told().mean is None
    told = mean_of([2.0] * (BATCH * MIN_BATCHES - 1)).told()
    assert (told.mean, told.low, told.high) == (2.0, None, None)
    assert mean_of([2.0] * (BATCH * MIN_BATCHES)).told().low == 2.0


def test_intervals_hold_the_mean_where_each_value_resembles_the_one_before() -> None:
    rng = random.Random(2)
    held = 0
    for _ in range(300):
        mean, value = RunningMean(), rng.gauss(0.0, 1.0)
        for _ in range(BATCH * 25):
            value = 0.7 * value + rng.gauss(0.0, 0.714)
            mean.add(value)
        told = mean.told()
        assert told.low is not None
        assert told.high is not None
        held += told.low <= 0.0 <= told.high
    assert held / 300 > 0.88
