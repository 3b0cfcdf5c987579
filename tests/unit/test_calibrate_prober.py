"""The probes of a calibration, asked of an engine in virtual time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from replay.calibrate import Prober, ProbeSettings
from replay.fit import TERMS, StepFit, fit_steps
from replay.probe import Answer, EngineFacts
from sidecar.clock import LLAMA_8B_H100, StepCost
from support.stepped_engine import SteppedEngine

if TYPE_CHECKING:
    from collections.abc import Sequence

CPU = StepCost(
    step_ms=12.0,
    prefill_token_ms=0.7,
    attention_pair_ms=1.1e-4,
    decode_sequence_ms=3.0,
    kv_token_read_ms=0.004,
)
"""About a model of 88 million parameters on one core."""


async def probe(
    engine: SteppedEngine, seconds: float = 20.0, seed: int = 0, salt: int = 0, **facts: Any
) -> tuple[Prober, StepFit]:
    known = {"context_tokens": 4096, "step_tokens": engine.step_tokens, "page_tokens": 16} | facts
    known.setdefault("max_sequences", engine.max_sequences)
    settings = ProbeSettings(seconds=seconds, seed=seed, salt=salt)
    prober = Prober(engine.ask, engine.clock, EngineFacts(model="m", **known), settings)
    await prober.run()
    return prober, fit_steps(prober.rows)


@pytest.mark.parametrize("cost", [LLAMA_8B_H100, CPU])
@pytest.mark.parametrize(
    "engine",
    [
        {},
        {"step_tokens": 256},
        {"max_sequences": 8},
        {"tells_cached": False},
        {"is_caching": False},
    ],
    ids=str,
)
async def test_the_terms_of_an_engine_are_found(cost: StepCost, engine: dict[str, Any]) -> None:
    stepped = SteppedEngine(cost, overhead_ms=5.0, overhead_token_ms=0.0, **engine)
    _, fit = await probe(stepped)
    for name in TERMS:
        assert getattr(fit.cost, name) == pytest.approx(getattr(cost, name), rel=1e-3), name
    assert fit.overhead_ms == pytest.approx(5.0, rel=1e-3)
    assert fit.overhead_token_ms == pytest.approx(0.0, abs=1e-6)


async def test_what_a_prompt_token_costs_on_its_way_is_no_attention() -> None:
    stepped = SteppedEngine(LLAMA_8B_H100, overhead_ms=2.0, overhead_token_ms=0.001)
    _, fit = await probe(stepped)
    assert fit.overhead_token_ms == pytest.approx(0.001, rel=1e-3)
    true = LLAMA_8B_H100.attention_pair_ms
    assert fit.cost.attention_pair_ms == pytest.approx(true, rel=1e-3)


@pytest.mark.parametrize("cost", [LLAMA_8B_H100, CPU])
@pytest.mark.parametrize("seconds", [10.0, 45.0])
async def test_it_ends_in_time_after_whole_rounds(cost: StepCost, seconds: float) -> None:
    stepped = SteppedEngine(cost)
    prober, _ = await probe(stepped, seconds)
    assert prober.rounds >= 1
    assert 0.9 * seconds < stepped.now_s < 1.3 * seconds


async def test_a_slow_engine_gets_shorter_prompts_and_one_round() -> None:
    fast, slow = SteppedEngine(LLAMA_8B_H100), SteppedEngine(CPU)
    long, _ = await probe(fast)
    short, _ = await probe(slow, 4.0)
    assert short.longest_tokens < long.longest_tokens
    assert short.rounds == 1


@pytest.mark.parametrize(
    "facts",
    [
        {"context_tokens": 512},
        {"context_tokens": 64},
        {"context_tokens": 32_768, "capacity_tokens": 1_000},
    ],
    ids=str,
)
async def test_no_request_is_longer_than_the_engine_takes(facts: dict[str, int]) -> None:
    stepped = SteppedEngine(LLAMA_8B_H100)
    prober, _ = await probe(stepped, 5.0, **facts)
    longest = max(len(one.tokens) + one.output_tokens for one in stepped.asked)
    assert longest <= min(facts.values())
    assert longest > 0.4 * min(facts.values())
    assert prober.asked_tokens == sum(len(one.tokens) for one in stepped.asked)


async def test_no_more_is_asked_at_a_time_than_fits_in_a_step() -> None:
    for max_sequences in (1, 3, 64):
        stepped = SteppedEngine(LLAMA_8B_H100, max_sequences=max_sequences)
        if max_sequences == 1:
            await _run(stepped)  # nothing tells what a second sequence takes: no fit
        else:
            await probe(stepped, 5.0)
        sent = [one.sent_s for one in stepped.asked]
        assert max(map(sent.count, sent)) <= max_sequences
        assert max(map(sent.count, sent)) == min(32, {1: 1, 3: 2, 64: 32}[max_sequences])


async def _run(stepped: SteppedEngine) -> None:
    facts = EngineFacts(model="m", max_sequences=stepped.max_sequences)
    await Prober(stepped.ask, stepped.clock, facts, ProbeSettings(seconds=2.0)).run()


async def test_a_batch_wider_than_the_engine_said_is_not_tried_again() -> None:
    stepped = SteppedEngine(LLAMA_8B_H100, max_sequences=8)
    _, fit = await probe(stepped, 20.0, max_sequences=256)
    sent = [one.sent_s for one in stepped.asked]
    assert sum(sent.count(time_s) == 16 for time_s in set(sent)) == 1
    true = LLAMA_8B_H100.decode_sequence_ms
    assert fit.cost.decode_sequence_ms == pytest.approx(true, rel=1e-3)


async def test_a_length_that_takes_unexpectedly_long_is_not_asked_again() -> None:
    """Doubling foresees what follows from the model, and not an engine that swaps."""
    stepped = SteppedEngine(LLAMA_8B_H100)

    async def ask(tokens: Sequence[int], output_tokens: int) -> Answer:
        answer = await stepped.ask(tokens, output_tokens)
        if len(tokens) <= 1_000:
            return answer
        stepped.now_s += 5.0
        late_s = tuple(time_s + 5.0 for time_s in answer.times_s)
        return Answer(sent_s=answer.sent_s, times_s=late_s, cached_tokens=answer.cached_tokens)

    facts = EngineFacts(model="m", context_tokens=8192, page_tokens=16)
    prober = Prober(ask, stepped.clock, facts, ProbeSettings(seconds=20.0))
    await prober.run()
    assert prober.longest_tokens == 512
    assert stepped.now_s < 1.3 * 20.0


async def test_the_same_seed_asks_the_same() -> None:
    engines = [SteppedEngine(LLAMA_8B_H100) for _ in range(3)]
    for engine, seed in zip(engines, (1, 1, 2), strict=True):
        await probe(engine, 5.0, seed)
    first, same, other = ([one.tokens for one in engine.asked] for engine in engines)
    assert first == same
    assert first != other


async def test_another_salt_asks_for_the_same_lengths_and_finds_nothing_cached() -> None:
    engine, again = SteppedEngine(LLAMA_8B_H100), SteppedEngine(LLAMA_8B_H100)
    await probe(engine, 5.0, 1)
    cached = sum(one.cached for one in engine.asked)
    first, engine.asked, engine.now_s = engine.asked, [], 0.0
    await probe(engine, 5.0, 1, salt=1)
    assert [len(one.tokens) for one in engine.asked] == [len(one.tokens) for one in first]
    assert sum(one.cached for one in engine.asked) == cached
    await probe(again, 5.0, 1)
    again.asked, again.now_s = [], 0.0
    await probe(again, 5.0, 1)
    assert sum(one.cached for one in again.asked) > 2 * cached
