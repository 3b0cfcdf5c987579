"""The tests of samples and counts, against values that scipy 1.17 gave."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmroute.two_sample import (
    chi_square_tail,
    kolmogorov_tail,
    ks_distance,
    ks_p_value,
    rejections_allowed,
    uniform_p_value,
)

KOLMOGOROV = [  # scipy.stats.kstwobign.sf
    (0.3, 0.9999906941986655),
    (0.5, 0.9639452436648751),
    (0.8, 0.5441424115741981),
    (1.0, 0.26999967167735456),
    (1.2238, 0.10002342783567782),
    (1.3581, 0.0499996304316674),
    (1.6276, 0.010001537333060776),
    (1.9495, 0.0009998019790258981),
    (2.5, 7.453306344157342e-06),
    (3.5, 4.579469691291106e-11),
]
CHI_SQUARE = [  # scipy.stats.chi2.sf
    (1.0, 1, 0.31731050786291115),
    (3.84, 1, 0.05004352124870519),
    (7.0, 7, 0.42887985755305486),
    (14.07, 7, 0.049950250317479475),
    (40.0, 7, 1.258790387371308e-06),
    (63.0, 63, 0.47630238333813013),
    (103.4, 63, 0.0010092270914614885),
]
samples = st.lists(st.integers(0, 12), min_size=1, max_size=20)


@pytest.mark.parametrize(("z", "expected"), KOLMOGOROV)
def test_the_tail_of_kolmogorov_s_distribution(z: float, expected: float) -> None:
    assert kolmogorov_tail(z) == pytest.approx(expected, rel=1e-9)


def test_the_two_series_meet() -> None:
    values = [kolmogorov_tail(z / 1000) for z in range(1, 4000)]
    assert values == sorted(values, reverse=True)
    assert max(a - b for a, b in itertools.pairwise(values)) < 2e-3
    assert (values[0], kolmogorov_tail(0.0), kolmogorov_tail(-1.0)) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize(("statistic", "degrees", "expected"), CHI_SQUARE)
def test_the_tail_of_chi_square(statistic: float, degrees: int, expected: float) -> None:
    assert chi_square_tail(statistic, degrees) == pytest.approx(expected, rel=1e-9)
    assert chi_square_tail(0.0, degrees) == 1.0


@pytest.mark.parametrize(
    ("distance", "first", "second", "exact"),
    [  # scipy.stats.ks_2samp(method="exact")
        (0.1, 250, 250, 0.16422053981533355),
        (0.16, 250, 250, 0.0032748152279578066),
        (0.164, 250, 250, 0.0023632687259002),
    ],
)
def test_p_values_of_large_samples_are_near_the_exact_ones(
    distance: float, first: int, second: int, exact: float
) -> None:
    assert ks_p_value(distance, first, second) == pytest.approx(exact, rel=0.05)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8], [2.5, 3.5, 9, 10, 11, 12], 2 / 3),
        ([1, 1, 2, 2, 3], [1, 2, 2, 3, 3], 0.2),
        ([1.0], [2.0], 1.0),
        ([5, 5, 5], [5, 5], 0.0),
    ],
)
def test_distances_with_and_without_ties(
    first: list[float], second: list[float], expected: float
) -> None:
    assert ks_distance(first, second) == pytest.approx(expected)


@given(samples, samples)
def test_a_distance_is_that_of_the_two_distribution_functions(
    first: list[int], second: list[int]
) -> None:
    def share(values: list[int], at: int) -> float:
        return sum(value <= at for value in values) / len(values)

    expected = max(abs(share(first, at) - share(second, at)) for at in (*first, *second))
    assert ks_distance(first, second) == pytest.approx(expected)
    assert ks_distance(second, first) == pytest.approx(expected)


def test_equal_samples_are_rejected_as_rarely_as_the_significance_says() -> None:
    rng = random.Random(8)
    draws = [[rng.gauss(0, 1) for _ in range(250)] for _ in range(2000)]
    p_values = [
        ks_p_value(ks_distance(a, b), 250, 250)
        for a, b in zip(draws[::2], draws[1::2], strict=True)
    ]
    assert 0.002 <= sum(p <= 0.01 for p in p_values) / len(p_values) <= 0.02
    assert 0.06 <= sum(p <= 0.1 for p in p_values) / len(p_values) <= 0.14


def test_a_shift_that_is_small_beside_the_spread_is_found() -> None:
    rng = random.Random(9)
    fresh = [rng.gauss(50, 4) for _ in range(250)]
    probes = [rng.gauss(48, 4) for _ in range(250)]
    assert ks_p_value(ks_distance(probes, fresh), 250, 250) < 1e-4


def test_counts_are_uniform_or_not() -> None:
    assert uniform_p_value([20] * 8) == 1.0
    assert uniform_p_value([25, 17, 21, 18, 22, 16, 20, 21]) > 0.5
    assert uniform_p_value([48, 16, 16, 16, 16, 16, 16, 16]) < 1e-4


def test_samples_without_values_and_counts_of_nothing_are_refused() -> None:
    for first, second in (([], [1.0]), ([1.0], [])):
        with pytest.raises(ValueError, match="expected two samples"):
            ks_distance(first, second)
    for counts in ([], [3], [0, 0]):
        with pytest.raises(ValueError, match="expected counts"):
            uniform_p_value(counts)


@pytest.mark.parametrize(
    ("repeats", "significance", "expected"),
    [(1, 0.01, 0), (2, 0.01, 0), (5, 0.01, 1), (20, 0.01, 1), (100, 0.01, 3), (20, 1e-4, 0)],
)
def test_so_many_rejections_are_chance(repeats: int, significance: float, expected: int) -> None:
    """S-05: of 20 repeats one may reject."""
    assert rejections_allowed(repeats, significance) == expected
