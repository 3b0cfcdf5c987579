"""Which replays a report warns of, and which it does not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from replay.caution import ttft_growth
from replay.report import report_run
from support.replayed import outcome, random_run, replayed

if TYPE_CHECKING:
    from replay.outcome import Outcome, ReplayRun

NO_GAIN = "no policy can show a gain"
FALSE_MAXIMUM = "false maximum"


def _warnings(run: ReplayRun, possible_hit_ratio: float | None = None) -> str:
    return "\n".join(report_run("x", run, possible_hit_ratio=possible_hit_ratio).warnings)


def _many(requests: int = 400, **changes: Any) -> tuple[Outcome, ...]:
    return tuple(
        outcome(n, **({"prefix": f"p{n % 50}", "cached_tokens": 40} | changes))
        for n in range(requests)
    )


def test_a_sound_replay_has_no_warnings() -> None:
    assert _warnings(replayed(*_many(), evictions=3)) == ""


def test_no_outcome_is_the_only_warning_of_an_empty_replay() -> None:
    assert report_run("x", replayed(evictions=0)).warnings == (
        "No request ended: there is nothing to report.",
    )


def test_prompts_that_share_nothing_can_show_no_gain() -> None:
    assert NO_GAIN in _warnings(replayed(*_many(prefix="", cached_tokens=0)))


def test_hits_prove_that_there_is_something_to_share() -> None:
    assert NO_GAIN not in _warnings(replayed(*_many(prefix="", cached_tokens=40)))


@pytest.mark.parametrize(("possible", "is_warned"), [(0.019, True), (0.02, False)])
def test_the_possible_hit_ratio_decides_where_it_is_known(
    possible: float, *, is_warned: bool
) -> None:
    assert (NO_GAIN in _warnings(replayed(*_many()), possible)) is is_warned


@pytest.mark.parametrize("prompts", [1, 5])
def test_a_few_repeated_prompts_make_the_hit_ratio_a_false_maximum(prompts: int) -> None:
    run = replayed(
        *(outcome(n, prefix=f"p{n % prompts}", cached_tokens=96) for n in range(400)),
    )
    assert FALSE_MAXIMUM in _warnings(run)


def test_six_prompts_are_not_a_few() -> None:
    run = replayed(*(outcome(n, prefix=f"p{n % 6}", cached_tokens=96) for n in range(600)))
    assert FALSE_MAXIMUM not in _warnings(run)


def test_a_short_system_prompt_is_no_repeated_prompt() -> None:
    assert FALSE_MAXIMUM not in _warnings(replayed(*_many(prefix="p", cached_tokens=20)))


def test_three_requests_are_not_taken_for_three_repeated_prompts() -> None:
    run = replayed(*(outcome(n, prefix=f"p{n}", cached_tokens=96) for n in range(3)))
    assert FALSE_MAXIMUM not in _warnings(run)


def test_a_single_replica_leaves_nothing_to_choose() -> None:
    assert "single replica" in _warnings(replayed(*_many(), replicas=("a",)))
    assert "single replica" not in _warnings(replayed(*_many()))


def test_a_cache_that_was_never_full_compares_no_sizes() -> None:
    assert "never full" in _warnings(replayed(*_many(), evictions=0))
    assert "never full" not in _warnings(replayed(*_many(), evictions=None))


def test_failures_and_unknown_answers_are_told() -> None:
    found = _warnings(
        replayed(*_many(), outcome(400, error="reset"), outcome(401, cached_tokens=None))
    )
    assert "1 of 402 requests failed" in found
    assert "cached tokens of 1 answers" in found


def test_an_answer_without_ttft_is_told() -> None:
    assert "1 answered requests have no known TTFT" in _warnings(
        replayed(*_many(), outcome(400, ttft_s=None))
    )


@pytest.mark.parametrize(("requests", "is_warned"), [(199, True), (200, False)])
def test_p99_of_few_requests_is_one_of_them(requests: int, *, is_warned: bool) -> None:
    assert ("p99 is one or two" in _warnings(replayed(*_many(requests)))) is is_warned


def _growing(seconds_per_second: float, start_s: float = 0.1) -> ReplayRun:
    return replayed(*(outcome(n, ttft_s=start_s + seconds_per_second * n) for n in range(400)))


def test_a_queue_that_grows_to_the_end_is_saturation() -> None:
    assert ttft_growth(_growing(0.1)) == pytest.approx(0.1)
    assert "grows by 100 ms" in _warnings(_growing(0.1))


def test_slow_growth_is_not_saturation() -> None:
    assert "Saturated" not in _warnings(_growing(0.01))


def test_growth_of_less_than_twice_is_not_saturation() -> None:
    assert ttft_growth(_growing(0.1, start_s=60.0)) is None


def test_a_burst_in_the_middle_is_not_saturation() -> None:
    run = replayed(
        *(outcome(n, ttft_s=60.0 if 200 <= n < 300 else 0.1 + n / 1000) for n in range(400))
    )
    assert ttft_growth(run) is None


def test_failed_requests_and_simultaneous_ones_show_no_trend() -> None:
    failed = replayed(*(outcome(n, ttft_s=0.1 * n, error="reset") for n in range(400)))
    at_once = replayed(*(outcome(n, ttft_s=0.1 * n, arrival_s=0.0) for n in range(400)))
    assert ttft_growth(failed) is None
    assert ttft_growth(at_once) is None


def test_fewer_than_40_requests_show_no_trend() -> None:
    assert ttft_growth(replayed(*(outcome(n, ttft_s=0.1 * n) for n in range(39)))) is None
    assert ttft_growth(replayed(*(outcome(n, ttft_s=0.1 * n) for n in range(40)))) is not None


def test_an_infinite_bound_tells_what_was_possible() -> None:
    run = random_run(300)
    bound = replayed(*(outcome(n, cached_tokens=1) for n in range(300)))
    made = report_run("x", run, bounds={"infinite": bound})
    assert made.sharing.possible_hit_ratio == 0.01
    assert NO_GAIN in "\n".join(made.warnings)
