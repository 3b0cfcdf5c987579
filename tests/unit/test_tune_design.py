from __future__ import annotations

import itertools
import random

import pytest

from replay.design import _closest_pair, _one_hypercube, latin_hypercube, pattern
from replay.pareto import is_dominated, pareto_front


@pytest.mark.parametrize(("places", "dimensions"), [(1, 1), (7, 1), (10, 3), (24, 5)])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_each_dimension_has_one_place_per_stratum(places: int, dimensions: int, seed: int) -> None:
    cube = latin_hypercube(places, dimensions, seed)
    assert len(cube) == places
    for axis in range(dimensions):
        assert sorted(int(place[axis] * places) for place in cube) == list(range(places))


def test_a_seed_draws_the_same_hypercube_and_another_one_another() -> None:
    assert latin_hypercube(8, 3, 5) == latin_hypercube(8, 3, 5)
    assert latin_hypercube(8, 3, 5) != latin_hypercube(8, 3, 6)


def test_the_hypercube_is_the_widest_of_those_drawn() -> None:
    chosen, first = latin_hypercube(12, 2, 3), _one_hypercube(12, 2, random.Random(3))
    assert _closest_pair(chosen) > _closest_pair(first)


def test_a_pattern_is_one_step_along_each_axis_and_stays_inside() -> None:
    around = pattern((0.5, 0.95, 0.0), 0.1)
    assert around == (
        (0.4, 0.95, 0.0),
        (0.6, 0.95, 0.0),
        (0.5, 0.85, 0.0),
        (0.5, 1.0, 0.0),
        (0.5, 0.95, 0.1),
    )


def test_who_is_worse_in_one_and_better_in_nothing_is_dominated() -> None:
    assert is_dominated((1, 2), (1, 1))
    assert not is_dominated((1, 1), (1, 1))
    assert not is_dominated((1, 2), (2, 1))


def test_the_front_is_everybody_that_nobody_beats() -> None:
    costs = [(3, 3), (1, 4), (4, 1), (2, 2), (2, 2), (5, 5)]
    assert pareto_front(costs) == (1, 2, 3, 4)
    grid = list(itertools.product(range(3), repeat=3))
    assert pareto_front(grid) == (0,)
    assert pareto_front([]) == ()
