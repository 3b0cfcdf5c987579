from __future__ import annotations

import math
from collections import defaultdict
from contextlib import ExitStack
from typing import TYPE_CHECKING, get_args

import msgspec
import pytest

from replay.crew import Alone
from replay.evidence import Objective
from replay.trial import TrialError
from replay.tune import TunePlan, tune
from support.analytic_sweep import BEST, Bench, Counting, Recorded, Surface

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from replay.trial import Cell
    from replay.tune import TuneReport

NOISY = Surface(noise=0.03)
NOISE_ONLY = Surface(depth=0.0, noise=0.05)
SMALL = TunePlan(budget=12, seeds=2, check_seeds=3, loads=(0.7, 1.3))


def never() -> bool:
    return False


@pytest.fixture(name="bench")
def open_bench() -> Iterator[Bench]:
    with ExitStack() as stack:
        yield Bench(stack)


def distance(report: TuneReport) -> float:
    """Return how far the best setting is from the optimum, as the largest factor."""
    assert report.best is not None
    return max(math.exp(abs(math.log(v / b))) for v, b in zip(report.best, BEST, strict=True))


def test_the_optimum_of_a_smooth_surface_is_found(bench: Bench) -> None:
    report = tune(TunePlan(budget=60), bench.sweep(Surface()), never)
    assert distance(report) < 1.1
    assert report.verdict == "confirmed", report.reason


def test_the_optimum_is_found_through_noise(bench: Bench) -> None:
    report = tune(TunePlan(budget=60), bench.sweep(NOISY), never)
    assert distance(report) < 2.5
    assert report.verdict == "confirmed", report.reason


def test_the_steps_after_the_hypercube_are_what_comes_close(bench: Bench) -> None:
    report = tune(TunePlan(budget=60), bench.sweep(Surface()), never)
    explored = [one for one in report.tried if one.origin == "hypercube"]
    nearest = min(explored, key=lambda one: one.effect.ttft_mean.ratio)
    assert max(abs(math.log(v / b)) for v, b in zip(nearest.point, BEST, strict=True)) > 0.1
    assert report.best != nearest.point


def test_steps_that_helped_one_by_one_are_taken_together(bench: Bench) -> None:
    sweep = bench.sweep(Surface(best_queue=0.3), vary="w_prefix,w_recent,w_queue=0.1:10")
    tried = tune(TunePlan(budget=40), sweep, never).tried
    before = [one for one in tried if one.origin != "search"]
    center = min(before, key=lambda one: one.effect.ttft_mean.ratio)
    steps = tried[len(before) : len(before) + 6]
    together = list(center.point)
    for step in steps:
        (axis,) = [i for i in range(3) if step.point[i] != center.point[i]]
        if step.effect.ttft_mean.ratio < center.effect.ttft_mean.ratio:
            together[axis] = step.point[axis]
    assert sum(a != b for a, b in zip(together, center.point, strict=True)) == 2
    assert tried[len(before) + 6].point == tuple(together)


def test_the_held_out_figure_is_that_of_the_winner_on_unseen_seeds(bench: Bench) -> None:
    report = tune(TunePlan(budget=30), bench.sweep(NOISY), never)
    assert report.held_out is not None
    assert report.best is not None
    true_log = -0.1 * sum(math.log(1.0 / b) ** 2 for b in BEST[:1]) - 0.1 * (
        math.log(0.2 / BEST[1]) ** 2
    )
    true_log += 0.1 * sum(math.log(v / b) ** 2 for v, b in zip(report.best, BEST, strict=True))
    interval = report.held_out.effect.ttft_mean
    assert interval.low is not None
    assert interval.high is not None
    assert interval.low < math.exp(true_log) < interval.high


@pytest.mark.parametrize("seed", range(8))
def test_noise_alone_is_called_noise(bench: Bench, seed: int) -> None:
    plan = TunePlan(budget=30, seed=seed)
    report = tune(plan, bench.sweep(NOISE_ONLY), never)
    optimistic = min(one.effect.ttft_mean.ratio for one in report.tried)
    assert optimistic < 0.98, "the search alone would have claimed a gain"
    assert report.verdict == "within_noise"
    assert report.held_out is None


def test_nothing_better_than_the_present_setting_is_no_change(bench: Bench) -> None:
    present_is_best = Surface(depth=-1.0)
    sweep = bench.sweep(present_is_best, vary="w_prefix=3.9:4.1")
    report = tune(TunePlan(budget=6), sweep, never)
    # Upside down the bowl is highest at 4: the present 1.0 is lower than all of 3.9 to 4.1.
    assert report.best is None
    assert report.verdict == "within_noise"
    assert report.check is None


def test_a_held_out_part_that_disagrees_is_said(bench: Bench) -> None:
    report = tune(TunePlan(budget=30), bench.sweep(Surface(noise=0.01, held_out_depth=-1.0)), never)
    assert report.verdict == "not_confirmed"
    assert "held-out part its mean TTFT may be no lower" in report.reason
    assert report.check is not None
    assert report.check.effect.ttft_mean.is_below_one


def test_a_mean_that_the_slowest_pay_for_on_the_held_out_part_is_not_confirmed(
    bench: Bench,
) -> None:
    report = tune(TunePlan(budget=30), bench.sweep(Surface(held_out_p99_depth=-1.0)), never)
    assert report.held_out is not None
    assert report.held_out.effect.ttft_mean.is_below_one
    assert report.verdict == "not_confirmed"
    assert "p99 TTFT is above" in report.reason


def test_a_setting_that_the_slowest_pay_for_does_not_win(bench: Bench) -> None:
    report = tune(TunePlan(budget=30), bench.sweep(Surface(p99_depth=-1.0)), never)
    assert report.best is None
    assert min(one.effect.ttft_mean.ratio for one in report.tried if one.is_on_front) < 0.8


