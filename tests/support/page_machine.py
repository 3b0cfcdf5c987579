"""The operations of a page world as a hypothesis machine."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from support.page_shape import Shape
from support.page_world import PageWorld

_ANY = st.integers(0, 99)
_TOKENS = st.integers(0, 2)


class PageMachine(RuleBasedStateMachine):
    """The device alone, under every eviction policy."""

    world: PageWorld

    @initialize(
        pages=st.integers(2, 16),
        page_tokens=st.sampled_from([1, 2, 3]),
        step_tokens=st.integers(4, 24),
        sequences=st.integers(1, 5),
        eviction=st.sampled_from(["lru", "benefit", "quota"]),
        public_tokens=st.sampled_from([0, 4]),
        quotas=st.tuples(st.integers(0, 8), st.integers(0, 8)),
    )
    def start(self, pages: int, quotas: tuple[int, int], **shape: Any) -> None:
        quota_pages = (min(quotas[0], pages // 2), min(quotas[1], pages // 2))
        self.world = PageWorld(Shape(pages=pages, quota_pages=quota_pages, **shape))

    @rule(
        family=st.integers(0, 2),
        shared_tokens=st.integers(1, 16),
        tail=st.lists(_TOKENS, max_size=6),
        outputs=st.integers(1, 20),
        salt=st.integers(0, 2),
    )
    def submit(
        self, family: int, shared_tokens: int, tail: list[int], outputs: int, salt: int
    ) -> None:
        self.world.submit(family, shared_tokens, tail, outputs, salt)

    @rule(which=_ANY, outputs=st.integers(1, 12))
    def fork(self, which: int, outputs: int) -> None:
        self.world.fork(which, outputs)

    @rule()
    def schedule(self) -> None:
        self.world.schedule()

    @rule(token=_TOKENS)
    def complete(self, token: int) -> None:
        self.world.complete(token)

    @rule(steps=st.integers(2, 12), token=_TOKENS)
    def run(self, steps: int, token: int) -> None:
        for _ in range(steps):
            self.world.complete(token)
            self.world.schedule()
            self.world.check()

    @rule(cut=st.integers(0, 3))
    def fail(self, cut: int) -> None:
        self.world.fail(cut)

    @rule(which=_ANY)
    def abort(self, which: int) -> None:
        self.world.abort(which)

    @rule(which=_ANY, ttl_s=st.sampled_from([1.0, 1e9]))
    def pin(self, which: int, ttl_s: float) -> None:
        self.world.pin(which, ttl_s)

    @rule(which=_ANY)
    def unpin(self, which: int) -> None:
        self.world.unpin(which)

    @rule()
    def wait(self) -> None:
        self.world.wait(1.0)

    @rule(which=_ANY)
    def begin_read(self, which: int) -> None:
        self.world.begin_read(which)

    @rule()
    def end_read(self) -> None:
        self.world.end_read()

    @rule()
    def reset(self) -> None:
        self.world.reset()

    @rule(token=_TOKENS)
    def run_to_the_end(self, token: int) -> None:
        self.world.run_to_the_end(token)

    @invariant()
    def everything_holds(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.run_to_the_end(1)
            self.world.check()
