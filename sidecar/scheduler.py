"""Continuous batching: which sequences compute how many tokens in the next step.

Every step has a token budget. Running sequences come first, oldest first: one token each where they
decode, a chunk where they still prefill. What is left admits waiting sequences, first come first
served, as long as pages for their whole prompts are available. When a running sequence needs a page
and none is left, the youngest one is preempted: it gives all its pages back, waits at the head of
the queue and recomputes what is not cached any more. The oldest sequence can always proceed, since
``submit`` refuses what the pool could never hold.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec import Struct

from sidecar.clock import StepLoad

if TYPE_CHECKING:
    from sidecar.cache import BlockTable, PagedCache


class NeverFitsError(Exception):
    """The request needs more than this engine can ever hold; the client's to solve."""


class Phase(enum.Enum):
    """Where a sequence is in its life."""

    WAITING = enum.auto()
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
    """

    table: BlockTable
    prompt_tokens: int
    max_output_tokens: int
    phase: Phase = Phase.WAITING
    computed_tokens: int = 0
    cached_tokens: int | None = None
    preemptions: int = 0
    blocked_at_release: int | None = None

    @property
    def output_tokens(self) -> int:
        """Tokens sampled so far."""
        return self.table.total_tokens - self.prompt_tokens

    @property
    def pending_tokens(self) -> int:
        """Known tokens whose KV is not computed: 1 while decoding."""
        return self.table.total_tokens - self.computed_tokens


class Work(Struct, frozen=True):
    """``new_tokens`` to compute for one sequence, after ``context_tokens`` computed ones."""

    sequence: Sequence
    new_tokens: int
    context_tokens: int


@dataclass(slots=True)
class Step:
    """What runs together."""

    works: list[Work] = field(default_factory=list)

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


class Scheduler:
    """Composes steps over one paged cache. Pure: no clock, no I/O."""

    def __init__(self, cache: PagedCache, limits: SchedulerLimits) -> None:
        self.cache = cache
        self.limits = limits
        self.counters = SchedulerCounters()
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []

    @property
    def waiting_sequences(self) -> int:
        """Sequences without pages."""
        return len(self._waiting)

    @property
    def running_sequences(self) -> int:
        """Sequences with pages."""
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """Whether ``schedule`` would return a step with work."""
        return bool(self._running or self._waiting)

    def check_fits(self, prompt_tokens: int, max_output_tokens: int) -> None:
        """Raise NeverFitsError for what can never run; it says which limit is in the way."""
        wanted_tokens = prompt_tokens + max_output_tokens
        asked = f"{prompt_tokens} prompt tokens and {max_output_tokens} output tokens"
        if wanted_tokens > self.limits.max_sequence_tokens:
            message = (
                f"The maximum context length is {self.limits.max_sequence_tokens} tokens; "
                f"this request needs {wanted_tokens}: {asked}."
            )
            raise NeverFitsError(message)
        wanted_pages = self.cache.pages_for(wanted_tokens - 1)
        if wanted_pages > self.cache.pool.total_pages:
            message = (
                f"The KV cache has {self.cache.pool.total_pages} pages of {self.cache.page_tokens} "
                f"tokens; this request needs {wanted_pages} pages: {asked}."
            )
            raise NeverFitsError(message)

    def submit(self, table: BlockTable, max_output_tokens: int) -> Sequence:
        """Queue a prompt of at least one token; raises NeverFitsError."""
        prompt_tokens = table.total_tokens
        if prompt_tokens < 1 or max_output_tokens < 1:
            message = f"expected tokens, got {prompt_tokens} prompt and {max_output_tokens} output"
            raise ValueError(message)
        self.check_fits(prompt_tokens, max_output_tokens)
        sequence = Sequence(table, prompt_tokens, max_output_tokens)
        self._waiting.append(sequence)
        return sequence

    def schedule(self) -> Step:
        """Return the next step. Its pages are allocated and indexed; ``complete`` it when run."""
        step = Step()
        preemptions = self.counters.preemptions
        budget_tokens = self._continue_running(step, self.limits.max_step_tokens)
        if self.counters.preemptions == preemptions:
            self._admit_waiting(step, budget_tokens)
        return step

    def complete(self, step: Step) -> list[Sequence]:
        """Account for a step that ran; return the sequences that now sample a token."""
        sampling = []
        for work in step.works:
            sequence = work.sequence
            if sequence.phase is Phase.RUNNING:
                sequence.computed_tokens += work.new_tokens
                if sequence.pending_tokens == 0:
                    sampling.append(sequence)
        return sampling

    def append(self, sequence: Sequence, token: int) -> None:
        """Add a sampled token to ``sequence``."""
        sequence.table.packed += token.to_bytes(4, "little")
        self.counters.generated_tokens += 1

    def end(self, sequence: Sequence) -> None:
        """Finish or abort ``sequence``: its pages are released at once. Idempotent."""
        if sequence.phase is Phase.WAITING:
            self._waiting.remove(sequence)
        elif sequence.phase is Phase.RUNNING:
            self._running.remove(sequence)
            self.cache.release(sequence.table)
        sequence.phase = Phase.ENDED

    def _continue_running(self, step: Step, budget_tokens: int) -> int:
        index = 0
        while index < len(self._running) and budget_tokens > 0:
            sequence = self._running[index]
            new_tokens = min(sequence.pending_tokens, budget_tokens)
            if self._make_room(sequence, sequence.computed_tokens + new_tokens):
                self._plan(step, sequence, new_tokens)
                budget_tokens -= new_tokens
            index += 1
        return budget_tokens

    def _make_room(self, sequence: Sequence, tokens: int) -> bool:
        while not self.cache.grow(sequence.table, tokens):
            youngest = self._running.pop()
            self._preempt(youngest)
            if youngest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.cache.release(sequence.table)
        sequence.phase = Phase.WAITING
        sequence.computed_tokens = 0
        sequence.preemptions += 1
        sequence.blocked_at_release = None
        self.counters.preemptions += 1
        self._waiting.appendleft(sequence)

    def _admit_waiting(self, step: Step, budget_tokens: int) -> None:
        while (
            self._waiting and budget_tokens > 0 and len(self._running) < self.limits.max_sequences
        ):
            sequence = self._waiting[0]
            if not self._admit(sequence):
                return
            self._waiting.popleft()
            self._running.append(sequence)
            new_tokens = min(sequence.pending_tokens, budget_tokens)
            self._plan(step, sequence, new_tokens)
            budget_tokens -= new_tokens

    def _admit(self, sequence: Sequence) -> bool:
        """Give ``sequence`` its pages; a refusal stands until pages were released."""
        releases = self.cache.pool.releases
        if sequence.blocked_at_release == releases:
            return False
        reused_tokens = self.cache.acquire(sequence.table)
        if reused_tokens is None:
            sequence.blocked_at_release = releases
            return False
        sequence.phase = Phase.RUNNING
        sequence.computed_tokens = reused_tokens
        if sequence.cached_tokens is None:
            sequence.cached_tokens = reused_tokens
            self.counters.queried_tokens += sequence.prompt_tokens
            self.counters.prompt_tokens += sequence.prompt_tokens
            self.counters.hit_tokens += reused_tokens
        return True

    def _plan(self, step: Step, sequence: Sequence, new_tokens: int) -> None:
        step.works.append(Work(sequence, new_tokens, sequence.computed_tokens))
        self.cache.index(sequence.table, sequence.computed_tokens + new_tokens)
