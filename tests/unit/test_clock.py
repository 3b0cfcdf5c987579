from __future__ import annotations

from typing import get_args

import pytest

from sidecar.clock import (
    LLAMA_8B_H100,
    LLAMA_70B_FP8_2XH100,
    PresetName,
    StepCost,
    StepLoad,
    preset_cost,
)

NOTHING = StepLoad(0, 0, 0, 0)


def test_a_step_adds_up_its_terms() -> None:
    cost = StepCost(
        step_ms=1,
        prefill_token_ms=10,
        attention_pair_ms=100,
        decode_sequence_ms=1000,
        kv_token_read_ms=10_000,
    )
    assert cost.step_s(StepLoad(2, 3, 4, 5)) == pytest.approx(54.321)
    assert cost.step_s(NOTHING) == pytest.approx(0.001)


def test_the_8b_preset_follows_from_its_sources() -> None:
    """Figures worked out by hand from the data sheets; see the preset's docstring."""
    assert LLAMA_8B_H100.step_ms == pytest.approx(5.99, abs=0.01)
    assert LLAMA_8B_H100.prefill_token_ms == pytest.approx(0.03248, abs=1e-5)
    assert LLAMA_8B_H100.attention_pair_ms == pytest.approx(1.06e-6, rel=0.01)
    assert LLAMA_8B_H100.kv_token_read_ms == pytest.approx(4.89e-5, rel=0.01)


def test_the_70b_preset_follows_from_its_sources() -> None:
    assert LLAMA_70B_FP8_2XH100.step_ms == pytest.approx(13.17 + 1.6, abs=0.01)
    assert LLAMA_70B_FP8_2XH100.prefill_token_ms == pytest.approx(0.0892, abs=1e-4)
    assert LLAMA_70B_FP8_2XH100.attention_pair_ms == pytest.approx(3.31e-6, rel=0.01)
    assert LLAMA_70B_FP8_2XH100.kv_token_read_ms == pytest.approx(6.11e-5, rel=0.01)


def test_a_prefill_of_8000_tokens_takes_a_third_of_a_second_on_the_8b_preset() -> None:
    load = StepLoad(8000, 8000 * 8001 // 2, 0, 0)
    assert preset_cost("llama-8b-h100").step_s(load) == pytest.approx(0.30, abs=0.01)


def test_every_preset_has_a_cost_and_instant_has_none() -> None:
    for name in get_args(PresetName):
        assert preset_cost(name).step_s(NOTHING) >= 0
    assert preset_cost("instant").step_s(StepLoad(10**6, 10**9, 10**3, 10**6)) == 0
