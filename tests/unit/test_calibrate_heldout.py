"""Held-out runs: what is drawn, and what the model says of it."""

from __future__ import annotations

import random
from statistics import fmean

import pytest
from msgspec import structs

from replay.fit import StepFit
from replay.heldout import (
    REQUESTS,
    UTILIZATION,
    Arrival,
    HeldOut,
    compare_run,
    draw_run,
    hold_out,
    median_errors,
)
from replay.heldout import RunSettings as Runs
from replay.probe import EngineFacts, draw_tokens
from sidecar.clock import LLAMA_8B_H100, StepCost
from support.stepped_engine import Stepped, SteppedEngine

FACTS = EngineFacts(model="m", context_tokens=8192, step_tokens=512, page_tokens=16)
FIT = StepFit(
    cost=LLAMA_8B_H100, overhead_ms=3.0, overhead_token_ms=0.001, error=0.0, rows=9, outliers=0
)
SLOW = structs.replace(
    FIT,
    cost=StepCost(
        step_ms=20.0,
        prefill_token_ms=0.7,
        attention_pair_ms=1e-4,
        decode_sequence_ms=3.0,
        kv_token_read_ms=0.004,
    ),
)


def served(
    fit: StepFit, arrivals: tuple[Arrival, ...], max_sequences: int = FACTS.max_sequences
) -> HeldOut:
    """Return the run of an engine whose steps take what ``fit`` says, compared with ``fit``."""
    engine = SteppedEngine(
        fit.cost,
        step_tokens=FACTS.step_tokens,
        overhead_ms=fit.overhead_ms,
        overhead_token_ms=fit.overhead_token_ms,
        is_caching=False,
        max_sequences=max_sequences,
    )
    rng = random.Random(0)
    requests = [
        Stepped(one.at_s, draw_tokens(rng, one.prompt_tokens), one.output_tokens)
        for one in arrivals
    ]
    facts = structs.replace(FACTS, max_sequences=max_sequences)
    return compare_run(fit, facts, arrivals, engine.serve(requests))


@pytest.mark.parametrize("fit", [FIT, SLOW])
@pytest.mark.parametrize("seed", range(4))
def test_an_engine_that_keeps_to_the_model_is_predicted(fit: StepFit, seed: int) -> None:
    arrivals = draw_run(random.Random(seed), fit, FACTS, 6000, 6.0)
    run = served(fit, arrivals)
    assert run.requests == len(arrivals)
    assert abs(run.ttft_error) < 0.03
    assert abs(run.tpot_error) < 0.03


def test_requests_wait_for_those_that_run_where_few_may() -> None:
    """Arrivals at once, which an engine that takes two at a time must keep waiting."""
    arrivals = (Arrival(at_s=0.0, prompt_tokens=300, output_tokens=40),) * 9
    free, full = served(FIT, arrivals), served(FIT, arrivals, max_sequences=2)
    assert full.ttft_ms > 5 * free.ttft_ms
    assert abs(full.ttft_error) < 0.03


def test_a_wrong_model_is_found_out() -> None:
    arrivals = draw_run(random.Random(1), SLOW, FACTS, 6000, 6.0)
    engine = SteppedEngine(SLOW.cost, step_tokens=512, overhead_ms=3.0, overhead_token_ms=0.001)
    rng = random.Random(0)
    answers = engine.serve(
        [
            Stepped(one.at_s, draw_tokens(rng, one.prompt_tokens), one.output_tokens)
            for one in arrivals
        ]
    )
    cheap = structs.replace(SLOW.cost, prefill_token_ms=0.35, step_ms=10.0)
    run = compare_run(structs.replace(SLOW, cost=cheap), FACTS, arrivals, answers)
    assert run.ttft_error < -0.3
    assert run.tpot_error < -0.2


@pytest.mark.parametrize("fit", [FIT, SLOW])
@pytest.mark.parametrize("run_s", [2.0, 6.0, 20.0])
def test_a_run_takes_about_its_time_at_a_load_that_is_no_overload(
    fit: StepFit, run_s: float
) -> None:
    spans, works = [], []
    for seed in range(30):
        arrivals = draw_run(random.Random(seed), fit, FACTS, 6000, run_s)
        fewest, most = REQUESTS
        assert fewest <= len(arrivals) <= most
        assert arrivals[0].at_s == 0
        assert max(one.prompt_tokens for one in arrivals) <= 2000
        spans.append(arrivals[-1].at_s)
        works.append(
            sum(
                fit.cost.prefill_token_ms * one.prompt_tokens
                + (fit.cost.step_ms + fit.cost.decode_sequence_ms) * one.output_tokens
                for one in arrivals
            )
        )
    assert fmean(spans) < 1.3 * run_s
    assert 0.5 * UTILIZATION < fmean(works) / 1e3 / fmean(spans) < 1.5 * UTILIZATION


def test_lengths_fit_a_short_context() -> None:
    short = structs.replace(FACTS, context_tokens=128)
    for seed in range(20):
        for one in draw_run(random.Random(seed), FIT, short, 100, 6.0):
            assert one.prompt_tokens + one.output_tokens <= 128
            assert one.output_tokens >= 2


async def test_every_run_is_another_one_of_the_same_seed() -> None:
    asked: list[list[tuple[int, ...]]] = []
    for _ in range(2):
        engine = SteppedEngine(structs.replace(LLAMA_8B_H100, step_ms=0.1))
        fit = structs.replace(FIT, cost=engine.cost, overhead_ms=0.0, overhead_token_ms=0.0)
        plan = Runs(runs=2, seconds=0.2, seed=4)
        runs = await hold_out(engine.ask, engine.clock, fit, FACTS, 300, plan)
        assert len(runs) == 2
        asked.append(sorted(one.tokens for one in engine.asked))
    assert asked[0] == asked[1]
    assert len(set(asked[0])) == len(asked[0])


def test_errors_are_medians_of_what_is_off_either_way() -> None:
    def run(ttft: float, tpot: float) -> HeldOut:
        return HeldOut(
            requests=1,
            ttft_ms=100,
            predicted_ttft_ms=100 * ttft,
            tpot_ms=10,
            predicted_tpot_ms=10 * tpot,
        )

    runs = [run(1.1, 1.0), run(0.8, 0.9), run(1.3, 1.02)]
    ttft, tpot = median_errors(runs)
    assert ttft == pytest.approx(0.2)
    assert tpot == pytest.approx(0.02)
