from __future__ import annotations

import pytest
from msgspec import structs

from policies.least_loaded import LeastLoaded
from replay.setting import Fault, FleetSettings
from replay.simulate import simulate
from sidecar.clock import LLAMA_8B_H100, StepCost
from support.virtual import PAGE, random_prompts, reference_run, request_of, requests_of

ONE = FleetSettings(
    replicas=1, cost=LLAMA_8B_H100, capacity_tokens=PAGE * 4_096, step_tokens=256, hot=None
)
UNIT = StepCost(
    step_ms=1.0,
    prefill_token_ms=0.0,
    attention_pair_ms=0.0,
    decode_sequence_ms=0.0,
    kv_token_read_ms=0.0,
)


@pytest.mark.parametrize("gap_s", [0.2, 0.02, 0.005])
@pytest.mark.parametrize("seed", range(4))
def test_the_engine_is_as_fast_as_the_workers_scheduler_step_by_step(
    seed: int, gap_s: float
) -> None:
    """With room for everything, macro-steps change no time and no hit."""
    prompts = random_prompts(seed, 120, gap_s=gap_s)
    run = simulate(requests_of(prompts), PAGE, LeastLoaded(), ONE)
    for outcome, (first_s, end_s, cached) in zip(
        run.outcomes, reference_run(prompts, ONE), strict=True
    ):
        assert outcome.cached_tokens == cached
        assert outcome.ttft_s == pytest.approx(first_s - outcome.arrival_s, abs=1e-9)
        assert outcome.duration_s == pytest.approx(end_s - outcome.arrival_s, abs=1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_a_small_memory_preempts_and_everything_still_ends(seed: int) -> None:
    """Nearly as fast as the reference, which keeps pages of answers, too."""
    settings = structs.replace(ONE, capacity_tokens=PAGE * 48)
    prompts = random_prompts(seed, 80, gap_s=0.004)
    run = simulate(requests_of(prompts), PAGE, LeastLoaded(), settings)
    assert all(outcome.error is None for outcome in run.outcomes)
    assert sum(outcome.preemptions for outcome in run.outcomes) > 0
    reference = reference_run(prompts, settings)
    mean_s = sum(outcome.duration_s for outcome in run.outcomes)
    reference_s = sum(
        end - prompt[0] for (_, end, _), prompt in zip(reference, prompts, strict=True)
    )
    assert mean_s == pytest.approx(reference_s, rel=0.2)


def test_an_answer_of_n_tokens_takes_n_steps() -> None:
    settings = structs.replace(ONE, cost=UNIT)
    run = simulate([request_of(0.0, range(32), 10)], PAGE, LeastLoaded(), settings)
    (outcome,) = run.outcomes
    assert outcome.ttft_s == pytest.approx(0.001)
    assert outcome.duration_s == pytest.approx(0.010)
    assert outcome.tpot_s == pytest.approx(0.001)


def test_who_arrives_amid_a_long_answer_starts_with_the_next_step() -> None:
    settings = structs.replace(ONE, cost=UNIT)
    requests = [request_of(0.0, range(32), 1_000), request_of(0.0105, range(64, 96), 1)]
    first, second = simulate(requests, PAGE, LeastLoaded(), settings).outcomes
    assert second.ttft_s == pytest.approx(0.0015)  # the step under way ends at 11 ms
    assert first.duration_s == pytest.approx(1.0)


def test_a_repeated_prompt_is_cached_but_for_its_last_page() -> None:
    requests = [request_of(0.0, range(64), 1), request_of(5.0, range(64), 1)]
    _, second = simulate(requests, PAGE, LeastLoaded(), ONE).outcomes
    assert second.cached_tokens == 48


def test_a_prompt_that_never_fits_is_told_so() -> None:
    settings = structs.replace(ONE, capacity_tokens=PAGE * 4)
    fits, never = simulate(
        [request_of(0.0, range(60), 4), request_of(0.0, range(61), 4)],
        PAGE,
        LeastLoaded(),
        settings,
    ).outcomes
    assert (fits.error, never.error) == (None, "never fits")
    assert never.ttft_s is None


def test_a_host_tier_gives_back_what_was_evicted_where_that_is_cheaper() -> None:
    small = structs.replace(ONE, capacity_tokens=PAGE * 8, host_tokens=PAGE * 100)
    requests = [
        request_of(0.0, range(100), 1),
        request_of(1.0, range(1_000, 1_100), 1),
        request_of(2.0, range(100), 1),
    ]
    quick = simulate(requests, PAGE, LeastLoaded(), structs.replace(small, fetch_token_ms=1e-4))
    slow = simulate(requests, PAGE, LeastLoaded(), structs.replace(small, fetch_token_ms=10.0))
    assert (quick.outcomes[2].cached_tokens, quick.outcomes[2].fetched_tokens) == (96, 80)
    assert (slow.outcomes[2].cached_tokens, slow.outcomes[2].fetched_tokens) == (16, 0)


def test_half_the_speed_takes_twice_the_time() -> None:
    requests = [request_of(0.0, range(200), 20)]
    full = simulate(requests, PAGE, LeastLoaded(), ONE).outcomes[0]
    half = simulate(requests, PAGE, LeastLoaded(), structs.replace(ONE, speeds=(0.5,))).outcomes[0]
    assert half.duration_s == pytest.approx(2 * full.duration_s)


def test_requests_of_a_replica_that_fails_go_again_and_end() -> None:
    prompts = random_prompts(3, 60, gap_s=0.005)
    settings = structs.replace(ONE, replicas=2, faults=(Fault(at_s=0.1, replica=0, down_s=0.2),))
    run = simulate(requests_of(prompts), PAGE, LeastLoaded(), settings)
    assert all(outcome.ttft_s is not None for outcome in run.outcomes)
    late = [one for one in run.outcomes if 0.1 < one.arrival_s < 0.3]
    assert late
    assert {one.replica for one in late} == {"r01"}


def test_the_only_replica_being_down_is_an_error_of_each_request() -> None:
    settings = structs.replace(ONE, faults=(Fault(at_s=0.0, replica=0, down_s=10.0),))
    run = simulate([request_of(1.0, range(40), 1)], PAGE, LeastLoaded(), settings)
    assert run.outcomes[0].error == "no replica"
