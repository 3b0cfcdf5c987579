from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from state.prefix import pack_tokens
from warmroute.score import (
    InfiniteCache,
    Sample,
    Score,
    findings,
    imbalance_of,
    quantile,
    score_of,
    score_table,
)

PAGE_TOKENS = 4


def sample(prompt: int, cached: int, ttft_s: float = 1.0, replica: str | None = "a") -> Sample:
    return Sample(prompt_tokens=prompt, cached_tokens=cached, ttft_s=ttft_s, replica=replica)


def tokens(*ids: int) -> bytes:
    return pack_tokens(ids)


def text_of(scores: dict[str, Score], ideal: Score) -> str:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(score_table(scores, ideal, "title", "caption"))
    return capture.get()


def test_a_request_is_a_hit_from_half_of_its_prompt_on() -> None:
    score = score_of([sample(100, 0), sample(100, 49), sample(100, 50), sample(100, 96)], 4)
    assert score.request_hit_ratio == 0.5


def test_the_token_hit_ratio_weighs_requests_by_their_length() -> None:
    score = score_of([sample(100, 100), sample(900, 0)], 4)
    assert score.token_hit_ratio == 0.1
    assert score.prompt_tokens == 1000
    assert score.computed_tokens == 900


def test_quantiles_are_values_that_occurred() -> None:
    times = [float(number) for number in range(100, 0, -1)]
    assert quantile(times, 0.5) == 50
    assert quantile(times, 0.99) == 99
    assert quantile([3.0], 0.99) == 3
    assert quantile([], 0.5) is None


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 1))
def test_a_quantile_is_exceeded_by_no_more_than_the_rest(values: list[float], share: float) -> None:
    found = quantile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values) - 1e-6
    assert sum(value < found for value in values) <= share * len(values) + 1e-6


def test_imbalance_is_1_when_even_and_the_fleet_when_one_replica_gets_all() -> None:
    assert imbalance_of(["a", "b", "c", "d"], 4) == 1
    assert imbalance_of(["a", "a", "b", "c"], 4) == 2
    assert imbalance_of(["a"] * 7, 4) == 4


def test_imbalance_is_unknown_when_a_replica_is() -> None:
    assert imbalance_of(["a", None], 4) is None
    assert imbalance_of([], 4) is None


def test_a_run_without_requests_has_a_score() -> None:
    score = score_of([], 4)
    assert (score.requests, score.token_hit_ratio, score.ttft_p50_s) == (0, 0.0, None)


def test_an_infinite_cache_gives_back_the_leading_pages_that_it_has_seen() -> None:
    cache = InfiniteCache(PAGE_TOKENS)
    assert cache.ask(tokens(*range(10))).cached_tokens == 0
    assert cache.ask(tokens(*range(10))).cached_tokens == 8
    assert cache.ask(tokens(*range(6), 99, 99, 99, 99)).cached_tokens == 4
    assert cache.ask(tokens(99, *range(1, 10))).cached_tokens == 0


def test_an_infinite_cache_leaves_the_last_token_to_the_engine() -> None:
    cache = InfiniteCache(PAGE_TOKENS)
    cache.ask(tokens(*range(8)))
    again = cache.ask(tokens(*range(8)))
    assert (again.prompt_tokens, again.cached_tokens) == (8, 4)


def test_what_the_engine_said_is_found_in_the_next_turn() -> None:
    cache = InfiniteCache(PAGE_TOKENS)
    cache.ask(tokens(*range(6)))
    cache.hold(tokens(*range(9)))
    assert cache.ask(tokens(*range(12))).cached_tokens == 8
    assert cache.held_tokens == 12


@pytest.mark.parametrize("faster", [0.25, 4.0])
def test_table_and_findings_say_what_was_measured_whoever_wins(faster: float) -> None:
    scores = {
        "round robin": score_of([sample(100, 40, 0.4, "a"), sample(100, 20, 0.4, "b")], 2),
        "warmroute": score_of([sample(100, 90, 0.4 * faster), sample(100, 81, 0.4 * faster)], 2),
    }
    ideal = score_of([Sample(prompt_tokens=100, cached_tokens=96)], 1)
    rows = {line.split("│")[1].strip(): line for line in text_of(scores, ideal).splitlines()[4:6]}
    assert [cell.strip() for cell in rows["round robin"].split("│")[2:7]] == [
        "0.0%",
        "30.0%",
        "0.400 s",
        "0.400 s",
        "1.00",
    ]
    assert [cell.strip() for cell in rows["warmroute"].split("│")[2:4]] == ["100.0%", "85.5%"]
    assert rows["warmroute"].split("│")[6].strip() == "2.00"
    said = findings(scores, ideal)
    assert said[0].endswith("round robin 140, warmroute 29; one infinite cache 4.")
    assert said[1].endswith(f"warmroute {faster:.0%}.")


def test_the_table_fits_80_columns() -> None:
    score = score_of([sample(100, 100, 12.3456)], 4)
    shown = text_of({"round robin": score, "least loaded": score}, score)
    assert "…" not in shown
    assert "infinite cache" in shown