def test_the_objective_is_what_is_lowered(bench: Bench) -> None:
    found = {}
    for objective in get_args(Objective):
        plan = TunePlan(budget=60, objective=objective)
        report = tune(plan, bench.sweep(Surface(p99_shift=2.0)), never)
        assert report.best is not None
        found[objective] = report.best[0]
    assert found["ttft_mean"] == pytest.approx(BEST[0], rel=0.15)
    assert found["ttft_p99"] == pytest.approx(2 * BEST[0], rel=0.15)


def test_loads_at_which_the_fleet_is_saturated_are_told(bench: Bench) -> None:
    assert tune(SMALL, bench.sweep(Surface(growth=0.1)), never).saturated_loads == (1.3,)
    assert tune(SMALL, bench.sweep(Surface(growth=0.01)), never).saturated_loads == ()
    assert tune(SMALL, bench.sweep(Surface()), never).saturated_loads == ()


def test_a_setting_that_fails_more_requests_does_not_win(bench: Bench) -> None:
    report = tune(TunePlan(budget=60), bench.sweep(Surface(fails_above=2.0)), never)
    assert report.best is not None
    assert report.best[0] <= 2.0
    assert all(one.point[0] <= 2.0 for one in report.tried if one.is_on_front)
    assert any(one.point[0] > 2.0 for one in report.tried)


def test_every_setting_meets_the_same_traffic(bench: Bench) -> None:
    crew = Recorded(Alone(NOISY))
    tune(SMALL, bench.sweep(NOISY, crew=crew), never)
    met: dict[object, list[Cell]] = defaultdict(list)
    for policy, cell in zip(crew.policies, crew.cells, strict=True):
        if cell.part == "tuning" and cell.seed < 1_000_000:
            met[policy].append(cell)
    assert len(met) == SMALL.budget + 1
    assert {tuple(cells) for cells in met.values()} == {tuple(next(iter(met.values())))}
    assert len(next(iter(met.values()))) == SMALL.seeds * len(SMALL.loads)


def test_the_judgement_uses_no_seed_of_the_search_and_both_settings(bench: Bench) -> None:
    crew = Recorded(Alone(Surface()))
    report = tune(SMALL, bench.sweep(Surface(), crew=crew), never)
    assert report.check is not None
    assert report.held_out is not None
    searched = {cell.seed for cell in crew.cells[: (SMALL.budget + 1) * 4]}
    checked = {cell.seed for cell in report.check.cells}
    held_out = {cell.seed for cell in report.held_out.cells}
    assert not searched & checked
    assert not searched & held_out
    assert not checked & held_out
    assert {cell.part for cell in report.check.cells} == {"tuning"}
    assert {cell.part for cell in report.held_out.cells} == {"held_out"}
    assert crew.cells[-12:-6] == crew.cells[-6:] == list(report.held_out.cells)


def test_the_budget_is_kept_and_the_progress_adds_up(bench: Bench) -> None:
    watcher = Counting()
    report = tune(SMALL, bench.sweep(Surface(), watcher=watcher), never)
    assert len(report.tried) == SMALL.budget + 1
    assert watcher.begun == [("searching", 13 * 4), ("checking", 12), ("held-out part", 12)]
    assert watcher.advanced == 13 * 4 + 12 + 12


def test_when_the_time_is_up_the_best_so_far_is_judged(bench: Bench) -> None:
    looks = iter([False, True])
    report = tune(TunePlan(budget=60), bench.sweep(Surface()), lambda: next(looks))
    assert len(report.tried) == 9
    assert report.held_out is not None


def test_the_front_has_the_best_of_each_and_nobody_who_is_beaten(bench: Bench) -> None:
    report = tune(TunePlan(budget=30), bench.sweep(Surface()), never)
    front = [one for one in report.tried if one.is_on_front]
    for axis in range(4):
        lowest = min(one.effect.costs[axis] for one in report.tried)
        assert any(one.effect.costs[axis] == lowest for one in front)
    for one in front:
        for other in report.tried:
            pairs = list(zip(one.effect.costs, other.effect.costs, strict=True))
            assert any(a < b for a, b in pairs) or all(a == b for a, b in pairs)


def test_processes_find_what_one_finds(bench: Bench) -> None:
    alone = tune(SMALL, bench.sweep(NOISY), never)
    side_by_side = tune(SMALL, bench.sweep(NOISY, processes=2), never)
    assert msgspec.json.encode(side_by_side) == msgspec.json.encode(alone)


def test_a_process_that_dies_ends_the_sweep_with_an_error(bench: Bench) -> None:
    sweep = bench.sweep(Surface(lethal_above=1.0), processes=2)
    with pytest.raises(TrialError, match="ended before its answer"):
        tune(SMALL, sweep, never)


@pytest.mark.parametrize("stop_after", [1, 17, 55, 60])
def test_an_interrupted_search_goes_on_to_the_same_report(
    bench: Bench, tmp_path: Path, stop_after: int
) -> None:
    whole = tune(SMALL, bench.sweep(NOISY), never)
    path = tmp_path / "journal"
    with ExitStack() as first:
        sweep = Bench(first).sweep(NOISY, journal=path, watcher=Counting(stop_after))
        with pytest.raises(KeyboardInterrupt):
            tune(SMALL, sweep, never)
    crew = Recorded(Alone(NOISY))
    resumed = tune(SMALL, bench.sweep(NOISY, journal=path, crew=crew), never)
    assert msgspec.json.encode(resumed) == msgspec.json.encode(whole)
    assert len(crew.cells) == 13 * 4 + 12 + 12 - stop_after
