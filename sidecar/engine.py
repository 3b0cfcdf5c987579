"""The engine loop: runs the scheduler's steps on a runner and hands tokens to requests.

All decisions happen on one event loop and between two awaits, so a request is submitted, advanced
or aborted as a whole. While a step runs, in the runner's own thread, requests may come and go: what
a step that is under way writes is never handed out before it has ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from prompt.codec import Codec
from sidecar.account import kv_report
from sidecar.cost import MeasuredCosts
from sidecar.detokenizer import Probe, TextStream, find_probe
from sidecar.generation import (
    Delta,
    EngineHaltedError,
    FinishReason,
    Generation,
    Halted,
    HaltReason,
)
from sidecar.journal import Transition
from sidecar.ledger import PageLedger
from sidecar.mover import Mover
from sidecar.pagechange import PageChange
from sidecar.pool import PoolError
from sidecar.runner import Batch, Draw, Load, Runner, Save, Slot, prompt_key
from sidecar.scheduler import Scheduler
from sidecar.scope import Place, Scopes
from sidecar.step import Phase
from sidecar.stop import StopFilter
from state.prefix import TOKEN_BYTES

if TYPE_CHECKING:
    from sidecar.report import KvReport
    from sidecar.runner import Outcome, Sampled
    from sidecar.step import Sequence, Step
    from sidecar.table import BlockTable

_MOST_FAILURES: Final = 3
_READ_S: Final = 0.001
_LOG = logging.getLogger("warmroute.worker")


@dataclass(slots=True, eq=False)
class Ticket:
    """One submitted generation, from ``submit`` to its last delta or ``abort``."""

    generation: Generation
    sequence: Sequence
    text: TextStream
    stop_filter: StopFilter
    prompt_key: int
    sink: Callable[[Delta | Halted], None]
    timer: asyncio.TimerHandle | None = None


class EngineParts(Struct, frozen=True, kw_only=True):
    """What an engine is made of. ``publish`` gets each step's cache changes; times are monotonic.

    ``mover`` moves pages below the device, ``ledger`` writes the audit: None where there is none.
    """

    scheduler: Scheduler
    runner: Runner
    scopes: Scopes
    codec: Codec
    costs: MeasuredCosts
    publish: Callable[[list[PageChange]], None]
    time_s: Callable[[], float]
    mover: Mover | None = None
    ledger: PageLedger | None = None
    request_timeout_s: float | None = None


class Engine:
    """Runs steps until it is halted or cancelled."""

    def __init__(self, parts: EngineParts) -> None:
        self.scheduler: Final = parts.scheduler
        self.parts: Final = parts
        self.is_halted = False
        self._probe: Probe = find_probe(parts.codec)
        self._tickets: dict[Sequence, Ticket] = {}
        self._fetches: dict[Sequence, asyncio.Task[None]] = {}
        self._wake = asyncio.Event()
        if parts.mover is not None:
            parts.mover.on_news = self._wake.set
        self._drained = asyncio.Event()
        self._drained.set()
        self._failures = 0
        self._requests = 0

    async def drained(self) -> None:
        """Wait until every generation is finished or was aborted."""
        await self._drained.wait()

    def submit(
        self,
        generation: Generation,
        sink: Callable[[Delta | Halted], None],
        parent: Ticket | None = None,
    ) -> Ticket:
        """Queue ``generation``; raises NeverFitsError or EngineHaltedError.

        ``sink`` is called once for each step that samples, never from within ``submit``. ``parent``
        is another answer to the same prompt, whose pages this one may share.
        """
        if self.is_halted:
            raise EngineHaltedError
        prompt, mover = generation.packed_prompt, self.parts.mover
        prompt_tokens = len(prompt) // TOKEN_BYTES
        place = self._place(generation, parent)
        output_tokens = self._output_limit(generation, prompt_tokens, place.tenant)
        # Before the prompt is hashed: what never fits is to cost nothing.
        self.scheduler.check_fits(prompt_tokens, output_tokens, place.tenant)
        sequence = self.scheduler.submit(
            self._table(generation, place, parent),
            output_tokens,
            parent=None if parent is None else parent.sequence,
            has_peer=mover is not None and mover.may_ask(generation.kv_source),
        )
        ticket = Ticket(
            generation,
            sequence,
            TextStream(self.parts.codec, self._probe),
            StopFilter(generation.stops),
            prompt_key(prompt),
            sink,
        )
        if self.parts.request_timeout_s is not None:
            loop = asyncio.get_running_loop()
            ticket.timer = loop.call_later(self.parts.request_timeout_s, self._time_out, ticket)
        self._tickets[sequence] = ticket
        self._drained.clear()
        self._wake.set()
        return ticket

    def abort(self, ticket: Ticket) -> None:
        """End ``ticket`` and release its pages now, also in the middle of a step. Idempotent."""
        if ticket.sequence in self._tickets:
            self._forget(ticket.sequence, "cancelled")

    def reset_prefix_cache(self) -> None:
        """Forget all cached content and announce it at once."""
        self.scheduler.cache.reset()
        if self.parts.mover is not None:
            self.parts.mover.forget()
        self.parts.publish(self.scheduler.cache.drain_changes())

    def pin(self, packed_prompt: bytes, salt: str | None, ttl_s: float) -> int:
        """Protect the cached pages of a prompt's prefix from eviction; return how many."""
        table = self._table_of(packed_prompt, salt)
        return self.scheduler.cache.pin(table, self.parts.time_s() + ttl_s)

    def unpin(self, packed_prompt: bytes, salt: str | None) -> int:
        """End the protection; return how many pages of the prefix are cached."""
        return self.scheduler.cache.unpin(self._table_of(packed_prompt, salt))

    def kv_report(self) -> KvReport:
        """Return the pages of all tiers as they are now."""
        self.scheduler.cache.pool.expire_pins(self.parts.time_s())
        return kv_report(self.scheduler, self.parts.runner.page_bytes, self.parts.mover)

    def halt(self, reason: HaltReason = "stopping") -> None:
        """End every generation with ``Halted`` and take no more."""
        self.is_halted = True
        for sequence in list(self._tickets):
            self._stop(sequence, reason)

    async def run(self) -> None:
        """Run steps until cancelled."""
        was_idle = True
        try:
            while True:
                while not self.scheduler.has_work:  # what woke it may have left again
                    was_idle = True
                    self._publish()
                    self._wake.clear()
                    await self._wake.wait()
                await self._run_step(is_after_idle=was_idle)
                was_idle = False
        finally:
            for task in self._fetches.values():
                task.cancel()

    async def _run_step(self, *, is_after_idle: bool) -> None:
        self._wake.clear()
        step = self.scheduler.schedule(self.parts.time_s())
        self._start_fetches(step)
        # Told before the step runs: from here on its pages are shared, and those it took are gone.
        self._publish()
        if not step.works:
            await self._wait_for_pages()
            return
        batch = self._batch(step, is_after_idle=is_after_idle)
        try:
            outcome = await self.parts.runner.run(batch)
        except asyncio.CancelledError:
            self.scheduler.fail(step)
            raise
        except Exception:  # noqa: BLE001 - the step boundary: it ends only its requests
            _LOG.exception("a step of %d sequences failed", len(step.works))
            self._fail(step)
            return
        self._failures = 0
        self._finish(step, batch, outcome)

    async def _wait_for_pages(self) -> None:
        """Wait for whoever holds the pages that are missing."""
        if self.scheduler.is_fetching:
            await self._wake.wait()
        elif self.scheduler.cache.pool.held_pages:
            await asyncio.sleep(_READ_S)  # another worker reads them
        else:
            message = "sequences wait and none can run"
            raise PoolError(message)

    def _batch(self, step: Step, *, is_after_idle: bool) -> Batch:
        saves: tuple[Save, ...] = ()
        loads: tuple[Load, ...] = ()
        if self.parts.mover is not None:
            saves, loads = self.parts.mover.batch(step.moves)
        slots = []
        for work in step.works:
            table = work.sequence.table
            start = work.context_tokens * TOKEN_BYTES
            end = start + work.new_tokens * TOKEN_BYTES
            ends_known = end == len(table.packed)
            draws = tuple(map(self._draw, (work.sequence, *work.forks))) if ends_known else ()
            packed = bytes(table.packed[start:end])
            slots.append(Slot(packed, work.context_tokens, tuple(table.pages), draws))
        return Batch(
            load=step.load(),
            slots=tuple(slots),
            saves=saves,
            loads=loads,
            copies=tuple(step.moves.copies),
            is_after_idle=is_after_idle,
        )

    def _draw(self, sequence: Sequence) -> Draw:
        ticket = self._tickets[sequence]
        generation = ticket.generation
        return Draw(
            seed=generation.seed,
            index=sequence.output_tokens,
            sample=generation.sample,
            prompt_key=ticket.prompt_key,
            is_limited=generation.max_output_tokens is not None or generation.ignore_eos,
            temperature=generation.temperature,
            top_p=generation.top_p,
            top_k=generation.top_k,
            top_logprobs=generation.top_logprobs,
        )

    def _finish(self, step: Step, batch: Batch, outcome: Outcome) -> None:
        """Account for a step that ran and pass its tokens on."""
        sampling = set(self.scheduler.complete(step))
        arrivals = step.moves.arrivals
        is_from_host = all(each.source == "host" for each in arrivals)
        self.parts.costs.observe_step(batch.load, outcome, len(arrivals) if is_from_host else 0)
        if self.parts.mover is not None:
            self.parts.mover.finish(step.moves, outcome.save_s, outcome.load_s)
        for work, samples in zip(step.works, outcome.samples, strict=True):
            for sequence, sampled in zip((work.sequence, *work.forks), samples, strict=False):
                if sequence in sampling and sequence in self._tickets:
                    self._advance(self._tickets[sequence], sampled)
        if self.parts.ledger is not None:
            self.parts.ledger.step()

    def _fail(self, step: Step) -> None:
        """End what took part in a step that failed; a runner that only fails ends the engine."""
        for sequence in self.scheduler.fail(step):
            self._stop(sequence, "failed")
        self._publish()
        if self.parts.ledger is not None:
            self.parts.ledger.step()
        self._failures += 1
        if self._failures >= _MOST_FAILURES:
            self.halt("failed")

    def _advance(self, ticket: Ticket, sampled: Sampled) -> None:
        sequence, generation = ticket.sequence, ticket.generation
        self.scheduler.append(sequence, sampled.token)
        finish: FinishReason | None = None
        stopped_by: str | int | None = None
        is_stop_token = sampled.token in generation.stop_token_ids
        if is_stop_token:
            finish, stopped_by = "stop", sampled.token
        elif sampled.is_end and not generation.ignore_eos:
            finish = "stop"
        elif sequence.output_tokens >= sequence.max_output_tokens:
            finish = "length"
        text = "" if is_stop_token else ticket.text.feed((sampled.token,))
        if finish is not None:
            text += ticket.text.flush()
        passed = ticket.stop_filter.feed(text)
        text = passed.text
        if passed.stopped_by is not None:
            finish, stopped_by = "stop", passed.stopped_by
        elif finish is not None:
            text += ticket.stop_filter.flush()
        if finish is not None:
            self._forget(sequence, "done")
        shown = () if generation.top_logprobs is None else (sampled,)
        ticket.sink(Delta(generation.choice, [sampled.token], text, finish, stopped_by, shown))

    def _start_fetches(self, step: Step) -> None:
        for sequence in step.admitted:
            if sequence.phase is Phase.FETCHING:
                task = asyncio.create_task(self._fetch(sequence), name="fetch")
                self._fetches[sequence] = task
                task.add_done_callback(self._fetch_ended)

    async def _fetch(self, sequence: Sequence) -> None:
        """Bring what ``sequence`` waits for; without it, it computes."""
        mover, ticket = self.parts.mover, self._tickets.get(sequence)
        assert mover is not None  # noqa: S101 - nothing is pending without tiers
        contents: list[bytes | None] = [None] * len(sequence.table.incoming)
        try:
            source = None if ticket is None else ticket.generation.kv_source
            contents = await mover.fetch(sequence.table, source)
        finally:
            if sequence.phase is Phase.FETCHING:
                self.scheduler.fetched(sequence, contents)
            self._wake.set()

    def _fetch_ended(self, task: asyncio.Task[None]) -> None:
        for sequence in [each for each, running in self._fetches.items() if running is task]:
            del self._fetches[sequence]
        if not task.cancelled() and task.exception() is not None:
            _LOG.error("a fetch failed", exc_info=task.exception())

    def _time_out(self, ticket: Ticket) -> None:
        self._stop(ticket.sequence, "timed_out")

    def _stop(self, sequence: Sequence, reason: HaltReason) -> None:
        ticket = self._tickets.get(sequence)
        if ticket is not None:
            self._forget(sequence, "cancelled" if reason == "stopping" else reason)
            ticket.sink(Halted(reason))

    def _forget(self, sequence: Sequence, why: str) -> None:
        ticket = self._tickets.pop(sequence)
        if ticket.timer is not None:
            ticket.timer.cancel()
        fetch = self._fetches.get(sequence)
        self.scheduler.end(sequence, why)
        if fetch is not None:
            fetch.cancel()
        if self.parts.ledger is not None:
            self.parts.ledger.note(Transition(op="end", request=sequence.table.request, why=why))
        self._wake.set()
        if not self._tickets:
            self._drained.set()

    def _publish(self) -> None:
        changes = self.scheduler.cache.drain_changes()
        if changes:
            self.parts.publish(changes)

    def _place(self, generation: Generation, parent: Ticket | None) -> Place:
        if parent is not None:
            return parent.sequence.table.place
        prompt, salt = generation.packed_prompt, generation.salt
        return self.parts.scopes.place(prompt, salt, generation.public)

    def _table(self, generation: Generation, place: Place, parent: Ticket | None) -> BlockTable:
        cache, prompt = self.scheduler.cache, generation.packed_prompt
        self._requests += 1
        request = generation.request_id or f"request-{self._requests}"
        if parent is not None:  # hashed once, however many answers are asked for
            return cache.open_like(parent.sequence.table, len(prompt) // TOKEN_BYTES, request)
        return cache.open_table(prompt, place, generation.salt, request)

    def _output_limit(self, generation: Generation, prompt_tokens: int, tenant: str) -> int:
        if generation.max_output_tokens is not None:
            return generation.max_output_tokens
        pool_tokens = self.scheduler.most_pages(tenant) * self.scheduler.cache.page_tokens + 1
        most_tokens = min(self.scheduler.limits.max_sequence_tokens, pool_tokens)
        return max(1, most_tokens - prompt_tokens)

    def _table_of(self, packed_prompt: bytes, salt: str | None) -> BlockTable:
        place = self.parts.scopes.place(packed_prompt, salt)
        return self.scheduler.cache.open_table(packed_prompt, place, salt)
