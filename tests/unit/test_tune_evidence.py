from __future__ import annotations

import math
import random

import pytest

from replay.evidence import effect_of
from replay.interval import Ratio, ratio_interval, student_quantile, student_within
from replay.sensitivity import rank_correlation, sensitivities
from replay.space import Dimension
from replay.trial import Cell, Figures

CELLS = tuple(
    Cell(part="tuning", load=load, seed=seed) for seed in (1, 2, 3) for load in (0.5, 1.0)
)


def figures(ttft_s: float, hit_ratio: float = 0.5, failed: int = 0) -> Figures:
    return Figures(
        ttft_mean_s=ttft_s,
        ttft_p99_s=2 * ttft_s,
        hit_ratio=hit_ratio,
        imbalance=1.5,
        failed=failed,
    )


@pytest.mark.parametrize(
    ("freedom", "expected"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (7, 2.3646), (30, 2.0423), (200, 1.9719)],
)
def test_quantiles_are_those_of_the_tables(freedom: int, expected: float) -> None:
    assert student_quantile(0.95, freedom) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("freedom", [1, 2, 3, 8, 9])
def test_the_quantile_undoes_the_probability(freedom: int) -> None:
    assert student_within(student_quantile(0.8, freedom), freedom) == pytest.approx(0.8)


def test_an_interval_is_that_of_the_logarithms() -> None:
    found = ratio_interval([math.log(0.8), math.log(0.9), math.log(1.0)])
    mean = (0.8 * 0.9 * 1.0) ** (1 / 3)
    assert found.ratio == pytest.approx(mean)
    assert found.low is not None
    assert found.high is not None
    assert found.low * found.high == pytest.approx(mean**2)
    assert (found.low, found.high) == pytest.approx((0.6792, 1.1827), abs=1e-3)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    draw = random.Random(7)
    held = 0
    for _ in range(2_000):
        found = ratio_interval([draw.gauss(0.1, 0.3) for _ in range(5)])
        assert found.low is not None
        assert found.high is not None
        held += found.low < math.exp(0.1) < found.high
    assert 0.94 < held / 2_000 < 0.96


def test_one_value_has_no_interval_and_is_on_no_side() -> None:
    found = ratio_interval([math.log(0.5)])
    assert found == Ratio(ratio=0.5)
    assert not found.is_below_one
    assert not found.is_above_one


def test_traffic_that_differs_between_cells_does_not_blur_a_paired_ratio() -> None:
    present = [figures(0.1 * 7**place) for place in range(6)]
    changed = [figures(0.09 * 7**place) for place in range(6)]
    effect = effect_of(CELLS, present, changed)
    assert effect.ttft_mean.ratio == pytest.approx(0.9)
    assert effect.ttft_mean.low == pytest.approx(0.9)
    assert effect.ttft_mean.is_below_one


def test_loads_add_nothing_to_the_size_of_the_sample() -> None:
    changed = [figures(0.5 if cell.load == 0.5 else 2.0) for cell in CELLS]
    effect = effect_of(CELLS, [figures(1.0)] * 6, changed)
    # Every seed says the same: half at one load, twice at the other.
    assert effect.ttft_mean.ratio == pytest.approx(1.0)
    assert effect.ttft_mean.low == pytest.approx(1.0)
    assert [one.ttft_mean.ratio for one in effect.loads] == pytest.approx([0.5, 2.0])
    assert [one.load for one in effect.loads] == [0.5, 1.0]


def test_the_interval_is_over_seeds() -> None:
    by_seed = {1: 0.8, 2: 0.9, 3: 1.0}
    changed = [figures(by_seed[cell.seed]) for cell in CELLS]
    effect = effect_of(CELLS, [figures(1.0)] * 6, changed)
    assert effect.ttft_mean == ratio_interval([math.log(value) for value in by_seed.values()])


def test_no_hits_on_both_sides_is_no_change_and_on_one_side_has_no_ratio() -> None:
    none, some = [figures(1.0, 0.0)] * 6, [figures(1.0, 0.1)] * 6
    assert effect_of(CELLS, none, none).hit_ratio == Ratio(ratio=1.0, low=1.0, high=1.0)
    unknown = effect_of(CELLS, none, some)
    assert unknown.hit_ratio is None
    assert unknown.costs[2] == -1.0


def test_more_failures_are_counted() -> None:
    effect = effect_of(CELLS, [figures(1.0, failed=1)] * 6, [figures(1.0, failed=3)] * 6)
    assert effect.more_failed == 12


def test_ranks_correlate_whatever_the_shape() -> None:
    xs = [1.0, 2.0, 3.0, 4.0]
    assert rank_correlation(xs, [math.exp(x) for x in xs]) == pytest.approx(1.0)
    assert rank_correlation(xs, [-(x**3) for x in xs]) == pytest.approx(-1.0)
    assert rank_correlation(xs, [1.0, 1.0, 2.0, 2.0]) == pytest.approx(0.8944, abs=1e-4)
    assert rank_correlation(xs, [1.0, 1.0, 2.0, 3.0]) == pytest.approx(0.9487, abs=1e-4)
    assert rank_correlation(xs, [5.0] * 4) is None
    assert rank_correlation([], []) is None


def test_the_weight_that_matters_comes_first_and_a_valley_is_seen() -> None:
    space = tuple(
        Dimension(name=name, low=0.0, high=1.0, is_log=False)
        for name in ("idle", "valley", "slope")
    )
    draw = random.Random(3)
    points = [tuple(draw.random() for _ in space) for _ in range(60)]
    effects = [
        effect_of(
            CELLS,
            [figures(1.0)] * 6,
            [figures(math.exp(2.0 * point[2] + (point[1] - 0.5) ** 2))] * 6,
        )
        for point in points
    ]
    found = {one.name: one for one in sensitivities(space, points, effects, "ttft_mean")}
    assert next(iter(found)) == "slope"
    slope, valley, idle = found["slope"], found["valley"], found["idle"]
    assert slope.ranks["ttft_mean"] is not None
    assert slope.ranks["ttft_mean"] > 0.95
    assert slope.thirds[0] < slope.thirds[1] < slope.thirds[2]
    assert slope.range_effect == pytest.approx(math.exp(2 * 2 / 3), rel=0.25)
    assert abs(idle.ranks["ttft_mean"] or 0.0) < 0.3
    assert valley.ranks["hit_ratio"] is None


def test_too_few_points_say_nothing() -> None:
    space = (Dimension(name="w", low=0.0, high=1.0, is_log=False),)
    effect = effect_of(CELLS, [figures(1.0)] * 6, [figures(2.0)] * 6)
    assert sensitivities(space, [(0.5,)] * 5, [effect] * 5, "ttft_mean") == ()
