"""The torch runner computes the same bits in every manner; ``make test-engine``.

A script computes with the Python that has torch (``WARMROUTE_ENGINE`` or ``WARMROUTE_VLLM``).
"""

from __future__ import annotations

from typing import Any

import pytest

from support.torch_python import NoTorchError, facts

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]

Facts = dict[str, Any]


@pytest.fixture(scope="module", params=["float32 1", "float32 2", "bfloat16 1", "float16 1"])
def told(request: pytest.FixtureRequest) -> Facts:
    words: str = request.param
    try:
        return {**facts("torch_facts.py", *words.split()), "dtype": words.split(maxsplit=1)[0]}
    except NoTorchError as error:
        message = str(error)
    pytest.fail(message, pytrace=False)


def test_tokens_and_kv_are_the_same_bits_in_any_chunks_and_company(told: Facts) -> None:
    for manners in told["manners"].values():
        assert len(manners) == 5
        for answer in manners.values():
            assert answer == manners["alone"]


def test_what_pages_held_before_does_not_change_a_bit(told: Facts) -> None:
    assert told["stale"] == told["manners"]["llama"]["alone"]


def test_float32_gives_the_tokens_of_the_reference(told: Facts) -> None:
    for name, manners in told["manners"].items():
        equal = manners["alone"]["tokens"] == told["reference"][name]
        assert equal or told["dtype"] != "float32"


def test_logprobs_are_those_of_the_reference_within_the_dtype(told: Facts) -> None:
    tolerance = {"float32": 1e-4, "bfloat16": 0.5, "float16": 0.1}[told["dtype"]]
    assert told["draws"]["logprob error"] < tolerance


def test_draws_do_not_depend_on_the_company(told: Facts) -> None:
    draws = told["draws"]
    assert draws["alone"] == draws["company"]
    assert draws["logprobs are equal"]
    assert len(set(draws["alone"])) > 1


@pytest.mark.parametrize("way", ["hit", "preempted", "loaded", "copied", "copied again"])
def test_a_prompt_goes_on_alike_after_its_pages_were(told: Facts, way: str) -> None:
    assert told["cache"][way] == told["cache"]["whole"]


def test_a_save_has_the_bytes_that_reading_gives(told: Facts) -> None:
    assert told["cache"]["saved as read"]


def test_a_page_has_the_bytes_that_the_model_needs(told: Facts) -> None:
    item_bytes = 4 if told["dtype"] == "float32" else 2
    needed_bytes = 2 * 2 * 16 * 2 * 16 * item_bytes  # layers, K and V, tokens, heads, width
    assert told["content"]["llama"] == [needed_bytes, needed_bytes]


def test_replayed_steps_give_the_same_bits_and_each_shape_is_recorded_once(told: Facts) -> None:
    assert told["replayed"] == told["manners"]["llama"]
    assert 2 <= told["records"] <= 8
    assert told["replays"] > 10 * told["records"]


def test_tiles_of_one_size_give_the_same_bits_where_no_other_is_proven(told: Facts) -> None:
    fixed = told["fixed tiles"]
    assert all(answer == fixed["alone"] for answer in fixed.values())


def test_the_event_loop_runs_while_a_step_does(told: Facts) -> None:
    assert told["loop"]["rounds"] > 10


def test_parameters_of_the_kv_name_dtype_and_positions(told: Facts) -> None:
    assert told["parameters"].startswith(f"torch cpu {told['dtype']} ")
    assert '"kind":"llama3"' in told["parameters"]


def test_impossible_batches_are_refused_by_name(told: Facts) -> None:
    needed_bytes = told["content"]["llama"][0]
    assert told["refusals"] == [
        "packed_tokens: expected ids below 512, got 512",
        "page: expected one of 200, got 200",
        f"content: expected {needed_bytes} bytes, got 5",
        "page: expected one of 200, got -1",
        "the runner is closed",
    ]
