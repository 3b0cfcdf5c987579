"""A text's KV and what follows it do not depend on how it was computed, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from sidecar.compute.numpy_forward import Forward, KvCache, Segment
from sidecar.pool import PageId
from sidecar.runner import Load, Sampled, Save
from support.compute_rig import (
    GREEDY,
    PAGE_TOKENS,
    content,
    load_model,
    open_runner,
    prefill,
    run,
    slot,
)
from support.reference_logits import (
    CASES,
    RELATIVE_TOLERANCE,
    STORED_POSITIONS,
    relative_error,
    stored_logits,
    tokens,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from sidecar.compute.numpy_runner import NumpyRunner

TEXT = tokens()
TEXT_PAGES = 10
MATES = 4


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., NumpyRunner]]:
    made = []

    def make(model: str = "qwen3", **changed: Any) -> NumpyRunner:
        made.append(open_runner(load_model(tmp_path, model), **changed))
        return made[-1]

    yield make
    for runner in made:
        runner.close()


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    model = load_model(tmp_path, case)
    forward = Forward(model.config, model.weights, len(TEXT))
    cache = KvCache(model.config, TEXT_PAGES, PAGE_TOKENS)
    segment = Segment(np.array(TEXT), 0, np.arange(TEXT_PAGES))
    rows = forward.hidden([segment], cache)
    logits = forward.logits(rows[list(STORED_POSITIONS)])
    assert np.isfinite(logits).all()
    assert relative_error(logits, stored_logits(case)) < RELATIVE_TOLERANCE


@pytest.mark.parametrize("model", ["llama_biases", "qwen2_tied_one_kv", "qwen3", "builtin"])
async def test_chunks_of_any_length_give_the_same_bits(
    model: str, make: Callable[..., NumpyRunner]
) -> None:
    runner = make(model)
    pages = range(TEXT_PAGES)
    sampled = await prefill(runner, TEXT, pages, len(TEXT))
    expected = await content(runner, pages, len(TEXT))
    for chunk_tokens in (1, 2, 3, 5, 16, 17, 100):
        assert await prefill(runner, TEXT, pages, chunk_tokens) == sampled
        assert await content(runner, pages, len(TEXT)) == expected


async def test_batch_mates_change_no_bit(make: Callable[..., NumpyRunner]) -> None:
    runner = make("builtin", max_tokens=1024)
    random = np.random.Generator(np.random.PCG64(3))
    texts = [list(random.integers(0, 256, 20 + 40 * place)) for place in range(MATES)]
    pages = [range(12 * place, 12 * place + 12) for place in range(MATES)]
    sampled = [
        await prefill(runner, text, mine, len(text))
        for text, mine in zip(texts, pages, strict=True)
    ]
    expected = [
        await content(runner, mine, len(text)) for text, mine in zip(texts, pages, strict=True)
    ]
    computed = [0] * MATES
    found: dict[int, Sampled] = {}
    while len(found) < MATES:
        chosen = [place for place in random.permutation(MATES) if place not in found][:3]
        ends = [
            min(computed[place] + int(random.integers(1, 70)), len(texts[place]))
            for place in chosen
        ]
        slots = [
            slot(texts[place][computed[place] : end], computed[place], pages[place], GREEDY)
            for place, end in zip(chosen, ends, strict=True)
        ]
        outcome = await run(runner, *slots)
        for place, end, samples in zip(chosen, ends, outcome.samples, strict=True):
            computed[place] = end
            if end == len(texts[place]):
                found[place] = samples[0]
    assert [found[place] for place in range(MATES)] == sampled
    assert [
        await content(runner, mine, len(text)) for text, mine in zip(texts, pages, strict=True)
    ] == expected


async def test_it_does_not_matter_which_pages_hold_a_text(
    make: Callable[..., NumpyRunner],
) -> None:
    runner = make()
    sampled = await prefill(runner, TEXT, range(TEXT_PAGES), 40)
    expected = await content(runner, range(TEXT_PAGES), len(TEXT))
    scattered = [37, 5, 60, 12, 11, 63, 20, 1, 33, 8]
    assert await prefill(runner, TEXT, scattered, 40) == sampled
    assert await content(runner, scattered, len(TEXT)) == expected


@pytest.mark.parametrize("page_tokens", [1, 7, 24, 128])
async def test_pages_of_any_length_give_the_same_answer(
    page_tokens: int, make: Callable[..., NumpyRunner]
) -> None:
    expected = await prefill(make(), TEXT, range(TEXT_PAGES), 40)
    runner = make(page_tokens=page_tokens, pages=200)
    pages = range(-(-len(TEXT) // page_tokens))
    assert await prefill(runner, TEXT, pages, 40) == expected


async def test_a_shared_prefix_answers_as_a_computed_one(
    make: Callable[..., NumpyRunner],
) -> None:
    runner = make()
    other = [*TEXT[:96], *reversed(TEXT[96:])]
    expected = await prefill(runner, other, range(20, 30), len(other))
    await prefill(runner, TEXT, range(TEXT_PAGES), len(TEXT))
    shared = [*range(6), *range(40, 44)]
    outcome = await run(runner, slot(other[96:], 96, shared, GREEDY))
    assert outcome.samples[0][0] == expected


async def test_generated_tokens_computed_again_as_a_prompt_give_the_same_bits(
    make: Callable[..., NumpyRunner],
) -> None:
    runner = make("builtin")
    pages = range(12)
    text = list(TEXT)
    for _ in range(20):
        first = 0 if len(text) == len(TEXT) else len(text) - 1
        outcome = await run(runner, slot(text[first:], first, pages, GREEDY))
        text.append(outcome.samples[0][0].token)
    expected = await content(runner, pages, len(text) - 1)
    again = await prefill(runner, text[:-1], range(20, 32), 64)
    assert again == outcome.samples[0][0]
    assert await content(runner, range(20, 32), len(text) - 1) == expected


async def test_pages_come_back_from_a_buffer_bit_for_bit(
    make: Callable[..., NumpyRunner],
) -> None:
    runner = make()
    pages = range(TEXT_PAGES)
    expected = await prefill(runner, TEXT, pages, len(TEXT))
    before = await content(runner, pages, len(TEXT))
    buffers = [bytearray(runner.content_bytes) for _ in pages]
    saves = [Save(PageId(page), memoryview(buffers[page])) for page in pages]
    nothing = [Load(PageId(page), bytes(runner.content_bytes)) for page in pages]
    outcome = await run(runner, saves=tuple(saves), loads=tuple(nothing))
    assert outcome.samples == ()
    assert await content(runner, pages, len(TEXT)) != before
    back = tuple(Load(PageId(40 + page), memoryview(buffers[page])) for page in pages)
    last = slot(TEXT[-1:], len(TEXT) - 1, range(40, 50), GREEDY)
    outcome = await run(runner, last, loads=back)
    assert outcome.samples[0][0] == expected
    assert await content(runner, range(40, 50), len(TEXT)) == before


async def test_a_copied_page_is_written_apart_from_its_source(
    make: Callable[..., NumpyRunner],
) -> None:
    runner = make()
    pages = [*range(9), 9]
    await prefill(runner, TEXT, pages, len(TEXT))
    before = await content(runner, pages, len(TEXT))
    mine = [*range(9), 30]
    other = slot([96 - TEXT[-1]], len(TEXT) - 1, mine, GREEDY)
    outcome = await run(runner, other, copies=((PageId(9), PageId(30)),))
    assert await content(runner, pages, len(TEXT)) == before
    expected = await prefill(runner, [*TEXT[:-1], 96 - TEXT[-1]], range(40, 50), len(TEXT))
    assert outcome.samples[0][0] == expected


async def test_what_a_page_held_before_does_not_matter(make: Callable[..., NumpyRunner]) -> None:
    runner = make()
    expected = await prefill(runner, TEXT, range(TEXT_PAGES), len(TEXT))
    garbage = np.full(runner.content_bytes // 4, np.nan, dtype=np.float32).tobytes()
    loads = tuple(Load(PageId(page), garbage) for page in range(40, 50))
    await run(runner, loads=loads)
    assert await prefill(runner, TEXT, range(40, 50), 40) == expected


async def test_a_long_prompt_ends_in_finite_numbers(make: Callable[..., NumpyRunner]) -> None:
    runner = make(pages=130, max_tokens=2048)
    random = np.random.Generator(np.random.PCG64(5))
    text = list(random.integers(0, 97, 250))
    sampled = await prefill(runner, text, range(130), len(text))
    assert all(np.isfinite(logprob) for _, logprob in sampled.top)
    assert await prefill(runner, text, range(130), 33) == sampled
