"""The models of what moving and computing costs find what was planted, whatever they see."""

from __future__ import annotations

import math
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.bandwidth import PrefillModel, TransferModel
from sidecar.clock import LLAMA_8B_H100, StepCost, StepLoad

SEEDS = st.integers(0, 1 << 30)


def disturbed(rng: random.Random, seconds: float) -> float:
    """Return a noisy time: within 20 %, and one in twenty an outlier of up to 30 times."""
    noisy = seconds * (1 + rng.uniform(-0.2, 0.2))
    return noisy * 10 ** rng.uniform(-1.5, 1.5) if rng.random() < 0.05 else noisy


def feed(
    model: TransferModel, rng: random.Random, latency_ms: float, rate: float, count: int
) -> None:
    """Show ``count`` transfers, of sizes around where latency and bytes cost the same."""
    for _ in range(count):
        moved = int(latency_ms / 1e3 * rate * 10 ** rng.uniform(-1.5, 1.5))
        model.observe(moved, disturbed(rng, latency_ms / 1e3 + moved / rate))


PATHS = st.tuples(
    st.floats(-2, 2).map(lambda power: 10**power), st.floats(6, 10.5).map(lambda power: 10**power)
)


@settings(max_examples=30, deadline=None)
@given(planted=PATHS, prior=PATHS, seed=SEEDS)
def test_latency_and_rate_of_a_path_are_found(
    planted: tuple[float, float], prior: tuple[float, float], seed: int
) -> None:
    model = TransferModel(*prior)
    feed(model, random.Random(seed), *planted, 256)
    assert model.latency_ms == pytest.approx(planted[0], rel=0.1)
    assert model.bytes_per_s == pytest.approx(planted[1], rel=0.1)


@settings(max_examples=10, deadline=None)
@given(before=PATHS, after=PATHS, seed=SEEDS)
def test_a_path_that_changed_is_learned_again(
    before: tuple[float, float], after: tuple[float, float], seed: int
) -> None:
    rng, model = random.Random(seed), TransferModel(1, 1e9)
    feed(model, rng, *before, 256)
    feed(model, rng, *after, 256)
    assert model.latency_ms == pytest.approx(after[0], rel=0.1)
    assert model.bytes_per_s == pytest.approx(after[1], rel=0.1)


@pytest.mark.parametrize("seed", range(5))
def test_what_is_new_outweighs_what_is_old(seed: int) -> None:
    rng, model = random.Random(seed), TransferModel(1, 1e9)
    feed(model, rng, 1, 1e9, 256)
    feed(model, rng, 4, 2.5e8, 120)
    assert model.predict_ms(1_000_000) == pytest.approx(8, rel=0.2)


def test_the_prior_holds_until_three_observations() -> None:
    model = TransferModel(2, 1e9)
    for _ in range(2):
        model.observe(1_000_000, 0.1)
    assert model.predict_ms(1_000_000) == pytest.approx(3)
    model.observe(1_000_000, 0.1)
    assert model.predict_ms(1_000_000) == pytest.approx(100, rel=0.01)


def test_equal_sizes_tell_that_size_and_keep_the_proportions_of_the_prior() -> None:
    model = TransferModel(3, 1e9)
    for _ in range(50):
        model.observe(1_000_000, 0.02)
    assert model.predict_ms(1_000_000) == pytest.approx(20, rel=0.01)
    assert model.latency_ms == pytest.approx(15, rel=0.01)


@settings(max_examples=60, deadline=None)
@given(
    seen=st.lists(
        st.tuples(
            st.integers(-5, 1 << 60),
            st.floats(allow_nan=True, allow_infinity=True) | st.floats(0, 10),
        ),
        max_size=40,
    )
)
def test_both_parameters_stay_positive_and_finite(seen: list[tuple[int, float]]) -> None:
    model = TransferModel(1, 1e9)
    for moved, seconds in seen:
        model.observe(moved, seconds)
        for value in (model.latency_ms, model.bytes_per_s, model.predict_ms(1 << 30)):
            assert math.isfinite(value)
            assert value > 0


@pytest.mark.parametrize("prior", [(0, 1e9), (1, -1), (math.nan, 1e9), (1, math.inf)])
def test_a_prior_that_is_no_path_is_refused(prior: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="positive and finite"):
        TransferModel(*prior)


def random_load(rng: random.Random) -> StepLoad:
    """Return a step as an engine runs it: chunks of prompts, decodes, or both."""
    decodes = rng.choice([0, 0, rng.randint(1, 8)])
    is_decode_only = decodes > 0 and rng.random() < 0.4
    new = 0 if is_decode_only else rng.choice([64, 128, 256, 512, rng.randint(1, 512)])
    context = rng.choice([0, 0, rng.randint(0, 8000), rng.randint(0, 8000)])
    pairs = new * context + new * (new + 1) // 2
    return StepLoad(new, pairs, decodes, decodes * rng.randint(100, 8000))


@settings(max_examples=12, deadline=None)
@given(seed=SEEDS)
def test_the_costs_of_tokens_and_pairs_are_found(seed: int) -> None:
    rng = random.Random(seed)
    token_ms = 10 ** rng.uniform(-2, 0.5)
    planted = StepCost(
        step_ms=64 * token_ms * rng.uniform(0.1, 1),
        prefill_token_ms=token_ms,
        attention_pair_ms=token_ms / 10 ** rng.uniform(3, 3.7),
        decode_sequence_ms=token_ms * rng.uniform(1, 20),
        kv_token_read_ms=token_ms * rng.uniform(0.001, 0.01),
    )
    prior = {name: cost * 10 ** rng.uniform(-2, 2) for name, cost in costs_of(planted).items()}
    model = PrefillModel(StepCost(**prior))
    for _ in range(1024):
        load = random_load(rng)
        model.observe(load, disturbed(rng, planted.step_s(load)))
    learned = model.cost()
    assert learned.prefill_token_ms == pytest.approx(planted.prefill_token_ms, rel=0.1)
    assert learned.attention_pair_ms == pytest.approx(planted.attention_pair_ms, rel=0.1)
    for tokens, context in ((1, 0), (64, 6000), (2000, 0), (2000, 2000)):
        pairs = sum(range(context + 1, context + tokens + 1))
        expected = planted.prefill_token_ms * tokens + planted.attention_pair_ms * pairs
        assert model.predict_ms(tokens, context) == pytest.approx(expected, rel=0.1)


def costs_of(cost: StepCost) -> dict[str, float]:
    return msgspec.to_builtins(cost)  # type: ignore[no-any-return]


def test_steps_without_decodes_leave_the_prior_of_decoding() -> None:
    model = PrefillModel(LLAMA_8B_H100)
    for tokens in range(1, 60):
        model.observe(StepLoad(tokens, tokens * (tokens + 1) // 2, 0, 0), 0.01 * tokens)
    assert model.cost().decode_sequence_ms > 0
    assert model.predict_ms(30, 0) == pytest.approx(300, rel=0.1)


def test_the_model_of_steps_is_its_prior_at_first() -> None:
    assert costs_of(PrefillModel(LLAMA_8B_H100).cost()) == pytest.approx(costs_of(LLAMA_8B_H100))
