"""State machine: each form of the table below the index against a plain dict of sets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from state.block_table import ASKED, DictTable
from support.fleet_state import block
from support.native import native_table, needs_compiler

if TYPE_CHECKING:
    from state.block_table import BlockTable
    from state.model import BlockId

_BITS = st.sampled_from([1 << place for place in (1, 2, 3, 31, 32, 64, 200)])
_KNOWN = [block(number) for number in range(12)]
_BLOCKS = st.lists(st.sampled_from(_KNOWN), max_size=40)


class TableMachine(RuleBasedStateMachine):
    """A dict from block to bitmap says what a table holds, whatever is added twice or absent."""

    def __init__(self) -> None:
        super().__init__()
        self.table: BlockTable = DictTable()
        self.model: dict[BlockId, int] = {}

    @rule(blocks=_BLOCKS, bit=_BITS)
    def add(self, blocks: list[BlockId], bit: int) -> None:
        fresh = self.table.add(blocks, bit)
        expected = [one for one in dict.fromkeys(blocks) if not self.model.get(one, 0) & bit]
        assert fresh == expected
        for one in expected:
            self.model[one] = self.model.get(one, 0) | bit

    @rule(blocks=_BLOCKS, bit=_BITS)
    def discard(self, blocks: list[BlockId], bit: int) -> None:
        lost = list(self.table.discard(blocks, bit))
        expected = {one for one in blocks if self.model.get(one, 0) & bit}
        assert len(lost) == len(set(lost))
        assert set(lost) == expected
        for one in expected:
            self.model[one] &= ~bit
            if self.model[one] <= ASKED:
                del self.model[one]

    @rule(blocks=_BLOCKS)
    def mark(self, blocks: list[BlockId]) -> None:
        known = [one for one in blocks if one in self.model]
        self.table.add(known, ASKED)
        for one in known:
            self.model[one] |= ASKED

    @rule(blocks=_BLOCKS)
    def unmark(self, blocks: list[BlockId]) -> None:
        self.table.discard(blocks, ASKED)
        for one in blocks:
            if one in self.model:
                self.model[one] &= ~ASKED

    @invariant()
    def it_knows_what_the_model_knows(self) -> None:
        assert len(self.table) == len(self.model)
        assert self.table.masks(_KNOWN) == [self.model.get(one, 0) for one in _KNOWN]

    @rule(chain=_BLOCKS)
    def a_walk_tells_each_block(self, chain: list[BlockId]) -> None:
        told: list[int] = []
        for depth, mask in self.table.walk(chain, until_unknown=False):
            assert depth > len(told)
            told += [mask] * (depth - len(told))
        masks = [self.model.get(one, 0) for one in chain]
        assert told == masks
        told = []
        for depth, mask in self.table.walk(chain, until_unknown=True):
            told += [mask] * (depth - len(told))
        upto = masks.index(0) + 1 if 0 in masks else len(masks)
        assert told == masks[:upto]


class NativeTableMachine(TableMachine):
    """The same of the compact form; its numbers of holders are given back, too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = native_table()

    @invariant()
    def only_sets_in_use_are_kept(self) -> None:
        assert len(self.table._sets) == 1 + len(set(self.model.values()))  # type: ignore[attr-defined]


_BOUNDED = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestDictTable = TableMachine.TestCase
TestDictTable.settings = _BOUNDED
TestNativeTable = needs_compiler(NativeTableMachine.TestCase)
TestNativeTable.settings = _BOUNDED
