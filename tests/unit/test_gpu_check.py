"""The parts of the GPU check and of the engine bench that need neither GPU nor torch."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

import pytest

import gpu_check
from engine_drive import GREEDY, Manner, generate, packed
from gpu_check import Case, Result, missing, shown, written
from sidecar.runner import Outcome, Sampled

if TYPE_CHECKING:
    from sidecar.runner import Batch

PAGE = "before\n<!-- gpu-check -->\nold\n<!-- /gpu-check -->\nafter\n"
RESULTS = (
    Result(Case("float32"), (), 1000.0, 50.0, 300.4),
    Result(Case("bfloat16", is_invariant=False), ("chunks of 7",), 2.0, 1.0, 1.0),
)


def test_without_torch_the_check_ends_with_2_and_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    assert gpu_check.main() == 2
    told = capsys.readouterr().out
    assert told.startswith("gpu-check: no GPU is at hand, nothing was checked: torch is not")
    assert sys.executable in told
    assert missing("cpu") is not None


def test_the_block_is_dated_and_names_where_tokens_differ() -> None:
    block = shown(RESULTS, "a GPU", "a model")
    assert re.match(r"\d{4}-\d\d-\d\d, a GPU; a model\.\n\n", block)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in block.splitlines()[4:]]
    assert rows == [
        ["float32", "nowhere", "1,000", "50", "300"],
        ["bfloat16, any shapes", "chunks of 7", "2", "1", "1"],
    ]


def test_the_block_replaces_what_is_between_the_markers() -> None:
    page = written(PAGE, "new \\1")
    assert page == "before\n<!-- gpu-check -->\n\nnew \\1\n\n<!-- /gpu-check -->\nafter\n"
    assert written(page, "new \\1") == page
    with pytest.raises(ValueError, match="expected <!-- gpu-check -->"):
        written("no markers", "new")


class Echo:
    """A runner whose next token is the number of tokens so far; keeps its batches."""

    def __init__(self) -> None:
        self.batches: list[Batch] = []

    async def run(self, batch: Batch) -> Outcome:
        self.batches.append(batch)
        return Outcome(
            samples=tuple(
                tuple(
                    Sampled(slot.context_tokens + len(slot.packed_tokens) // 4) for _ in slot.draws
                )
                for slot in batch.slots
            )
        )


async def test_driving_computes_every_token_once_in_its_place() -> None:
    echo, manner = Echo(), Manner(page_tokens=4, chunk_tokens=3, step_tokens=4)
    answers = await generate(echo, [[7] * 5, [8] * 2], 2, manner)
    assert answers == [[5, 6], [2, 3]]
    steps = [
        [(len(slot.packed_tokens) // 4, slot.context_tokens) for slot in batch.slots]
        for batch in echo.batches
    ]
    assert steps == [[(3, 0), (1, 0)], [(2, 3), (1, 1)], [(1, 5), (1, 2)]]
    assert [slot.draws for slot in echo.batches[1].slots] == [GREEDY, GREEDY]
    assert echo.batches[0].slots[0].draws == ()
    assert echo.batches[-1].slots[0].packed_tokens == packed([5])
    assert [slot.pages for slot in echo.batches[0].slots] == [(0, 1), (2,)]


async def test_driving_skips_what_the_pages_hold_and_serves_one_after_the_other() -> None:
    echo, manner = Echo(), Manner(page_tokens=4, sequences=1, context_tokens=4, first_page=9)
    await generate(echo, [[7] * 6, [8] * 5], 1, manner)
    assert [batch.slots[0].context_tokens for batch in echo.batches] == [4, 4]
    assert [len(batch.slots) for batch in echo.batches] == [1, 1]
    assert echo.batches[0].slots[0].pages == (9, 10)
