"""The engine loop: runs scheduler steps on the calibrated clock and hands tokens to requests.

Everything happens on one event loop and between two awaits, so a request is submitted, advanced or
aborted as a whole. The loop sleeps for the duration of each step and waits on an event when idle.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from msgspec import Struct

from sidecar.clock import StepCost
from sidecar.pool import PoolError
from sidecar.stop import StopFilter
from state.model import BlockId, ModelIdentity
from state.prefix import TOKEN_BYTES, chain_root, salt_scope

if TYPE_CHECKING:
    from collections.abc import Callable

    from sidecar.cache import PageChange
    from sidecar.runner import Lexicon, Voice
    from sidecar.scheduler import Scheduler, Sequence

FinishReason = Literal["stop", "length"]

_SHORTEST_SLEEP_S: Final = 0.0005
_LONGEST_LAG_S: Final = 0.02


class Generation(Struct, frozen=True, kw_only=True):
    """What to generate after one prompt.

    ``max_output_tokens`` None means as many as the voice likes, or as fit with ``ignore_eos``.
    ``choice`` is the index of the answer within its HTTP request; ``sample`` tells apart several
    answers to one prompt.
    """

    packed_prompt: bytes
    max_output_tokens: int | None = None
    ignore_eos: bool = False
    stops: tuple[str, ...] = ()
    salt: str | None = None
    seed: int = 0
    choice: int = 0
    sample: int = 0


class Delta(Struct, frozen=True):
    """Tokens that one step added to one answer; the last one has a ``finish``."""

    choice: int
    token_ids: list[int]
    text: str
    finish: FinishReason | None = None
    stopped_by: str | None = None


class Halted(Struct, frozen=True):
    """The engine stopped before the answer was complete."""


class EngineHaltedError(Exception):
    """The engine takes no more generations."""


@dataclass(slots=True, eq=False)
class Ticket:
    """One submitted generation, from ``submit`` to its last delta or ``abort``."""

    generation: Generation
    sequence: Sequence
    voice: Voice
    stop_filter: StopFilter
    finish_at_limit: FinishReason
    sink: Callable[[Delta | Halted], None]


class EngineOptions(Struct, frozen=True, kw_only=True):
    """What the engine is besides its scheduler."""

    model: str
    cost: StepCost
    speed_up: float = 1.0
    seed: int = 0


class Engine:
    """Runs steps; ``publish`` receives each step's cache changes, ``time_s`` is monotonic."""

    def __init__(
        self,
        scheduler: Scheduler,
        lexicon: Lexicon,
        options: EngineOptions,
        publish: Callable[[list[PageChange]], None],
        time_s: Callable[[], float],
    ) -> None:
        self.scheduler = scheduler
        self._lexicon = lexicon
        self._options = options
        self._publish = publish
        self._time_s = time_s
        self._tickets: dict[Sequence, Ticket] = {}
        self._wake = asyncio.Event()
        self._due_s = 0.0
        self.is_halted = False
        self._drained = asyncio.Event()
        self._drained.set()

    async def drained(self) -> None:
        """Wait until every generation has finished or was aborted."""
        await self._drained.wait()

    def submit(self, generation: Generation, sink: Callable[[Delta | Halted], None]) -> Ticket:
        """Queue ``generation``; raises NeverFitsError or EngineHaltedError.

        ``sink`` is called once for each step that samples, never from within ``submit``.
        """
        if self.is_halted:
            raise EngineHaltedError
        prompt = generation.packed_prompt
        voice = self._lexicon.voice(prompt, self._options.seed ^ generation.seed, generation.sample)
        prompt_tokens = len(prompt) // TOKEN_BYTES
        output_tokens, finish = self._output_limit(generation, prompt_tokens, voice)
        self.scheduler.check_fits(prompt_tokens, output_tokens)
        table = self.scheduler.cache.open_table(
            prompt, self._root(generation.salt), generation.salt
        )
        sequence = self.scheduler.submit(table, output_tokens)
        ticket = Ticket(generation, sequence, voice, StopFilter(generation.stops), finish, sink)
        self._tickets[sequence] = ticket
        self._drained.clear()
        self._wake.set()
        return ticket

    def abort(self, ticket: Ticket) -> None:
        """End ``ticket`` and release its pages now, also in the middle of a step. Idempotent."""
        if ticket.sequence in self._tickets:
            self._forget(ticket.sequence)

    def reset_prefix_cache(self) -> None:
        """Forget all cached content and announce it at once."""
        self.scheduler.cache.reset()
        self._publish(self.scheduler.cache.drain_changes())

    def halt(self) -> None:
        """End every generation with ``Halted`` and take no more."""
        self.is_halted = True
        for ticket in list(self._tickets.values()):
            self.abort(ticket)
            ticket.sink(Halted())

    async def run(self) -> None:
        """Run steps until cancelled."""
        while True:
            while not self.scheduler.has_work:  # what woke it may have left again
                self._wake.clear()
                await self._wake.wait()
                self._due_s = self._time_s()
            await self._run_step()

    async def _run_step(self) -> None:
        step = self.scheduler.schedule()
        if not step.works:
            message = "sequences wait and none can run"
            raise PoolError(message)
        # Told before the step runs: from here on its pages are shared, and those it took are gone.
        self._publish(self.scheduler.cache.drain_changes())
        await self._pace(self._options.cost.step_s(step.load()) / self._options.speed_up)
        for sequence in self.scheduler.complete(step):
            self._advance(self._tickets[sequence])

    async def _pace(self, duration_s: float) -> None:
        """Wait until the step is due; what earlier sleeps were late is made up for."""
        now_s = self._time_s()
        self._due_s = max(self._due_s, now_s - _LONGEST_LAG_S) + duration_s
        wait_s = self._due_s - now_s
        await asyncio.sleep(wait_s if wait_s > _SHORTEST_SLEEP_S else 0)

    def _advance(self, ticket: Ticket) -> None:
        sequence = ticket.sequence
        piece = ticket.voice.next_piece()
        self.scheduler.append(sequence, piece.token)
        passed = ticket.stop_filter.feed(piece.text)
        text = passed.text
        finish: FinishReason | None = None
        if passed.stopped_by is not None:
            finish = "stop"
        elif sequence.output_tokens >= sequence.max_output_tokens:
            finish = ticket.finish_at_limit
            text += ticket.stop_filter.flush()
        if finish is not None:
            self._forget(sequence)
        choice = ticket.generation.choice
        ticket.sink(Delta(choice, [piece.token], text, finish, passed.stopped_by))

    def _forget(self, sequence: Sequence) -> None:
        del self._tickets[sequence]
        self.scheduler.end(sequence)
        if not self._tickets:
            self._drained.set()

    def _output_limit(
        self, generation: Generation, prompt_tokens: int, voice: Voice
    ) -> tuple[int, FinishReason]:
        if generation.max_output_tokens is not None:
            return generation.max_output_tokens, "length"
        cache = self.scheduler.cache
        pool_tokens = cache.pool.total_pages * cache.page_tokens + 1
        most_tokens = min(self.scheduler.limits.max_sequence_tokens, pool_tokens)
        room_tokens = max(1, most_tokens - prompt_tokens)
        natural_tokens = voice.natural_length()
        if generation.ignore_eos or natural_tokens > room_tokens:
            return room_tokens, "length"
        return natural_tokens, "stop"

    def _root(self, salt: str | None) -> BlockId:
        identity = ModelIdentity(
            model=self._options.model,
            scope=salt_scope(salt or ""),
            block_tokens=self.scheduler.cache.page_tokens,
        )
        return chain_root(identity, self._options.seed % 2**64)
