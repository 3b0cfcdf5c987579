"""Pages that go down to host and disk and come back: late, in part, wrong, or never."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from support.page_machine import PageMachine
from support.page_shape import Shape
from support.page_world import PageWorld

_ANY = st.integers(0, 99)


class TierMachine(PageMachine):
    """The page machine with tiers below the device that barely hold a few pages."""

    @initialize(
        pages=st.integers(2, 10),
        page_tokens=st.sampled_from([1, 2, 3]),
        step_tokens=st.integers(4, 24),
        sequences=st.integers(1, 5),
        eviction=st.sampled_from(["lru", "benefit", "quota"]),
        host_slots=st.integers(1, 4),
        disk_slots=st.integers(0, 4),
        fetch=st.sampled_from(["always", "cheaper"]),
        demote=st.sampled_from(["all", "reused"]),
        public_tokens=st.sampled_from([0, 4]),
    )
    def start(self, **shape: Any) -> None:
        self.world = PageWorld(Shape(page_ms=0.1, **shape))

    @rule(which=_ANY, cut=st.integers(0, 9), is_bad=st.booleans())
    def arrive(self, which: int, cut: int, is_bad: bool) -> None:  # noqa: FBT001 - hypothesis
        self.world.arrive(which, cut, is_bad=is_bad)

    @rule()
    def begin_write(self) -> None:
        self.world.begin_write()

    @rule(is_good=st.booleans())
    def end_write(self, is_good: bool) -> None:  # noqa: FBT001 - hypothesis
        self.world.end_write(is_good=is_good)


TestTierMachine = TierMachine.TestCase
TestTierMachine.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
