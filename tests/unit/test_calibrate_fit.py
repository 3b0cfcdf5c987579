"""The robust fit of the step model."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest
from msgspec import structs

from replay.fit import TERMS, FitError, StepRow, fit_steps, solve_nonnegative
from sidecar.clock import LLAMA_8B_H100, StepCost

OVERHEAD_MS = 4.0
OVERHEAD_TOKEN_MS = 0.002


def row(cost: StepCost, work: dict[str, int], factor: float = 1.0) -> StepRow:
    """Return the row that ``cost`` gives, with an error of ``factor``."""
    blank = StepRow(probe="", ms=0.0, **work)
    values = [getattr(cost, name) for name in TERMS] + [OVERHEAD_MS, OVERHEAD_TOKEN_MS]
    ms = sum(value * amount for value, amount in zip(values, blank.features(), strict=True))
    return structs.replace(blank, ms=ms * factor)


def works(*, is_cached: bool = True) -> list[dict[str, int]]:
    cold = [
        {"steps": 1 + n // 2048, "prefill_tokens": n, "attention_pairs": n * (n + 1) // 2}
        for n in (4, 64, 500, 3000, 9000)
    ]
    warm = [
        {"steps": 1, "prefill_tokens": n, "attention_pairs": n * (n + 1) // 2 + n * c}
        for n, c in product((50, 1000), (4000, 9000))
    ]
    came = [{**one, "requests": 1, "prompt_tokens": one["prefill_tokens"]} for one in cold]
    if is_cached:
        came += [
            {**one, "requests": 1, "prompt_tokens": one["prefill_tokens"] + c}
            for one, (_, c) in zip(warm, product((50, 1000), (4000, 9000)), strict=True)
        ]
    decode = [
        {"steps": 40, "decode_sequences": 40 * b, "kv_tokens_read": 40 * b * c}
        for b, c in product((1, 4, 32), (16, 5000))
    ]
    return came + decode


def off(cost: StepCost, true: StepCost) -> float:
    """Return the largest relative error of a term."""
    ratios = [float(getattr(cost, name) / getattr(true, name)) for name in TERMS]
    return max(abs(ratio - 1) for ratio in ratios)


def test_times_without_noise_give_the_terms_back() -> None:
    fit = fit_steps([row(LLAMA_8B_H100, work) for work in works()])
    assert off(fit.cost, LLAMA_8B_H100) < 1e-6
    assert fit.overhead_ms == pytest.approx(OVERHEAD_MS, rel=1e-6)
    assert fit.overhead_token_ms == pytest.approx(OVERHEAD_TOKEN_MS, rel=1e-6)
    assert fit.error < 1e-6
    assert fit.outliers == 0


def test_a_tenth_of_the_times_may_be_several_times_too_long() -> None:
    rng = random.Random(3)
    rows = [row(LLAMA_8B_H100, work, rng.gauss(1, 0.003)) for work in works() * 8]
    for index in rng.sample(range(len(rows)), len(rows) // 10):
        rows[index] = structs.replace(rows[index], ms=rows[index].ms * rng.uniform(1.5, 5))
    fit = fit_steps(rows)
    assert off(fit.cost, LLAMA_8B_H100) < 0.03
    assert fit.outliers >= len(rows) // 10
    assert fit.error < 0.01


def test_no_term_is_negative_and_the_rest_is_the_best_without_it() -> None:
    """Times that fall with the batch: decoding more sequences cannot be a gain."""
    gain = structs.replace(LLAMA_8B_H100, decode_sequence_ms=-0.05)
    fit = fit_steps([row(gain, work) for work in works()])
    assert fit.cost.decode_sequence_ms == 0
    assert min(getattr(fit.cost, name) for name in TERMS) >= 0
    assert fit.cost.step_ms == pytest.approx(gain.step_ms, rel=0.1)


def test_the_nonnegative_solution_is_a_minimum() -> None:
    """At a minimum the slope is 0 along the terms in use, and upward along those at 0."""
    rng = np.random.default_rng(5)
    bound = 0
    for _ in range(50):
        factors = rng.normal(size=(12, 5))
        targets = rng.normal(size=12)
        terms = solve_nonnegative(factors, targets)
        slope = factors.T @ (factors @ terms - targets)
        assert (terms >= 0).all()
        assert np.abs(slope[terms > 0]).max(initial=0) < 1e-9
        assert (slope[terms == 0] > -1e-9).all()
        bound += int((terms == 0).any())
    assert bound > 25


def test_without_cached_prompts_a_prompt_token_has_one_price() -> None:
    fit = fit_steps([row(LLAMA_8B_H100, work) for work in works(is_cached=False)])
    assert fit.overhead_token_ms == 0
    expected = LLAMA_8B_H100.prefill_token_ms + OVERHEAD_TOKEN_MS
    assert fit.cost.prefill_token_ms == pytest.approx(expected, rel=1e-6)
    assert fit.cost.attention_pair_ms == pytest.approx(LLAMA_8B_H100.attention_pair_ms, rel=1e-6)


def test_what_was_not_measured_is_named() -> None:
    prefill_only = [row(LLAMA_8B_H100, work) for work in works() if "requests" in work]
    with pytest.raises(FitError, match="decode_sequence_ms, kv_token_read_ms"):
        fit_steps(prefill_only)
    with pytest.raises(FitError, match="too few"):
        fit_steps(prefill_only[:3])
    with pytest.raises(FitError, match="too few"):
        fit_steps([])


def test_measurements_that_are_all_alike_do_not_pass_for_a_fit() -> None:
    alike = [row(LLAMA_8B_H100, work) for work in works() if work.get("steps") in (1, 40)]
    one_batch = [each for each in alike if each.decode_sequences in (0, 40)]
    same = [each for each in one_batch if each.kv_tokens_read in (0, 640)]
    with pytest.raises(FitError, match="apart"):
        fit_steps(same * 3)


def test_the_parts_of_a_row_add_up_to_its_prediction() -> None:
    rows = [row(LLAMA_8B_H100, work) for work in works()]
    fit = fit_steps(rows)
    parts = fit.parts_ms(rows[3])
    assert sum(parts.values()) == pytest.approx(rows[3].ms, rel=1e-6)
    assert parts["overhead_ms"] == pytest.approx(OVERHEAD_MS, rel=1e-6)
    assert fit.request_ms(1000) == pytest.approx(OVERHEAD_MS + 1000 * OVERHEAD_TOKEN_MS, rel=1e-6)
