"""What the answers to probes say about an engine's steps."""

from __future__ import annotations

import random

from replay.probe import (
    FIRST_TOKEN,
    TOKENS,
    Answer,
    EngineFacts,
    Prompt,
    alone_row,
    decode_rows,
    draw_tokens,
    first_token_row,
)

FACTS = EngineFacts(model="m", step_tokens=100, page_tokens=32)


def prompt(length: int, shared_tokens: int = 0) -> Prompt:
    return Prompt(tuple(range(length)), shared_tokens)


def answer(first_s: float, every_s: float, tokens: int, cached_tokens: int | None = 0) -> Answer:
    times_s = tuple(first_s + every_s * index for index in range(tokens))
    return Answer(sent_s=0.0, times_s=times_s, cached_tokens=cached_tokens)


def test_a_cold_prompt_takes_as_many_steps_as_the_budget_wants() -> None:
    for length, steps in ((1, 1), (100, 1), (101, 2), (250, 3)):
        row = first_token_row("cold", prompt(length), answer(0.5, 0, 1), FACTS)
        assert (row.ms, row.steps, row.prefill_tokens) == (500.0, steps, length)
        assert row.attention_pairs == sum(range(1, length + 1))
        assert (row.requests, row.prompt_tokens) == (1, length)
        assert (row.decode_sequences, row.kv_tokens_read) == (0, 0)


def test_what_was_cached_is_attended_to_and_not_computed() -> None:
    row = first_token_row("warm", prompt(150, 100), answer(0.1, 0, 1, cached_tokens=64), FACTS)
    assert (row.prefill_tokens, row.steps, row.prompt_tokens) == (86, 1, 150)
    assert row.attention_pairs == sum(range(65, 151))


def test_an_engine_that_does_not_tell_is_believed_to_hold_whole_pages() -> None:
    silent = answer(0.1, 0, 1, cached_tokens=None)
    assert first_token_row("warm", prompt(150, 100), silent, FACTS).prefill_tokens == 150 - 96
    without = EngineFacts(model="m", page_tokens=32, is_caching=False)
    assert first_token_row("warm", prompt(150, 100), silent, without).prefill_tokens == 150
    unknown = EngineFacts(model="m")
    assert first_token_row("warm", prompt(150, 100), silent, unknown).prefill_tokens == 150 - 96
    assert first_token_row("warm", prompt(150, 95), silent, unknown).prefill_tokens == 150 - 80


def test_the_last_token_is_computed_in_any_case() -> None:
    row = first_token_row("warm", prompt(64), answer(0.1, 0, 1, cached_tokens=64), FACTS)
    assert (row.prefill_tokens, row.attention_pairs) == (1, 64)


def test_one_sequence_reads_its_context_once_a_step() -> None:
    rows = decode_rows("alone", [prompt(10)], [answer(1.0, 0.02, 13)])
    assert [row.steps for row in rows] == [4, 4, 4]
    assert [round(row.ms) for row in rows] == [80, 80, 80]
    assert [row.decode_sequences for row in rows] == [4, 4, 4]
    # The step that gives the second token has the KV of the prompt, and of nothing else, to read.
    assert sum(row.kv_tokens_read for row in rows) == sum(range(10, 22))
    assert {row.requests for row in rows} == {0}


def test_a_batch_counts_from_the_last_first_token_to_the_first_last_one() -> None:
    early, late = answer(1.0, 0.02, 21), answer(1.1001, 0.02, 21)
    rows = decode_rows("batch", [prompt(10), prompt(50)], [early, late])
    assert sum(row.steps for row in rows) == 14  # 1.1001 to 1.3801, the early one ends at 1.4
    assert sum(row.decode_sequences for row in rows) == 28
    early_read = range(10 + 5, 10 + 5 + 14)  # it had 6 tokens then
    late_read = range(50, 50 + 14)
    assert sum(row.kv_tokens_read for row in rows) == sum(early_read) + sum(late_read)


def test_sequences_that_hardly_met_say_nothing() -> None:
    assert decode_rows("batch", [prompt(9)] * 2, [answer(1, 0.1, 9), answer(2, 0.1, 9)]) == ()
    assert decode_rows("batch", [prompt(9)] * 2, [answer(1, 0.1, 9), answer(1.55, 0.1, 9)]) == ()
    assert decode_rows("alone", [prompt(9)], [answer(1, 0.1, 1)]) == ()


def test_tokens_that_all_came_at_once_say_nothing() -> None:
    assert decode_rows("alone", [prompt(9)], [answer(1, 0.0, 20)]) == ()


def test_prompts_are_plain_tokens_and_follow_from_the_seed() -> None:
    tokens = draw_tokens(random.Random(1), 5000)
    assert tokens == draw_tokens(random.Random(1), 5000)
    assert tokens[:16] != draw_tokens(random.Random(2), 16)
    assert (min(tokens), max(tokens)) == (FIRST_TOKEN, FIRST_TOKEN + TOKENS - 1)


def test_a_request_alone_is_its_prefill_and_its_decoding() -> None:
    row = alone_row(250, 3, step_tokens=100)
    assert (row.steps, row.prefill_tokens, row.attention_pairs) == (5, 250, 31_375)
    assert (row.decode_sequences, row.kv_tokens_read) == (2, 250 + 251)
    assert (row.requests, row.prompt_tokens) == (1, 250)
