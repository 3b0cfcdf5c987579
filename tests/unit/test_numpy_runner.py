from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from msgspec import structs

from sidecar.compute.weights import builtin_config
from sidecar.pool import PageId
from sidecar.runner import Draw, Load, RunnerError, Save
from support.compute_rig import (
    GREEDY,
    PAGE_TOKENS,
    PAGES,
    Model,
    content,
    load_model,
    open_runner,
    run,
    slot,
)
from support.reference_logits import tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from sidecar.compute.numpy_runner import NumpyRunner

TEXT = tokens()
TEXT_PAGES = 10


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., NumpyRunner]]:
    made = []

    def make(model: str = "qwen3", **changed: Any) -> NumpyRunner:
        made.append(open_runner(load_model(tmp_path, model), **changed))
        return made[-1]

    yield make
    for runner in made:
        runner.close()


async def test_every_draw_of_a_slot_samples_the_same_logits(
    make: Callable[..., NumpyRunner],
) -> None:
    runner = make("builtin")
    warm = [Draw(seed=1, index=0, sample=each, temperature=3.0) for each in range(12)]
    greedy = structs.replace(GREEDY, top_logprobs=256)
    silent = slot(TEXT[:20], 0, range(20, 22))
    outcome = await run(runner, silent, slot(TEXT, 0, range(TEXT_PAGES), greedy, greedy, *warm))
    assert outcome.samples[0] == ()
    first, second, *drawn = outcome.samples[1]
    assert first == second
    assert len({sampled.token for sampled in drawn}) > 3
    allowed = [
        each for each in first.top if each[0] not in builtin_config(256).suppressed_token_ids
    ]
    assert allowed[:1] == [(first.token, first.logprob)]


async def test_the_builtin_model_writes_printable_text_only(
    make: Callable[..., NumpyRunner],
) -> None:
    runner = make("builtin")
    warm = [Draw(seed=1, index=0, sample=each, temperature=9.0) for each in range(200)]
    outcome = await run(runner, slot(TEXT, 0, range(TEXT_PAGES), *warm))
    assert {sampled.token for sampled in outcome.samples[0]} <= {10, *range(32, 127)}


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"packed_tokens": b""}, "packed_tokens"),
        ({"packed_tokens": b"123"}, "packed_tokens"),
        ({"packed_tokens": (97).to_bytes(4, "little")}, "packed_tokens: expected ids below 97"),
        ({"packed_tokens": bytes(4 * 257), "pages": tuple(range(17))}, "context_tokens"),
        ({"packed_tokens": bytes(4 * 200), "pages": tuple(range(17))}, "at most 128 tokens"),
        ({"context_tokens": -1}, "context_tokens"),
        ({"pages": ()}, "pages: expected room for 2 tokens"),
        ({"pages": (PAGES,)}, "page: expected one of 64, got 64"),
        ({"pages": (-1,)}, "page: expected one of 64, got -1"),
    ],
)
async def test_a_slot_that_names_what_is_not_there_is_refused(
    wrong: dict[str, Any], named: str, make: Callable[..., NumpyRunner]
) -> None:
    runner = make(max_tokens=128)
    with pytest.raises(RunnerError, match=named):
        await run(runner, structs.replace(slot([1, 2], 0, [0]), **wrong))
    assert not any(await content(runner, range(PAGES), PAGES * PAGE_TOKENS))


@pytest.mark.parametrize(
    "wrong",
    [
        {"saves": (Save(PageId(64), memoryview(bytearray(18432))),)},
        {"saves": (Save(PageId(0), memoryview(bytearray(4))),)},
        {"loads": (Load(PageId(-1), bytes(18432)),)},
        {"loads": (Load(PageId(0), b"1234"),)},
        {"copies": ((PageId(0), PageId(64)),)},
    ],
)
async def test_a_transfer_that_does_not_fit_is_refused_before_anything_is_done(
    wrong: dict[str, Any], make: Callable[..., NumpyRunner]
) -> None:
    runner = make("llama")
    with pytest.raises(RunnerError, match="expected"):
        await run(runner, slot([1, 2], 0, [0]), **wrong)
    assert not any(await content(runner, range(PAGES), PAGES * PAGE_TOKENS))


async def test_a_model_that_computes_no_numbers_fails_the_step(tmp_path: Path) -> None:
    model = load_model(tmp_path, "llama")
    weights = model.weights

    class Broken:
        digest = "0" * 16
        raw = weights.raw

        def array(self, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
            array = weights.array(name)
            return array * np.float32(np.nan) if name == "model.norm.weight" else array

    runner = open_runner(Model(model.config, Broken()))
    with pytest.raises(ValueError, match="logits: expected numbers, found NaN"):
        await run(runner, slot([1], 0, [0], GREEDY))
    runner.close()


async def test_a_cancelled_step_ends_before_the_next_begins(
    make: Callable[..., NumpyRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make()
    began, go_on = threading.Event(), threading.Event()
    log: list[str] = []
    computed = runner._computed

    def slow(slots: Any, segments: Any) -> Any:
        log.append("begin")
        began.set()
        assert go_on.wait(30)
        outcome = computed(slots, segments)
        log.append("end")
        return outcome

    monkeypatch.setattr(runner, "_computed", slow)
    first = asyncio.create_task(run(runner, slot([1], 0, [0], GREEDY)))
    await asyncio.to_thread(began.wait, 30)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    second = asyncio.create_task(run(runner, slot([2], 0, [1], GREEDY)))
    read = asyncio.create_task(runner.read((PageId(0),)))
    await asyncio.sleep(0)
    assert log == ["begin"]
    go_on.set()
    assert len((await second).samples) == 1
    assert any((await read)[0])
    assert log == ["begin", "end", "begin", "end"]


async def test_a_closed_runner_may_be_closed_again_and_runs_nothing(
    make: Callable[..., NumpyRunner],
) -> None:
    runner = make()
    runner.close()
    runner.close()
    with pytest.raises(RunnerError, match="closed"):
        await run(runner, slot([1], 0, [0]))


async def test_pages_are_as_large_as_their_keys_and_values(
    make: Callable[..., NumpyRunner],
) -> None:
    runner = make("builtin")
    assert runner.page_bytes == runner.content_bytes == 4 * 2 * PAGE_TOKENS * 3 * 32 * 4
    assert [len(page) for page in await runner.read((PageId(3), PageId(1)))] == [98304 // 2] * 2


def test_other_positions_are_other_kv(make: Callable[..., NumpyRunner]) -> None:
    assert make("qwen2").kv_parameters != make("qwen2_float16_yarn").kv_parameters
    assert make("qwen2").kv_parameters == make("qwen2").kv_parameters


@pytest.mark.parametrize("name", ["pages", "page_tokens", "max_tokens"])
def test_a_runner_without_room_is_refused(name: str, make: Callable[..., NumpyRunner]) -> None:
    with pytest.raises(ValueError, match=f"{name}: expected at least 1, got 0"):
        make(**{name: 0})
