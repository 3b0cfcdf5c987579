"""What the scheduler works on: sequences, and the steps that it makes of them."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec import Struct

from sidecar.clock import StepLoad
from sidecar.table import Moves

if TYPE_CHECKING:
    from sidecar.pool import PageId
    from sidecar.table import BlockTable


class Phase(enum.Enum):
    """Where a sequence is in its life."""

    WAITING = enum.auto()
    FORKING = enum.auto()
    """Waits for another one to compute the same prompt."""
    FETCHING = enum.auto()
    """Has pages, and waits for content from disk or from another worker."""
    RUNNING = enum.auto()
    ENDED = enum.auto()


class SchedulerLimits(Struct, frozen=True, kw_only=True):
    """What one step and one sequence may take."""

    max_sequences: int = 256
    max_step_tokens: int = 8192
    max_sequence_tokens: int = 131_072


@dataclass(slots=True, eq=False)
class Sequence:
    """One prompt on its way to ``max_output_tokens``.

    ``cached_tokens`` is what the cache saved when the sequence was first scheduled, None before.
    ``has_peer``: another worker may have what this one has not. ``forks`` wait for this one.
    """

    table: BlockTable
    prompt_tokens: int
    max_output_tokens: int
    phase: Phase = Phase.WAITING
    computed_tokens: int = 0
    cached_tokens: int | None = None
    preemptions: int = 0
    blocked_at_release: int | None = None
    has_peer: bool = False
    has_forked: bool = False
    forks: list[Sequence] = field(default_factory=list)

    @property
    def output_tokens(self) -> int:
        """Tokens sampled so far."""
        return self.table.total_tokens - self.prompt_tokens

    @property
    def pending_tokens(self) -> int:
        """Known tokens whose KV is not computed: 1 while decoding."""
        return self.table.total_tokens - self.computed_tokens

    @property
    def can_fork(self) -> bool:
        """Whether the step that ends the prompt is still to come."""
        return not self.has_forked and self.phase not in (Phase.FORKING, Phase.ENDED)


class Work(Struct, frozen=True):
    """``new_tokens`` to compute for one sequence, after ``context_tokens`` computed ones.

    From ``first_token`` on, pages get content in this step: loaded ones come before computed ones.
    ``forks`` continue from the same tokens.
    """

    sequence: Sequence
    new_tokens: int
    context_tokens: int
    first_token: int
    forks: tuple[Sequence, ...] = ()


@dataclass(slots=True)
class Step:
    """What runs together. ``indexed`` is what to undo if it fails."""

    works: list[Work] = field(default_factory=list)
    moves: Moves = field(default_factory=Moves)
    indexed: list[PageId] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)

    def load(self) -> StepLoad:
        """Return what the step costs in the terms of the clock."""
        prefill_tokens = attention_pairs = decode_sequences = kv_tokens_read = 0
        for work in self.works:
            if work.new_tokens == 1 and work.context_tokens >= work.sequence.prompt_tokens:
                decode_sequences += 1
                kv_tokens_read += work.context_tokens
            else:
                new = work.new_tokens
                prefill_tokens += new
                attention_pairs += new * work.context_tokens + new * (new + 1) // 2
        return StepLoad(prefill_tokens, attention_pairs, decode_sequences, kv_tokens_read)


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the start."""

    queried_tokens: int = 0
    hit_tokens: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
