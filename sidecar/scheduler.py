"""Continuous batching: which sequences compute how many tokens in the next step.

Every step has a token budget. Running sequences come first, oldest first: one token each where they
decode, a chunk where they still prefill. What is left admits waiting sequences, first come first
served, as long as pages for their whole prompts are available. When a running sequence needs a page
and none is left, the youngest one is preempted: it gives all its pages back, waits at the head of
the queue and gets back what the cache and the tiers below still hold; the rest is recomputed. The
oldest sequence can always proceed: ``submit`` refuses what the pool could never hold, and pins
yield before anybody waits for ever.

Several answers to one prompt are prefilled once: the others fork from the first in the step that
ends its prompt, hold the same pages, and copy the last, partly filled one when they write to it.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from sidecar.eviction import TenantQuota
from sidecar.step import Phase, SchedulerCounters, SchedulerLimits, Sequence, Step, Work

if TYPE_CHECKING:
    from collections.abc import Sequence as Sequences

    from sidecar.cache import PagedCache
    from sidecar.table import BlockTable


class NeverFitsError(Exception):
    """The request needs more than this engine can ever hold; the client's to solve."""


class Scheduler:
    """Composes steps over one paged cache. Pure: no clock, no I/O."""

    def __init__(self, cache: PagedCache, limits: SchedulerLimits) -> None:
        self.cache = cache
        self.limits = limits
        self.counters = SchedulerCounters()
        self._waiting: OrderedDict[Sequence, None] = OrderedDict()
        self._running: list[Sequence] = []
        self._fetching: dict[Sequence, None] = {}
        self._ready: list[Sequence] = []
        self._forking: dict[Sequence, None] = {}
        self._unproven: list[Sequence] = []

    @property
    def waiting_sequences(self) -> int:
        """Sequences without pages."""
        return len(self._waiting) + len(self._forking)

    @property
    def running_sequences(self) -> int:
        """Sequences with pages."""
        return len(self._running) + len(self._fetching) + len(self._ready)

    @property
    def has_work(self) -> bool:
        """Whether ``schedule`` could return a step with work, now or once a fetch has ended."""
        return bool(self._running or self._waiting or self._ready)

    @property
    def is_fetching(self) -> bool:
        """Whether a sequence waits for content from elsewhere."""
        return bool(self._fetching)

    def check_fits(self, prompt_tokens: int, max_output_tokens: int, tenant: str = "") -> None:
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
        total_pages = self.most_pages(tenant)
        if wanted_pages > total_pages:
            message = (
                f"The KV cache has {total_pages} pages of {self.cache.page_tokens} tokens"
                f"{self._reserved_note(tenant)}; this request needs {wanted_pages} pages: {asked}."
            )
            raise NeverFitsError(message)

    def most_pages(self, tenant: str = "") -> int:
        """Return the pages that one sequence of ``tenant`` can have at most."""
        return self.cache.pool.total_pages - self._reserved_pages(tenant)

    def submit(
        self,
        table: BlockTable,
        max_output_tokens: int,
        *,
        parent: Sequence | None = None,
        has_peer: bool = False,
    ) -> Sequence:
        """Queue a prompt of at least one token; raises NeverFitsError.

        With a ``parent`` of the same prompt that is not through with it, it forks from that one.
        """
        prompt_tokens = table.total_tokens
        if prompt_tokens < 1 or max_output_tokens < 1:
            message = f"expected tokens, got {prompt_tokens} prompt and {max_output_tokens} output"
            raise ValueError(message)
        self.check_fits(prompt_tokens, max_output_tokens, table.place.tenant)
        sequence = Sequence(table, prompt_tokens, max_output_tokens, has_peer=has_peer)
        if parent is not None and parent.can_fork:
            sequence.phase = Phase.FORKING
            parent.forks.append(sequence)
            self._forking[sequence] = None
        else:
            self._waiting[sequence] = None
        return sequence

    def schedule(self, now_s: float = 0.0) -> Step:
        """Return the next step. Its pages are allocated and indexed; ``complete`` it when run.

        A step without works is not to be run: what it would have copied is in the next one.
        """
        self.cache.now_s = now_s
        self.cache.pool.expire_pins(now_s)
        step = Step()
        preemptions = self.counters.preemptions
        self._running += self._ready
        self._ready.clear()
        budget_tokens = self._continue_running(step, self.limits.max_step_tokens)
        if self.counters.preemptions == preemptions or not step.works:
            self._admit_waiting(step, budget_tokens)
        self._unproven += step.admitted
        if step.works:
            step.moves = self.cache.drain_moves()
        return step

    def complete(self, step: Step) -> list[Sequence]:
        """Account for a step that ran; return the sequences that now sample a token."""
        sampling = []
        for work in step.works:
            end_tokens = work.context_tokens + work.new_tokens
            for sequence in (work.sequence, *work.forks):
                if sequence.phase is not Phase.RUNNING:
                    continue
                sequence.computed_tokens = end_tokens
                self.cache.fill(sequence.table, work.first_token, end_tokens)
                if sequence.pending_tokens == 0:
                    sampling.append(sequence)
        self._unproven.clear()
        if self.cache.exchange is not None:
            self.cache.exchange.finish(step.moves)
        return sampling

    def fail(self, step: Step) -> list[Sequence]:
        """Undo a step that did not run to its end; return the sequences to end with an error."""
        self.cache.unindex(step.indexed)
        if self.cache.exchange is not None:
            self.cache.exchange.undo(step.moves)
        touched = {each: None for work in step.works for each in (work.sequence, *work.forks)}
        # What was admitted since the last step that ran may count on what this one had to save.
        touched |= dict.fromkeys(self._unproven)
        self._unproven.clear()
        return [each for each in touched if each.phase is not Phase.ENDED]

    def fetched(self, sequence: Sequence, contents: Sequences[bytes | None]) -> int:
        """Let a fetching ``sequence`` run with what came; return the tokens that it reuses."""
        del self._fetching[sequence]
        reused_tokens = self.cache.arrive(sequence.table, contents)
        self._count_admission(sequence, reused_tokens)
        sequence.phase = Phase.RUNNING
        self._ready.append(sequence)
        return reused_tokens

    def append(self, sequence: Sequence, token: int) -> None:
        """Add a sampled token to ``sequence``."""
        sequence.table.packed += token.to_bytes(4, "little")
        self.counters.generated_tokens += 1

    def end(self, sequence: Sequence, why: str = "done") -> None:
        """Finish or abort ``sequence``: its pages are released at once. Idempotent."""
        match sequence.phase:
            case Phase.WAITING:
                del self._waiting[sequence]
            case Phase.FORKING:
                del self._forking[sequence]
            case Phase.FETCHING:
                del self._fetching[sequence]
                self.cache.release(sequence.table, why)
            case Phase.RUNNING:
                (self._ready if sequence in self._ready else self._running).remove(sequence)
                self.cache.release(sequence.table, why)
            case Phase.ENDED:
                return
        sequence.phase = Phase.ENDED
        self._queue_forks(sequence)

    def _reserved_pages(self, tenant: str) -> int:
        eviction = self.cache.pool.eviction
        return eviction.reserved_pages(tenant) if isinstance(eviction, TenantQuota) else 0

    def _reserved_note(self, tenant: str) -> str:
        reserved_pages, pages = self._reserved_pages(tenant), self.cache.pool.total_pages
        if not reserved_pages:
            return ""
        return f" for it, as {reserved_pages} of {pages} are guaranteed to other tenants"

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
        while not self.cache.grow(sequence.table, tokens, sequence.computed_tokens):
            youngest = self._running.pop()
            self._preempt(youngest)
            if youngest is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.cache.release(sequence.table, "preempted")
        sequence.phase = Phase.WAITING
        sequence.computed_tokens = 0
        sequence.preemptions += 1
        sequence.blocked_at_release = None
        self.counters.preemptions += 1
        self._waiting[sequence] = None
        self._waiting.move_to_end(sequence, last=False)

    def _admit_waiting(self, step: Step, budget_tokens: int) -> None:
        while (
            self._waiting
            and budget_tokens > 0
            and self.running_sequences < self.limits.max_sequences
        ):
            sequence = next(iter(self._waiting))
            if not self._admit(sequence):
                return
            del self._waiting[sequence]
            step.admitted.append(sequence)
            if sequence.phase is Phase.FETCHING:
                self._fetching[sequence] = None
                continue
            self._running.append(sequence)
            new_tokens = min(sequence.pending_tokens, budget_tokens)
            self._plan(step, sequence, new_tokens)
            budget_tokens -= new_tokens

    def _admit(self, sequence: Sequence) -> bool:
        """Give ``sequence`` its pages; a refusal stands until pages were released."""
        pool = self.cache.pool
        if sequence.blocked_at_release == pool.releases:
            return False
        acquired = self.cache.acquire(sequence.table, has_peer=sequence.has_peer)
        if acquired is None and not self.running_sequences and pool.pinned():
            pool.unpin(pool.pinned()[::-1], "pressure")
            acquired = self.cache.acquire(sequence.table, has_peer=sequence.has_peer)
        if acquired is None:
            sequence.blocked_at_release = pool.releases
            return False
        sequence.has_peer = False  # one attempt: what it does not hold now is computed
        if acquired.is_pending:
            sequence.phase = Phase.FETCHING
            return True
        sequence.phase = Phase.RUNNING
        self._count_admission(sequence, acquired.reused_tokens)
        return True

    def _count_admission(self, sequence: Sequence, reused_tokens: int) -> None:
        sequence.computed_tokens = reused_tokens
        if sequence.cached_tokens is None:
            sequence.cached_tokens = reused_tokens
            self.counters.queried_tokens += sequence.prompt_tokens
            self.counters.prompt_tokens += sequence.prompt_tokens
            self.counters.hit_tokens += reused_tokens

    def _plan(self, step: Step, sequence: Sequence, new_tokens: int) -> None:
        context_tokens = sequence.computed_tokens
        end_tokens = context_tokens + new_tokens
        first_token = context_tokens
        if sequence.table.arrivals and self.cache.exchange is not None:
            first_token = sequence.table.indexed_pages * self.cache.page_tokens
            self.cache.exchange.stage(sequence.table)
        step.indexed += self.cache.index(sequence.table, end_tokens)
        forks = self._fork(sequence) if end_tokens >= sequence.prompt_tokens else ()
        step.works.append(Work(sequence, new_tokens, context_tokens, first_token, forks))

    def _fork(self, parent: Sequence) -> tuple[Sequence, ...]:
        """Let the answers that wait for ``parent`` share its pages, as many as may run."""
        parent.has_forked = True
        room = self.limits.max_sequences - self.running_sequences
        waiting = [each for each in parent.forks if each.phase is Phase.FORKING]
        forks = tuple(waiting[: max(0, room)])
        parent.forks = waiting[len(forks) :]
        for fork in forks:
            del self._forking[fork]
            self.cache.fork(parent.table, fork.table)
            fork.phase = Phase.RUNNING
            fork.has_forked = True  # it is through with the prompt, too
            fork.computed_tokens = parent.computed_tokens
            fork.cached_tokens = 0
            self._ready.append(fork)
        self._queue_forks(parent)
        return forks

    def _queue_forks(self, parent: Sequence) -> None:
        """Let what still waits for ``parent`` go its own way: it finds the pages in the cache."""
        for fork in parent.forks:
            if fork.phase is Phase.FORKING:
                del self._forking[fork]
                fork.phase = Phase.WAITING
                self._waiting[fork] = None
        parent.forks = []
