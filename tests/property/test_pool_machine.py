"""Pool, tree and scheduler under random lives: pages are conserved and events tell the truth."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sidecar.cache import PagedCache, PagesCleared, PagesRemoved, PagesStored
from sidecar.scheduler import NeverFitsError, Phase, Scheduler, SchedulerLimits, Sequence, Step
from state.model import BlockId
from state.prefix import chain_of, pack_tokens

if TYPE_CHECKING:
    from sidecar.pool import PageId

ROOTS = (BlockId(b"plain".ljust(16)), BlockId(b"salted".ljust(16)))


class EngineMachine(RuleBasedStateMachine):
    """Submits, steps, aborts and resets, with prompts that share prefixes of a few shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.live: list[Sequence] = []
        self.ended: list[Sequence] = []
        self.announced: Counter[BlockId] = Counter()
        self.parents: dict[BlockId, BlockId | None] = {}
        self.step: Step | None = None

    @initialize(
        pages=st.integers(2, 16),
        page_tokens=st.sampled_from([1, 2, 3]),
        step_tokens=st.integers(4, 24),
        sequences=st.integers(2, 5),
    )
    def start(self, pages: int, page_tokens: int, step_tokens: int, sequences: int) -> None:
        limits = SchedulerLimits(
            max_sequences=sequences, max_step_tokens=step_tokens, max_sequence_tokens=60
        )
        self.cache = PagedCache(pages, page_tokens)
        self.scheduler = Scheduler(self.cache, limits)

    @rule(
        shared_tokens=st.integers(1, 16),
        tail=st.lists(st.integers(0, 2), max_size=6),
        outputs=st.integers(1, 20),
        root=st.sampled_from(ROOTS),
    )
    def submit(self, shared_tokens: int, tail: list[int], outputs: int, root: BlockId) -> None:
        packed = pack_tokens([*range(shared_tokens), *tail])
        table = self.cache.open_table(packed, root)
        wanted_tokens = shared_tokens + len(tail) + outputs
        fits = wanted_tokens <= 60 and (
            self.cache.pages_for(wanted_tokens - 1) <= self.cache.pool.total_pages
        )
        try:
            self.live.append(self.scheduler.submit(table, outputs))
        except NeverFitsError:
            assert not fits
        else:
            assert fits

    @precondition(lambda self: self.step is None and self.scheduler.has_work)
    @rule()
    def schedule(self) -> None:
        step = self.scheduler.schedule()
        assert step.works, "work that never proceeds"
        planned = sum(work.new_tokens for work in step.works)
        assert planned <= self.scheduler.limits.max_step_tokens
        assert len({id(work.sequence) for work in step.works}) == len(step.works)
        assert self.scheduler.running_sequences <= self.scheduler.limits.max_sequences
        self.step = step

    @precondition(lambda self: self.step is not None)
    @rule(token=st.integers(0, 2))
    def complete(self, token: int) -> None:
        assert self.step is not None
        for sequence in self.scheduler.complete(self.step):
            self.scheduler.append(sequence, token)
            if sequence.output_tokens == sequence.max_output_tokens:
                self._end(sequence)
        self.step = None

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: Any) -> None:
        self._end(data.draw(st.sampled_from(self.live)))

    @rule()
    def reset(self) -> None:
        self.cache.reset()
        assert self.cache.pool.cached_pages == 0

    @precondition(lambda self: self.step is None and self.scheduler.has_work)
    @rule(steps=st.integers(2, 12), token=st.integers(0, 2))
    def run(self, steps: int, token: int) -> None:
        for _ in range(steps):
            if self.scheduler.has_work:
                self.schedule()
                self.pages_are_conserved()
                self.complete(token)

    @precondition(lambda self: self.step is None and self.scheduler.has_work)
    @rule()
    def run_to_the_end(self) -> None:
        for _ in range(2000):
            if not self.scheduler.has_work:
                break
            self.schedule()
            self.complete(1)
        assert not self.live
        assert self.cache.pool.held_pages == 0

    @invariant()
    def pages_are_conserved(self) -> None:
        pool = self.cache.pool
        pool.audit()
        references: Counter[PageId] = Counter()
        for sequence in self.live:
            pages = sequence.table.pages
            assert len(set(pages)) == len(pages)
            references.update(pages)
            assert (sequence.phase is Phase.RUNNING) == bool(pages)
            assert len(pages) >= self.cache.pages_for(sequence.computed_tokens)
        assert len(references) == pool.held_pages
        assert all(pool.references(page) == count for page, count in references.items())

    @invariant()
    def the_ended_hold_nothing(self) -> None:
        assert all(not sequence.table.pages for sequence in self.ended)

    @invariant()
    def a_prompt_computes_at_least_its_last_token(self) -> None:
        for sequence in self.live + self.ended:
            cached_tokens = sequence.cached_tokens
            assert cached_tokens is None or 0 <= cached_tokens < sequence.prompt_tokens
            assert sequence.computed_tokens < sequence.table.total_tokens

    @invariant()
    def events_replay_to_the_content(self) -> None:
        for change in self.cache.drain_changes():
            match change:
                case PagesStored(keys=keys, parent=parent, token_ids=token_ids):
                    self._check_run(keys, parent, token_ids)
                    self.announced.update(keys)
                case PagesRemoved(keys=keys):
                    self.announced.subtract(keys)
                    assert all(self.announced[key] >= 0 for key in keys)
                case PagesCleared():
                    self.announced.clear()
        assert +self.announced == self.cache.tree.copies()

    @invariant()
    def no_prefix_has_a_hole(self) -> None:
        content = self.cache.tree.copies()
        for key in content:
            parent = self.parents[key]
            assert parent is None or parent in content

    def _check_run(
        self, keys: tuple[BlockId, ...], parent: BlockId | None, token_ids: list[int]
    ) -> None:
        """Keys follow from parent and tokens alone, so that a reader can follow the chain."""
        roots = ROOTS if parent is None else (parent,)
        packed = pack_tokens(token_ids)
        assert keys in [chain_of(root, packed, self.cache.page_tokens, 0) for root in roots]
        for key, above in zip(keys, (parent, *keys), strict=False):
            self.parents[key] = above

    def _end(self, sequence: Sequence) -> None:
        self.scheduler.end(sequence)
        self.live.remove(sequence)
        self.ended.append(sequence)


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
