"""The figures of a replay, each beside a case worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replay.score import Slo, imbalance, percentile, regret, score_run, spread
from support.replayed import outcome, replayed


def test_an_unknown_amount_of_cached_tokens_is_left_out_and_counted() -> None:
    score = score_run(
        replayed(
            outcome(0, cached_tokens=50),
            outcome(1, cached_tokens=0),
            outcome(2, cached_tokens=None),
        )
    )
    assert score.request_hit_ratio == 0.5
    assert score.token_hit_ratio == 0.25
    assert (score.prompt_tokens, score.cached_tokens) == (200, 50)
    assert score.hit_unknown_requests == 1


def test_ratios_are_unknown_and_not_zero_where_nothing_is_known() -> None:
    score = score_run(
        replayed(outcome(0, cached_tokens=None, ttft_s=None, replica="", reason=""), span_s=0.0)
    )
    unknown = (
        score.request_hit_ratio,
        score.token_hit_ratio,
        score.prefill_saved_ms,
        score.held_bytes_mean,
        score.ttft.mean_s,
        score.ttft.p99_s,
        score.tpot.p50_s,
        score.goodput.inside_share,
        score.goodput.inside_requests_per_s,
        score.imbalance_requests,
        score.imbalance_prefill,
        score.evictions,
        score.prediction.mean_error_tokens,
    )
    assert unknown == (None,) * len(unknown)
    assert (score.ttft.known, score.ttft.unknown) == (0, 1)
    assert score.reason_unknown_requests == 1


def test_an_empty_replay_has_a_score() -> None:
    score = score_run(replayed())
    assert (score.requests, score.failed, score.token_hit_ratio) == (0, 0, None)


def test_failed_requests_are_in_no_hit_ratio_and_no_time() -> None:
    score = score_run(
        replayed(
            outcome(0, cached_tokens=100, ttft_s=1.0),
            outcome(1, cached_tokens=0, ttft_s=99.0, error="reset"),
        )
    )
    assert (score.requests, score.failed) == (2, 1)
    assert score.token_hit_ratio == 1
    assert (score.ttft.known, score.ttft.mean_s, score.ttft.p99_s) == (1, 1.0, 1.0)
    assert score.tpot.known == 1


def test_prefill_saved_is_the_whole_prompt_less_its_uncached_rest() -> None:
    run = replayed(
        outcome(0, prompt_tokens=100, cached_tokens=60),
        outcome(1, prompt_tokens=10, cached_tokens=0),
        token_ms=2.0,
        attention_pair_ms=0.01,
    )
    # Whole: 2 * 100 + 0.01 * 100 * 50 = 250. Rest: 2 * 40 + 0.01 * 40 * (60 + 20) = 112.
    # The other prompt saves nothing of its 2 * 10 + 0.01 * 10 * 5 = 20.5.
    score = score_run(run)
    assert score.prefill_saved_ms == pytest.approx(138)
    assert score.prefill_saved_share == pytest.approx(138 / 270.5)


def test_prefill_saved_is_unknown_where_its_cost_is() -> None:
    score = score_run(replayed(outcome(cached_tokens=60), token_ms=0.0))
    assert (score.prefill_saved_ms, score.prefill_saved_share) == (None, None)


def test_held_bytes_are_the_mean_over_the_span() -> None:
    run = replayed(outcome(), span_s=10.0, resident_tokens_s=5_000.0, kv_bytes_per_token=8)
    assert score_run(run).held_bytes_mean == 4_000


@pytest.mark.parametrize("missing", ["resident_tokens_s", "kv_bytes_per_token"])
def test_held_bytes_are_unknown_without_either_factor(missing: str) -> None:
    known = {"resident_tokens_s": 5_000.0, "kv_bytes_per_token": 8} | {missing: None}
    assert score_run(replayed(outcome(), **known)).held_bytes_mean is None


def test_a_percentile_interpolates_between_the_closest_ranks() -> None:
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 2.5
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.9) == pytest.approx(3.7)
    assert percentile([7.0], 0.99) == 7.0
    assert percentile([], 0.5) is None


@settings(deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60), st.floats(0, 1))
def test_a_percentile_is_numpys_linear_one(values: list[float], share: float) -> None:
    found = percentile(sorted(values), share)
    assert found is not None
    assert math.isclose(found, float(np.quantile(values, share)), rel_tol=1e-9, abs_tol=1e-6)


def test_a_spread_counts_what_it_does_not_know() -> None:
    found = spread([3.0, None, 1.0, None, 2.0])
    assert (found.known, found.unknown, found.mean_s, found.p50_s) == (3, 2, 2.0, 2.0)


def test_tpot_is_of_the_tokens_after_the_first() -> None:
    score = score_run(
        replayed(
            outcome(0, output_tokens=5, ttft_s=1.0, duration_s=3.0),
            outcome(1, output_tokens=1),
        )
    )
    assert (score.tpot.mean_s, score.tpot.known, score.tpot.unknown) == (0.5, 1, 1)


def test_goodput_needs_both_limits_and_counts_failures_as_outside() -> None:
    slow_stream = outcome(1, ttft_s=1.0, duration_s=9.0)
    score = score_run(
        replayed(
            outcome(0, ttft_s=2.0, duration_s=2.5),
            slow_stream,
            outcome(2, ttft_s=2.1, duration_s=2.2),
            outcome(3, error="reset", ttft_s=0.1),
            outcome(4, ttft_s=None),
            outcome(5, ttft_s=0.5, output_tokens=1),
            span_s=4.0,
        ),
        Slo(ttft_s=2.0, tpot_s=0.1),
    )
    assert score.goodput.inside_requests == 2
    assert score.goodput.unknown_requests == 1
    assert score.goodput.inside_share == 0.4
    assert score.goodput.inside_requests_per_s == 0.5


def test_a_limit_that_is_none_limits_nothing() -> None:
    run = replayed(outcome(0, ttft_s=50.0, duration_s=99.0))
    assert score_run(run, Slo(ttft_s=None, tpot_s=None)).goodput.inside_share == 1
    assert score_run(run, Slo(ttft_s=None, tpot_s=0.1)).goodput.inside_share == 0
    assert score_run(run, Slo(ttft_s=1.0, tpot_s=None)).goodput.inside_share == 0


def test_a_prediction_is_compared_with_what_was_not_fetched() -> None:
    score = score_run(
        replayed(
            outcome(0, predicted_cached_tokens=40, cached_tokens=60, fetched_tokens=20),
            outcome(1, predicted_cached_tokens=30, cached_tokens=20),
            outcome(2, predicted_cached_tokens=0, cached_tokens=20),
            outcome(3, predicted_cached_tokens=None, cached_tokens=20),
            outcome(4, predicted_cached_tokens=10, cached_tokens=None),
        )
    )
    found = score.prediction
    assert (found.compared_requests, found.unknown_requests) == (3, 2)
    assert (found.predicted_tokens, found.actual_tokens) == (70, 80)
    assert found.exact_request_share == pytest.approx(1 / 3)
    assert found.mean_error_tokens == pytest.approx(-10 / 3)
    assert found.mean_abs_error_tokens == 10


def test_without_a_prediction_nothing_was_predicted_rather_than_zero() -> None:
    found = score_run(replayed(outcome(0, predicted_cached_tokens=None))).prediction
    assert (found.predicted_tokens, found.actual_tokens, found.compared_requests) == (None, None, 0)


def test_imbalance_is_the_number_of_replicas_times_the_largest_share() -> None:
    assert imbalance([5, 5], 2) == 1
    assert imbalance([9, 3], 2) == 1.5
    assert imbalance([7], 4) == 4
    assert imbalance([], 4) is None


def test_a_replica_that_nobody_used_counts_for_the_imbalance() -> None:
    score = score_run(
        replayed(
            outcome(0, replica="a", prompt_tokens=100, cached_tokens=90),
            outcome(1, replica="a", prompt_tokens=100, cached_tokens=80),
            outcome(2, replica="b", prompt_tokens=100, cached_tokens=10),
            replicas=("a", "b", "c"),
        )
    )
    assert score.imbalance_requests == 2
    assert score.imbalance_prefill == 3 * 90 / 120
    assert [(r.replica, r.requests, r.uncached_tokens) for r in score.replicas] == [
        ("a", 2, 30),
        ("b", 1, 90),
        ("c", 0, 0),
    ]


def test_a_replica_that_the_run_does_not_list_is_shown_too() -> None:
    score = score_run(replayed(outcome(0, replica="new"), outcome(1, replica="")))
    assert [r.replica for r in score.replicas] == ["a", "b", "new"]


def test_decisions_preemptions_and_held_requests_are_counted() -> None:
    score = score_run(
        replayed(
            outcome(0, reason="spill", preemptions=2, held_s=0.5),
            outcome(1, reason="spill", held_s=0.25),
            outcome(2, reason="load", preemptions=1),
            outcome(3, reason=""),
            evictions=7,
        )
    )
    assert score.reasons == {"load": 1, "spill": 2}
    assert (score.spills, score.reason_unknown_requests) == (2, 1)
    assert (score.preemptions, score.evictions) == (3, 7)
    assert (score.held_requests, score.held_s) == (2, 0.75)


def test_hits_concentrate_on_prefixes_and_tenants() -> None:
    score = score_run(
        replayed(
            outcome(0, prefix="p", tenant="x", cached_tokens=90),
            outcome(1, prefix="p", tenant="x", cached_tokens=0),
            outcome(2, prefix="q", tenant="y", cached_tokens=30),
            outcome(3, prefix="", tenant="y", cached_tokens=5),
        )
    )
    assert score.hits_by_prefix is not None
    assert score.hit_tokens_by_prefix is not None
    assert score.hit_tokens_by_tenant is not None
    assert score.hits_by_prefix.top_1_share == 0.5
    assert score.hit_tokens_by_prefix.top_1_share == 0.75
    assert (score.hit_tokens_by_prefix.groups, score.hit_tokens_by_prefix.unnamed) == (2, 5)
    assert score.hit_tokens_by_tenant.top_1_share == 90 / 125


def test_a_trace_without_tenants_has_no_concentration_over_them() -> None:
    assert score_run(replayed(outcome(cached_tokens=5))).hits_by_tenant is None


def test_regret_compares_request_by_request() -> None:
    run = replayed(
        outcome(0, ttft_s=4.0),
        outcome(1, ttft_s=2.0),
        outcome(2, ttft_s=50.0),
        outcome(3, ttft_s=50.0, error="reset"),
        outcome(4, ttft_s=None),
    )
    bound = replayed(
        outcome(4, ttft_s=1.0),
        outcome(3, ttft_s=1.0),
        outcome(1, ttft_s=2.0),
        outcome(0, ttft_s=1.0),
        outcome(2, ttft_s=None),
    )
    found = regret(run, bound, "pooled")
    assert (found.bound, found.compared_requests, found.unknown_requests) == ("pooled", 2, 3)
    assert found.mean_ttft_ratio == 2
    assert found.mean_difference_s == 1.5


def test_regret_against_nothing_is_unknown() -> None:
    found = regret(replayed(outcome()), replayed(), "pooled")
    assert (found.mean_ttft_ratio, found.mean_difference_s) == (None, None)
