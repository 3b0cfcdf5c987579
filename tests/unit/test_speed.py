from __future__ import annotations

import random

import pytest

from state.speed import FASTEST, SLOWEST, TELLING_MS, Speeds
from support.fleet_state import A, B


def test_an_unknown_replica_has_speed_one() -> None:
    assert Speeds().of(A) == 1.0


@pytest.mark.parametrize("speed", [0.3, 0.5, 1.0, 2.0, 5.0])
def test_the_speed_of_a_replica_is_learned_through_noise_and_outliers(speed: float) -> None:
    speeds, rng = Speeds(), random.Random(7)
    for _ in range(200):
        stalled = 20.0 if rng.random() < 0.1 else 1.0
        speeds.observe(A, 400.0, stalled * 400.0 / speed * rng.lognormvariate(0.0, 0.3))
    assert speeds.of(A) == pytest.approx(speed, rel=0.2)
    assert speeds.of(B) == 1.0


def test_half_speed_shows_within_a_dozen_requests() -> None:
    speeds = Speeds()
    for _ in range(12):
        speeds.observe(A, 400.0, 800.0)
    assert speeds.of(A) < 0.6


def test_short_waits_teach_nothing() -> None:
    speeds = Speeds()
    for _ in range(100):
        speeds.observe(A, TELLING_MS / 2, 5 * TELLING_MS)
        speeds.observe(A, 400.0, 0.0)
    assert speeds.of(A) == 1.0


def test_the_speed_stays_within_its_bounds() -> None:
    speeds = Speeds()
    for _ in range(2_000):
        speeds.observe(A, 1e6, 1.0)
        speeds.observe(B, 100.0, 1e9)
    assert speeds.of(A) == pytest.approx(FASTEST)
    assert speeds.of(B) == pytest.approx(SLOWEST)
    speeds.forget(A)
    assert speeds.of(A) == 1.0
