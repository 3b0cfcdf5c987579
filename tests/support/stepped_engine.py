"""An engine in virtual time, step by step as written down: slow, and simple enough to trust.

It knows its step cost; prompts that begin alike share whole pages. No code of ``replay`` but the
shape of answers.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from replay.probe import Answer
from sidecar.clock import StepLoad

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sidecar.clock import StepCost

PAGE_TOKENS = 16


@dataclass(slots=True, eq=False)
class Stepped:
    """One request: when it was sent, and what became of it."""

    sent_s: float
    tokens: tuple[int, ...]
    output_tokens: int
    cached: int = 0
    computed: int = 0
    times_s: list[float] = field(default_factory=list)


@dataclass(slots=True)
class SteppedEngine:
    """``ask`` takes requests that come at the same virtual time; ``serve`` takes arrivals.

    A request takes ``overhead_ms`` before it is in the engine, and ``overhead_token_ms`` per token.
    """

    cost: StepCost
    step_tokens: int = 8192
    max_sequences: int = 256
    overhead_ms: float = 0.0
    overhead_token_ms: float = 0.0
    tells_cached: bool = True
    is_caching: bool = True
    now_s: float = 0.0
    asked: list[Stepped] = field(default_factory=list)
    _pending: list[tuple[Stepped, asyncio.Future[None]]] = field(default_factory=list)
    _pages: set[int] = field(default_factory=set)

    def clock(self) -> float:
        """Return the virtual time."""
        return self.now_s

    async def ask(self, tokens: Sequence[int], output_tokens: int) -> Answer:
        """Serve with all others that are asked before anybody waits."""
        one = Stepped(self.now_s, tuple(tokens), output_tokens)
        self.asked.append(one)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending.append((one, done))
        if len(self._pending) == 1:
            asyncio.get_running_loop().call_soon(self._serve_pending)
        await done
        return self._answer(one)

    def _serve_pending(self) -> None:
        pending, self._pending = self._pending, []
        self.serve([one for one, _ in pending])
        for _, done in pending:
            done.set_result(None)

    def _answer(self, one: Stepped) -> Answer:
        cached = one.cached if self.tells_cached else None
        return Answer(sent_s=one.sent_s, times_s=tuple(one.times_s), cached_tokens=cached)

    def serve(self, requests: Sequence[Stepped]) -> list[Answer]:
        """Run steps until all are answered; they come by arrival."""
        coming = sorted(requests, key=self._in_engine_s)
        running: list[Stepped] = []
        while coming or running:
            if not running:
                self.now_s = max(self.now_s, self._in_engine_s(coming[0]))
            loads: list[tuple[Stepped, int]] = []
            budget = self.step_tokens
            for one in running:
                loads.append((one, min(budget, self._known(one) - one.computed)))
                budget -= loads[-1][1]
            while coming and budget and len(running) < self.max_sequences:
                if self._in_engine_s(coming[0]) > self.now_s:
                    break
                one = coming.pop(0)
                one.cached = one.computed = self._found(one.tokens)
                running.append(one)
                loads.append((one, min(budget, len(one.tokens) - one.computed)))
                budget -= loads[-1][1]
            self._step(loads)
            running = [one for one in running if len(one.times_s) < one.output_tokens]
        return [self._answer(one) for one in requests]

    def _in_engine_s(self, one: Stepped) -> float:
        overhead_ms = self.overhead_ms + self.overhead_token_ms * len(one.tokens)
        return one.sent_s + 1e-3 * overhead_ms

    def _known(self, one: Stepped) -> int:
        return len(one.tokens) + len(one.times_s)

    def _found(self, tokens: tuple[int, ...]) -> int:
        found = 0
        while self.is_caching and hash(tokens[: found + PAGE_TOKENS]) in self._pages:
            found += PAGE_TOKENS
            if found + PAGE_TOKENS >= len(tokens):
                break
        return found

    def _step(self, loads: Sequence[tuple[Stepped, int]]) -> None:
        prefill = pairs = decoding = read = 0
        for one, new in loads:
            if one.times_s:
                decoding += 1
                read += one.computed
            else:
                prefill += new
                pairs += sum(range(one.computed + 1, one.computed + new + 1))
        self.now_s += self.cost.step_s(StepLoad(prefill, pairs, decoding, read))
        for one, new in loads:
            one.computed += new
            if one.computed == self._known(one):
                one.times_s.append(self.now_s)
                for end in range(PAGE_TOKENS, len(one.tokens) + 1, PAGE_TOKENS):
                    if len(one.times_s) == 1:
                        self._pages.add(hash(one.tokens[:end]))
