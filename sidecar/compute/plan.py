"""What one step computes, as index arrays: where tokens, keys, queries and answers lie.

A step's rows are its new tokens, padded to one of a few row counts. Attention takes them in groups
of equal shape: decoding sequences whose contexts are about equally long together, prompts in tiles
of their own. A group reads each sequence's block table in blocks of ``block_pages`` pages that
start at a multiple of a block, so that a sum over a context has the same terms in the same order
whatever else is computed beside it. Arrays only: no arithmetic of a model, no torch.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from sidecar.compute.thread import refuse
from sidecar.runner import Slot

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Indices = NDArray[np.int64]

BLOCK_TOKENS: Final = 64
"""A block is this long, or the next longer whole number of pages."""
SUMMED_BLOCKS: Final = 8
"""More blocks than that are a multiple of it: sums run over so many, then over their sums."""
ROW_COUNTS: Final = (
    *range(4, 33, 4),
    *range(48, 129, 16),
    *range(192, 513, 64),
)  # padding adds a third at most
QUERY_MAX_COUNT: Final = 256
QUERY_COUNTS: Final = tuple(count for count in ROW_COUNTS if count <= QUERY_MAX_COUNT)
TOKEN_BYTES: Final = 4
PAD_TOKEN: Final = 0


class StepShape(Struct, frozen=True, kw_only=True):
    """What decides how steps are laid out.

    ``pages`` counts those that sequences have; one more, the last of the cache, takes what padding
    writes. A step has at most ``max_tokens`` new tokens, a text ``max_positions``. Products with
    weights have one of ``row_counts`` rows, attention one of ``query_counts``; both ascend.
    """

    vocabulary_size: int
    max_tokens: int
    max_positions: int
    pages: int
    page_tokens: int
    heads: int
    kv_heads: int
    row_counts: tuple[int, ...] = ROW_COUNTS
    query_counts: tuple[int, ...] = QUERY_COUNTS

    @property
    def block_pages(self) -> int:
        """Pages of an attention block."""
        return -(-BLOCK_TOKENS // self.page_tokens)

    @property
    def group_heads(self) -> int:
        """Heads that share a KV head."""
        return self.heads // self.kv_heads

    @property
    def tile_tokens(self) -> int:
        """The most tokens of a prompt that one attention group takes."""
        return max(1, self.query_counts[-1] // self.group_heads)


class AttentionGroup(Struct, frozen=True):
    """Sequences whose queries have one shape: S of them, M queries per KV head, C blocks.

    ``queries`` (S x kv heads, M) are rows of the projection, one head of one token each;
    ``answers``, of the same shape, the rows their results go to; padding goes to a spare one.
    ``limits`` (S, M) are the last positions that they see. ``pages`` (S x C x kv heads x pages per
    block) are rows of a layer's keys, one KV head of one page each.
    """

    queries: Indices
    answers: Indices
    limits: Indices
    pages: Indices

    @property
    def shape(self) -> tuple[int, int, int]:
        """Sequences, queries, page rows."""
        return (*self.limits.shape, len(self.pages))


class StepPlan(Struct, frozen=True):
    """One step: R rows, the first ``new_tokens`` of them real.

    ``tokens`` and ``positions`` are (R,). ``kv_rows`` (R x 2 x kv heads) say where each row's keys
    and values go. ``outputs`` are the rows that logits are wanted of, padded to a row count; the
    first ``output_count`` belong to the slots with draws, in their order.
    """

    tokens: Indices
    positions: Indices
    kv_rows: Indices
    groups: tuple[AttentionGroup, ...]
    outputs: Indices
    new_tokens: int
    output_count: int


class _Span(Struct, frozen=True):
    """Consecutive new tokens of one sequence: ``first_row`` of the step, their first position."""

    first_row: int
    count: int
    first_position: int
    pages: tuple[int, ...]


def padded_rows(rows: int, row_counts: Sequence[int]) -> int:
    """Return the least number that is at least ``rows`` and splits into allowed row counts.

    Whole multiples of the largest count, then one smaller count for the rest.
    """
    whole, rest = divmod(rows, row_counts[-1])
    padded = whole * row_counts[-1]
    return padded + next(count for count in row_counts if count >= rest) if rest else padded


def plan_step(slots: Sequence[Slot], shape: StepShape) -> StepPlan:
    """Return the plan of a step with at least one slot; raises RunnerError on an impossible one."""
    spans = _spans(slots, shape)
    decoding = [span for span in spans if span.count == 1]
    decoding.sort(key=lambda span: _bucket_blocks(span, shape))
    groups = [
        _group(list(spans), shape)
        for _, spans in groupby(decoding, key=lambda span: _bucket_blocks(span, shape))
    ]
    tiles = (tile for span in spans if span.count > 1 for tile in _tiles(span, shape))
    groups += [_group([tile], shape) for tile in tiles]
    return _plan(slots, spans, groups, shape)


def plan_decode(slots: Sequence[Slot], shape: StepShape) -> StepPlan | None:
    """Return a plan whose shape is one of few, for recorded steps; None if a slot is a prompt.

    All sequences are one group. Padding sequences read and write the spare page only.
    """
    if any(len(slot.packed_tokens) != TOKEN_BYTES for slot in slots):
        return None
    rows = padded_rows(len(slots), shape.row_counts)
    pad = Slot(PAD_TOKEN.to_bytes(TOKEN_BYTES, "little"), 0, ())
    spans = _spans(slots, shape)
    spans += [_Span(row, 1, 0, (shape.pages,)) for row in range(len(slots), rows)]
    blocks = max(_bucket_blocks(span, shape) for span in spans)
    padded = (*slots, *[pad] * (rows - len(slots)))
    plan = _plan(padded, spans, [_group(spans, shape, blocks)], shape)
    count = plan.output_count
    every = np.arange(rows)
    outputs = np.concatenate([plan.outputs[:count], np.setdiff1d(every, plan.outputs[:count])])
    return StepPlan(
        tokens=plan.tokens,
        positions=plan.positions,
        kv_rows=plan.kv_rows,
        groups=plan.groups,
        outputs=outputs,
        new_tokens=plan.new_tokens,
        output_count=count,
    )


def _spans(slots: Sequence[Slot], shape: StepShape) -> list[_Span]:
    spans = []
    row = 0
    for slot in slots:
        count, rest = divmod(len(slot.packed_tokens), TOKEN_BYTES)
        end = slot.context_tokens + count
        if rest or not count:
            refuse(f"packed_tokens: expected whole tokens, got {len(slot.packed_tokens)} bytes")
        if slot.context_tokens < 0 or end > shape.max_positions:
            refuse(f"context_tokens: expected at most {shape.max_positions} positions, got {end}")
        if end > len(slot.pages) * shape.page_tokens:
            refuse(f"pages: expected room for {end} tokens, got {len(slot.pages)} pages")
        if not all(0 <= page < shape.pages for page in slot.pages):
            refuse(f"pages: expected numbers below {shape.pages}, got {slot.pages}")
        spans.append(_Span(row, count, slot.context_tokens, slot.pages))
        row += count
    if row > shape.max_tokens:
        refuse(f"slots: expected at most {shape.max_tokens} tokens, got {row}")
    return spans


def _tiles(span: _Span, shape: StepShape) -> Iterator[_Span]:
    for first in range(0, span.count, shape.tile_tokens):
        count = min(shape.tile_tokens, span.count - first)
        yield _Span(span.first_row + first, count, span.first_position + first, span.pages)


def _blocks(span: _Span, shape: StepShape) -> int:
    block_tokens = shape.block_pages * shape.page_tokens
    blocks = -(-(span.first_position + span.count) // block_tokens)
    return blocks if blocks <= SUMMED_BLOCKS else -(-blocks // SUMMED_BLOCKS) * SUMMED_BLOCKS


def _bucket_blocks(span: _Span, shape: StepShape) -> int:
    """Return the power of two from the span's blocks on: those with the same are one group."""
    bucket: int = 1 << (_blocks(span, shape) - 1).bit_length()
    return bucket


