from __future__ import annotations

import random

import pytest

from state.model import ReplicaId
from state.speed import FASTEST, SLOWEST, TELLING_MS, Speeds
from support.fleet_state import A, B


def taught(speeds: Speeds, replica: ReplicaId, speed: float, times: int, seed: int = 7) -> Speeds:
    """Teach through noise; one of ten requests is stalled."""
    rng = random.Random(seed)
    for _ in range(times):
        stalled = 20.0 if rng.random() < 0.1 else 1.0
        speeds.observe(replica, 400.0, stalled * 400.0 / speed * rng.lognormvariate(0.0, 0.3))
    return speeds


def test_where_nothing_was_learned_the_speed_is_one() -> None:
    assert Speeds().of(A) == 1.0


@pytest.mark.parametrize("speed", [0.3, 0.5, 1.0, 2.0, 5.0])
def test_the_speed_of_a_replica_is_learned_through_noise_and_outliers(speed: float) -> None:
    assert taught(Speeds(), A, speed, 200).of(A) == pytest.approx(speed, rel=0.2)


@pytest.mark.parametrize("speed", [0.25, 0.5, 3.0])
def test_one_that_differs_is_told_from_the_others(speed: float) -> None:
    speeds, others = Speeds(), [ReplicaId(f"r{place}") for place in range(3)]
    for turn in range(150):
        for other in others:
            taught(speeds, other, 1.0, 1, seed=turn)
        taught(speeds, A, speed, 1, seed=turn)
    assert speeds.of(A) == pytest.approx(speed, rel=0.25)
    for other in others:
        assert speeds.of(other) == pytest.approx(1.0, rel=0.25)


def test_what_all_replicas_are_off_by_makes_none_look_better() -> None:
    """The cost model is wrong by 4, and one replica had most of the telling requests."""
    speeds = taught(Speeds(), A, 4.0, 60)
    taught(speeds, B, 4.0, 2)
    newcomer = ReplicaId("new")
    for other in (B, newcomer):
        assert speeds.of(other) == pytest.approx(speeds.of(A), rel=0.2)


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
    fast, slow = Speeds(), Speeds()
    for _ in range(2_000):
        fast.observe(A, 1e6, 1.0)
        slow.observe(A, 100.0, 1e9)
    assert fast.of(A) == pytest.approx(FASTEST)
    assert slow.of(A) == pytest.approx(SLOWEST)


def test_a_replica_that_was_forgotten_counts_as_the_others_do() -> None:
    speeds = Speeds()
    for _ in range(100):
        speeds.observe(A, 400.0, 1_600.0)
        speeds.observe(B, 400.0, 400.0)
    assert speeds.of(A) < 0.5 * speeds.of(B)
    speeds.forget(A)
    assert 0.25 < speeds.of(A) < 1.0
