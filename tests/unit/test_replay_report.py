"""The report as a value: slices over time and tenants, comparison, JSON."""

from __future__ import annotations

import json
import time

import pytest

from replay.comparison import compare
from replay.report import Report, report, report_json
from replay.score import Slo, score_run
from replay.timeline import tenant_scores, timeline, ttft_cdf
from support.replayed import outcome, random_run, replayed


def test_buckets_are_equal_stretches_of_the_time_of_arrival() -> None:
    run = replayed(
        outcome(0, arrival_s=10.0, ttft_s=1.0, cached_tokens=50),
        outcome(1, arrival_s=12.0, ttft_s=3.0, cached_tokens=None, replica="b"),
        outcome(2, arrival_s=20.0, ttft_s=None, error="reset"),
        outcome(3, arrival_s=30.0, ttft_s=5.0),
    )
    first, last = timeline(run, 2)
    assert (first.start_s, first.end_s, last.end_s) == (10.0, 20.0, 30.0)
    assert (first.requests, first.rate_per_s) == (2, 0.2)
    assert first.ttft_mean_s == 2.0
    assert first.ttft_p99_s == pytest.approx(2.98)
    assert (first.token_hit_ratio, first.imbalance_requests) == (0.5, 1.0)
    assert (last.requests, last.failed, last.ttft_mean_s) == (2, 1, 5.0)
    assert last.rate_per_s == 0.2
    assert last.imbalance_requests == 2.0


def test_a_bucket_without_requests_knows_nothing_but_its_rate() -> None:
    run = replayed(outcome(0, arrival_s=0.0), outcome(1, arrival_s=30.0))
    middle = timeline(run, 3)[1]
    assert (middle.requests, middle.rate_per_s) == (0, 0.0)
    assert (middle.ttft_mean_s, middle.token_hit_ratio, middle.imbalance_requests) == (None,) * 3


def test_every_request_is_in_one_bucket() -> None:
    run = random_run(997)
    assert sum(bucket.requests for bucket in timeline(run)) == 997
    assert len(timeline(run)) == 48
    assert len(timeline(random_run(57))) == 5


def test_requests_that_arrive_at_once_are_one_bucket_of_unknown_rate() -> None:
    (only,) = timeline(replayed(outcome(0, arrival_s=5.0), outcome(1, arrival_s=5.0)), 10)
    assert (only.requests, only.rate_per_s) == (2, None)
    assert timeline(replayed()) == ()


def test_tenants_come_by_requests_and_then_by_name() -> None:
    run = replayed(
        outcome(0, tenant="z"),
        outcome(1, tenant="y", ttft_s=2.0, cached_tokens=30),
        outcome(2, tenant="", ttft_s=3.0),
        outcome(3, tenant="", ttft_s=9.0, error="reset"),
    )
    found = tenant_scores(run)
    assert [(tenant.tenant, tenant.requests) for tenant in found] == [("", 2), ("y", 1), ("z", 1)]
    assert (found[0].failed, found[0].ttft_mean_s) == (1, 3.0)
    assert found[1].token_hit_ratio == 0.3


def test_the_distribution_of_ttft_goes_from_the_least_to_the_largest() -> None:
    run = replayed(*(outcome(n, ttft_s=float(n)) for n in (4, 2, 0, 3, 1)), outcome(5, ttft_s=None))
    points = [(point.share, point.time_s) for point in ttft_cdf(run, 4)]
    assert points == [(0.0, 0.0), (0.25, 1.0), (0.5, 2.0), (0.75, 3.0), (1.0, 4.0)]
    assert ttft_cdf(replayed()) == ()


def _scored(ttft_s: float | None, cached_tokens: int | None = 50) -> Report:
    run = replayed(outcome(0, ttft_s=ttft_s, duration_s=3.0, cached_tokens=cached_tokens))
    return report({"x": run})


def test_a_comparison_gives_ratios_to_the_pooled_bound() -> None:
    scores = {
        "ours": _scored(2.0, 25).runs[0].score,
        "pooled": _scored(1.0, 50).runs[0].score,
    }
    found = compare(scores)
    ours, pooled = found.rows
    assert found.baseline == "pooled"
    assert (ours.name, ours.ttft_mean_ratio, ours.token_hit_ratio_ratio) == ("ours", 2.0, 0.5)
    assert (ours.ttft_p99_ratio, ours.tpot_mean_ratio) == (2.0, 0.5)
    assert (pooled.ttft_mean_ratio, pooled.inside_requests_per_s_ratio) == (1.0, None)


def test_a_comparison_may_name_its_baseline_or_takes_the_first() -> None:
    scores = {"a": _scored(1.0).runs[0].score, "b": _scored(4.0).runs[0].score}
    assert compare(scores).baseline == "a"
    assert compare(scores, "b").rows[0].ttft_mean_ratio == 0.25


def test_a_ratio_to_something_unknown_is_unknown() -> None:
    scores = {"a": _scored(None, None).runs[0].score, "b": _scored(4.0).runs[0].score}
    row = compare(scores, "a").rows[1]
    assert (row.ttft_mean_ratio, row.token_hit_ratio_ratio) == (None, None)


def test_a_baseline_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="baseline 'c' is none of a"):
        compare({"a": score_run(replayed(outcome()))}, "c")
    with pytest.raises(ValueError, match="nothing to compare"):
        report({})


def test_a_lone_replay_is_compared_with_its_bounds_only() -> None:
    run = random_run(50)
    assert report({"x": run}).comparison is None
    made = report({"x": run}, bounds={"pooled": random_run(50, seed=1)})
    assert made.comparison is not None
    assert [row.name for row in made.comparison.rows] == ["pooled", "x"]
    assert [regret.bound for regret in made.runs[0].regrets] == ["pooled"]


def test_json_has_null_for_unknown_and_units_in_its_names() -> None:
    decoded = json.loads(report_json(_scored(None, None)))
    score = decoded["runs"][0]["score"]
    assert score["token_hit_ratio"] is None
    assert score["ttft"] == {
        "known": 0,
        "unknown": 1,
        "mean_s": None,
        "p50_s": None,
        "p90_s": None,
        "p99_s": None,
    }
    assert score["goodput"]["ttft_limit_s"] == 2.0
    assert decoded["comparison"] is None


def test_the_limits_reach_every_score() -> None:
    made = report(
        {"x": random_run(50)},
        slo=Slo(ttft_s=0.001, tpot_s=None),
        bounds={"pooled": random_run(50, seed=1)},
    )
    assert made.runs[0].score.goodput.inside_share == 0
    assert made.comparison is not None
    assert [row.inside_share for row in made.comparison.rows] == [0, 0]


def test_the_same_replay_gives_the_same_bytes() -> None:
    made = [report_json(report({"x": random_run(300)})) for _ in range(2)]
    assert made[0] == made[1]


def test_twenty_thousand_requests_are_reported_quickly() -> None:
    run = random_run(20_000)
    start_s = time.process_time()
    report({"x": run})
    assert time.process_time() - start_s < 2