def _group(spans: Sequence[_Span], shape: StepShape, blocks: int | None = None) -> AttentionGroup:
    """Return the group of ``spans``, all of one length, over ``blocks`` or as many as they need."""
    blocks = blocks or max(_blocks(span, shape) for span in spans)
    heads, kv_heads, group = shape.heads, shape.kv_heads, shape.group_heads
    count = spans[0].count
    queries = padded_rows(count * group, shape.query_counts)
    rows = np.array([span.first_row for span in spans])[:, None] + np.arange(count)
    positions = np.array([span.first_position for span in spans])[:, None] + np.arange(count)
    head = np.arange(heads).reshape(1, kv_heads, 1, group)
    by_head = rows[:, None, :, None]
    wide = (len(spans), kv_heads, count * group)
    projected = (by_head * (heads + 2 * kv_heads) + head).reshape(wide)
    answered = (by_head * heads + head).reshape(wide)
    spare = -1  # to be the last row, which is not read
    return AttentionGroup(
        queries=_padded(projected, queries).reshape(-1, queries),
        answers=_padded(answered, queries, spare).reshape(-1, queries),
        limits=_padded(np.repeat(positions, group, axis=1), queries),
        pages=_page_rows(spans, shape, blocks),
    )


def _page_rows(spans: Sequence[_Span], shape: StepShape, blocks: int) -> Indices:
    pages = np.full((len(spans), blocks * shape.block_pages), shape.pages, dtype=np.int64)
    for row, span in zip(pages, spans, strict=True):
        needed = -(-(span.first_position + span.count) // shape.page_tokens)
        row[:needed] = span.pages[:needed]
    by_block = pages.reshape(len(spans), blocks, 1, shape.block_pages)
    rows: Indices = by_block * shape.kv_heads + np.arange(shape.kv_heads)[:, None]
    return rows.reshape(-1)


def _plan(
    slots: Sequence[Slot],
    spans: Sequence[_Span],
    groups: Sequence[AttentionGroup],
    shape: StepShape,
) -> StepPlan:
    new = np.frombuffer(b"".join(slot.packed_tokens for slot in slots), dtype="<u4")
    if new.max() >= shape.vocabulary_size:
        refuse(f"packed_tokens: expected ids below {shape.vocabulary_size}, got {new.max()}")
    rows = padded_rows(len(new), shape.row_counts)
    positions = np.concatenate([span.first_position + np.arange(span.count) for span in spans])
    pages = np.concatenate([_new_pages(span, shape) for span in spans])
    last = [
        span.first_row + span.count - 1
        for slot, span in zip(slots, spans, strict=False)
        if slot.draws
    ]
    for group in groups:
        group.answers[group.answers < 0] = rows * shape.heads
    return StepPlan(
        tokens=_padded(new.astype(np.int64), rows, PAD_TOKEN),
        positions=_padded(positions, rows),
        kv_rows=_kv_rows(
            _padded(pages, rows, shape.pages),
            _padded(positions % shape.page_tokens, rows),
            shape,
        ),
        groups=tuple(groups),
        outputs=_padded(np.array(last, dtype=np.int64), padded_rows(len(last), shape.row_counts)),
        new_tokens=len(new),
        output_count=len(last),
    )


def _padded(array: Indices, width: int, value: int = 0) -> Indices:
    """Return ``array`` with its last axis filled up to ``width``."""
    padded = np.full((*array.shape[:-1], width), value, dtype=np.int64)
    padded[..., : array.shape[-1]] = array
    return padded


def _new_pages(span: _Span, shape: StepShape) -> Indices:
    """Return the page of each new token."""
    at = (span.first_position + np.arange(span.count)) // shape.page_tokens
    first = span.first_position // shape.page_tokens
    return np.array(span.pages[first : int(at[-1]) + 1], dtype=np.int64)[at - first]


def _kv_rows(pages: Indices, offsets: Indices, shape: StepShape) -> Indices:
    """Return rows of a layer's cache, which is (keys and values, pages, KV heads, page tokens)."""
    kind = np.arange(2)[:, None] * (shape.pages + 1)
    by_kind = (kind + pages[:, None, None]) * shape.kv_heads + np.arange(shape.kv_heads)
    rows: Indices = by_kind * shape.page_tokens + offsets[:, None, None]
    return rows.reshape(-1)
