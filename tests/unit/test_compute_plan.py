"""Where a step's tokens, keys, queries and answers lie; by NumPy alone, no torch."""

from __future__ import annotations

import sys
from typing import Any

import msgspec
import numpy as np
import pytest

from sidecar.compute.plan import (
    ROW_COUNTS,
    AttentionGroup,
    StepPlan,
    StepShape,
    padded_rows,
    plan_decode,
    plan_step,
)
from sidecar.pool import PageId
from sidecar.runner import Draw, RunnerError, Slot

GREEDY = (Draw(seed=0, index=0),)
SHAPE = StepShape(
    vocabulary_size=1000,
    max_tokens=600,
    max_positions=4096,
    pages=100,
    page_tokens=16,
    heads=6,
    kv_heads=2,
)
GROUP_HEADS = 3
PROJECTED_HEADS = 10  # 6 of queries, 2 of keys, 2 of values


def slot(
    tokens: int, context: int = 0, first_page: int = 0, draws: tuple[Draw, ...] = GREEDY
) -> Slot:
    pages = -(-(context + tokens) // SHAPE.page_tokens)
    table = tuple(PageId(first_page + page) for page in range(pages))
    return Slot(np.arange(tokens, dtype="<u4").tobytes(), context, table, draws)


def queries_of(plan: StepPlan) -> list[tuple[int, int, int]]:
    """Return (row, head, limit) of every query that is answered, by following the indices."""
    spare = len(plan.tokens) * SHAPE.heads
    found = []
    for group in plan.groups:
        answers = group.answers.reshape(len(group.limits), SHAPE.kv_heads, -1)
        queries = group.queries.reshape(answers.shape)
        for (sequence, kv_head, at), answer in np.ndenumerate(answers):
            if answer == spare:
                continue
            row, head = divmod(int(answer), SHAPE.heads)
            assert queries[sequence, kv_head, at] == row * PROJECTED_HEADS + head
            assert head // GROUP_HEADS == kv_head
            found.append((row, head, int(group.limits[sequence, at])))
    return sorted(found)


def pages_of(group: AttentionGroup) -> Any:
    """Return (S, blocks, kv_heads, pages of a block) of cache rows."""
    return group.pages.reshape(len(group.limits), -1, SHAPE.kv_heads, SHAPE.block_pages)


@pytest.mark.parametrize("rows", [1, 4, 5, 33, 130, 512, 513, 1030, 2048])
def test_padding_is_the_least_that_splits_into_allowed_counts(rows: int) -> None:
    padded = padded_rows(rows, ROW_COUNTS)
    whole, rest = divmod(padded, ROW_COUNTS[-1])
    assert padded >= rows
    assert rest in (0, *ROW_COUNTS)
    assert whole == rows // ROW_COUNTS[-1] or rest == 0
    smaller = [count for count in ROW_COUNTS if count < rest]
    assert not smaller or whole * ROW_COUNTS[-1] + smaller[-1] < rows


def test_no_rows_need_no_padding() -> None:
    assert padded_rows(0, ROW_COUNTS) == 0


def test_every_head_of_every_new_token_is_asked_once_and_sees_up_to_itself() -> None:
    slots = [slot(1, 40, 10), slot(200, 30, 20), slot(1, 300, 50), slot(3, 0, 80), slot(1, 0, 90)]
    plan = plan_step(slots, SHAPE)
    expected, row = [], 0
    for each in slots:
        for at in range(len(each.packed_tokens) // 4):
            expected += [(row, head, each.context_tokens + at) for head in range(SHAPE.heads)]
            row += 1
    assert queries_of(plan) == expected
    assert plan.new_tokens == row == 206


def test_tokens_and_positions_follow_the_slots_and_padding_is_token_0_at_0() -> None:
    plan = plan_step([slot(2, 17), slot(3, 0, 5)], SHAPE)
    assert plan.tokens.tolist() == [0, 1, 0, 1, 2, 0, 0, 0]
    assert plan.positions.tolist() == [17, 18, 0, 1, 2, 0, 0, 0]


def test_keys_and_values_go_to_the_page_and_place_of_their_position() -> None:
    plan = plan_step([slot(2, 31, 7)], SHAPE)
    cells = np.arange(2 * 101 * 2 * 16).reshape(2, 101, 2, 16)
    rows = plan.kv_rows.reshape(len(plan.tokens), 2, SHAPE.kv_heads)
    assert (rows[0] == cells[:, 8, :, 15]).all()  # position 31 is the last of the second page
    assert (rows[1] == cells[:, 9, :, 0]).all()
    assert (rows[2:] == cells[:, 100, :, 0]).all()  # padding has the spare page


def test_a_group_reads_each_table_in_order_and_the_spare_page_behind_it() -> None:
    plan = plan_step([slot(1, 200, 10), slot(1, 255, 60)], SHAPE)
    (group,) = plan.groups
    pages = pages_of(group)
    assert pages.shape == (2, 4, 2, 4)  # sequences, blocks of 64 tokens, KV heads, pages of 16
    assert pages[0, :, 1].reshape(-1).tolist() == [
        page * 2 + 1 for page in [*range(10, 23), 100, 100, 100]
    ]
    assert pages[1, :, 0].reshape(-1).tolist() == [page * 2 for page in range(60, 76)]


def test_pages_behind_the_last_new_token_are_not_read() -> None:
    early = Slot(b"\0" * 4, 3, tuple(PageId(page) for page in range(9)), GREEDY)
    (group,) = plan_step([early], SHAPE).groups
    assert set((pages_of(group) // 2).reshape(-1)) == {0, 100}


def test_decoding_sequences_of_about_equal_length_are_one_group() -> None:
    slots = [slot(1, context, 0) for context in (10, 63, 64, 300, 500, 10, 520)]
    plan = plan_step(slots, SHAPE)
    shapes = [(len(group.limits), pages_of(group).shape[1]) for group in plan.groups]
    assert shapes == [(3, 1), (1, 2), (2, 8), (1, 16)]


def test_a_long_prompt_is_taken_in_tiles_that_read_no_further_than_they_see() -> None:
    plan = plan_step([slot(300)], SHAPE)
    assert [group.limits.shape for group in plan.groups] == [(1, 256)] * 3 + [(1, 192)]
    assert [pages_of(group).shape[1] for group in plan.groups] == [2, 3, 4, 5]


def test_only_slots_with_draws_are_put_out_by_their_last_row() -> None:
    plan = plan_step([slot(5, draws=()), slot(1, 9, 2), slot(7, 0, 3)], SHAPE)
    assert plan.output_count == 2
    assert plan.outputs[:2].tolist() == [5, 12]
    assert len(plan.outputs) == 4
    assert plan_step([slot(5, draws=())], SHAPE).outputs.size == 0


def test_a_block_is_a_whole_number_of_pages_of_any_length() -> None:
    for page_tokens, pages in ((1, 64), (5, 13), (16, 4), (300, 1)):
        shape = msgspec.structs.replace(SHAPE, page_tokens=page_tokens)
        assert shape.block_pages == pages


def test_decoding_plans_have_few_shapes_and_touch_only_the_spare_page_in_excess() -> None:
    shapes = set()
    for count in (3, 4):
        for context in (10, 300, 490):
            plan = plan_decode([slot(1, context + at, at) for at in range(count)], SHAPE)
            assert plan is not None
            (group,) = plan.groups
            shapes.add((plan.tokens.shape, group.queries.shape, group.pages.shape))
            assert sorted(plan.outputs.tolist()) == [0, 1, 2, 3]
            assert plan.outputs[: plan.output_count].tolist() == list(range(count))
            rows = [each for each in queries_of(plan) if each[0] >= count]
            assert len(rows) == (4 - count) * SHAPE.heads
            assert (pages_of(group)[count:] // 2 == 100).all()
    assert len(shapes) == 2  # one block and eight


def test_a_prompt_is_no_decoding_plan() -> None:
    assert plan_decode([slot(1, 5), slot(2)], SHAPE) is None


def test_a_decoding_plan_puts_out_the_rows_of_slots_with_draws_first() -> None:
    plan = plan_decode([slot(1, 5, draws=()), slot(1, 6, 3), slot(1, 7, 6)], SHAPE)
    assert plan is not None
    assert plan.output_count == 2
    assert plan.outputs.tolist() == [1, 2, 0, 3]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (Slot(b"", 0, (PageId(0),)), "packed_tokens: expected whole tokens, got 0 bytes"),
        (Slot(b"abcde", 0, (PageId(0),)), "packed_tokens: expected whole tokens, got 5 bytes"),
        (Slot(b"\0" * 4, 16, (PageId(0),)), "pages: expected room for 17 tokens, got 1 pages"),
        (Slot(b"\0" * 4, 0, (PageId(100),)), "pages: expected numbers below 100"),
        (Slot(b"\0" * 4, 0, (PageId(-1),)), "pages: expected numbers below 100"),
        (Slot(b"\0" * 4, -1, (PageId(0),)), "context_tokens: expected at most 4096 positions"),
        (slot(1, 4096), "context_tokens: expected at most 4096 positions, got 4097"),
        (slot(601), "slots: expected at most 600 tokens, got 601"),
        (Slot(b"\xe8\3\0\0", 0, (PageId(0),)), "packed_tokens: expected ids below 1000, got 1000"),
    ],
)
def test_an_impossible_slot_is_refused_by_name(wrong: Slot, told: str) -> None:
    with pytest.raises(RunnerError, match=told):
        plan_step([wrong], SHAPE)


def test_without_torch_its_runner_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in [name for name in sys.modules if name.startswith("sidecar.compute.torch_")]:
        monkeypatch.delitem(sys.modules, name)
    told = r"^compute: torch is not installed; install warmroute\[engine\]$"
    with pytest.raises(ImportError, match=told):
        __import__("sidecar.compute.torch_runner")
