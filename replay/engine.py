"""One replica's engine in virtual time: waiting queue, chunked prefill, continuous batching, pages.

It composes steps as the bundled worker does: a step has a token budget; decoding sequences take one
token each, then prompts that are begun, then waiting ones, first come first served, while pages for
their whole prompts are free. Prefix pages are shared, cached pages evicted least recently used
first, and the youngest sequence is preempted when a decoding one needs a page that nobody can give.
A step lasts what the step model says.

Steps in which sequences only decode are run together up to the next change (*macro-step*): the end
of the first sequence, or the end of the step in which somebody arrives. So time costs nothing, and
work follows what happens instead of how long it takes.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from typing import TYPE_CHECKING, Final

from replay.memory import EngineMemory

if TYPE_CHECKING:
    from replay.setting import FleetSettings
    from sidecar.pool import PageId
    from state.model import BlockId

NEVER: Final = math.inf


class Job:
    """A request on an engine. ``target_tokens`` are to be there before the next one is sampled."""

    __slots__ = (
        "cached_tokens",
        "chain",
        "computed_tokens",
        "ends_at",
        "fetched_tokens",
        "first_s",
        "generated_tokens",
        "index",
        "is_running",
        "joined_at",
        "output_tokens",
        "pages",
        "preemptions",
        "prompt_tokens",
        "pulled_blocks",
        "ticket",
    )

    def __init__(
        self, index: int, chain: tuple[BlockId, ...], prompt_tokens: int, output_tokens: int
    ) -> None:
        self.index = index
        self.chain = chain
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.pulled_blocks = 0
        self.ticket = 0
        self.begin_anew()
        self.generated_tokens = 0
        self.preemptions = 0
        self.cached_tokens: int | None = None
        self.fetched_tokens = 0
        self.first_s: float | None = None

    def begin_anew(self) -> None:
        """Forget what was computed, as when its pages are gone."""
        self.computed_tokens = 0
        self.pages: list[PageId] = []
        self.joined_at = self.ends_at = 0
        self.is_running = False

    @property
    def target_tokens(self) -> int:
        """Prompt and answer so far."""
        return self.prompt_tokens + self.generated_tokens


class Engine:
    """A replica. The caller ``advance``s it when ``due_s`` comes; times never go back."""

    def __init__(
        self,
        settings: FleetSettings,
        page_tokens: int,
        speed: float = 1.0,
        memory: EngineMemory | None = None,
    ) -> None:
        self._cost = settings.cost
        self._speed = speed
        self._step_tokens = settings.step_tokens
        self._max_sequences = settings.max_sequences
        self.memory = memory or EngineMemory(settings, page_tokens)
        self.due_s = NEVER
        self.preemptions = 0
        self.busy_s = 0.0
        self.prefilled_tokens = 0
        self._waiting: deque[Job] = deque()
        self._prefilling: list[Job] = []
        self._decoding: dict[Job, None] = {}
        self._ends: list[tuple[int, int, Job]] = []
        self._kv_tokens = 0
        self._decoded_steps = 0
        self._tickets = 0
        self._works: list[tuple[Job, int]] = []
        self._began_s = 0.0
        self._macro_steps = 0
        self._macro = (0.0, 0.0)
        self._blocked_at: int | None = None

    @property
    def waiting(self) -> int:
        """Requests without pages."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests with pages."""
        return len(self._prefilling) + len(self._decoding)

    def submit(self, job: Job, now_s: float) -> None:
        """Queue a request, which fits into the memory as a whole."""
        self._waiting.append(job)
        if self.due_s == NEVER:
            self._begin(now_s)
        elif self._macro_steps > 1 and self._blocked_at is None:
            self._cut(now_s)

    def wake(self, now_s: float) -> None:
        """Try again to begin, where others share the memory and may have given some back."""
        if self.due_s == NEVER and self._waiting:
            self._begin(now_s)

    def advance(self, now_s: float) -> list[Job]:
        """End the step that is due at ``now_s`` and begin the next; return who sampled or ended.

        A job whose ``generated_tokens`` are all there has ended and has no pages any more.
        """
        self.busy_s += now_s - self._began_s
        touched = self._end_step(now_s)
        self._begin(now_s)
        return touched

    def drain(self, now_s: float) -> list[Job]:
        """Lose everything, as in a restart; return the requests that were there."""
        self._catch_up(self._steps_by(now_s))
        lost = [*self._prefilling, *self._decoding, *self._waiting]
        for job in lost:
            job.begin_anew()
            job.generated_tokens = 0
        self._waiting.clear()
        self._prefilling.clear()
        self._decoding.clear()
        self._ends.clear()
        self._works.clear()
        self._kv_tokens = 0
        self._macro_steps = 0
        self._blocked_at = None
        self.memory.forget(now_s)
        self.due_s = NEVER
        return lost

    def _begin(self, now_s: float) -> None:
        """Compose the next step, or a run of steps that only decode."""
        self._began_s = now_s
        self.memory.note_time(now_s)
        self._grow()
        decoding = len(self._decoding)
        budget = self._step_tokens - decoding
        works: list[tuple[Job, int]] = []
        fetch_ms = 0.0
        for job in self._prefilling:
            if budget <= 0:
                break
            budget -= self._plan(works, job, budget)
        while self._waiting and budget > 0 and self.running < self._max_sequences:
            job = self._waiting[0]
            if self._blocked_at == self.memory.releases:
                break
            admitted = self.memory.admit(job)
            if admitted is None:
                self._blocked_at = self.memory.releases
                break
            fetch_ms += admitted
            self._waiting.popleft()
            self._tickets += 1
            job.ticket = self._tickets
            job.is_running = True
            self._prefilling.append(job)
            budget -= self._plan(works, job, budget)
        if not self._waiting:
            self._blocked_at = None
        self._works = works
        if works:
            self._macro_steps = 0
            self.due_s = now_s + 1e-3 * (self._step_ms(works) + fetch_ms) / self._speed
        elif decoding:
            self._run_macro(now_s, decoding)
        else:
            self._macro_steps = 0
            self.due_s = NEVER

    def _plan(self, works: list[tuple[Job, int]], job: Job, budget: int) -> int:
        new_tokens = min(budget, job.target_tokens - job.computed_tokens)
        works.append((job, new_tokens))
        self.memory.index(job, job.computed_tokens + new_tokens)
        return new_tokens

    def _step_ms(self, works: list[tuple[Job, int]]) -> float:
        cost = self._cost
        tokens = pairs = 0
        for job, new in works:
            tokens += new
            pairs += new * job.computed_tokens + new * (new + 1) // 2
        self.prefilled_tokens += tokens
        return (
            cost.step_ms
            + cost.prefill_token_ms * tokens
            + cost.attention_pair_ms * pairs
            + cost.decode_sequence_ms * len(self._decoding)
            + cost.kv_token_read_ms * self._kv_tokens
        )

    def _run_macro(self, now_s: float, decoding: int) -> None:
        cost = self._cost
        first_ms = (
            cost.step_ms
            + cost.decode_sequence_ms * decoding
            + cost.kv_token_read_ms * self._kv_tokens
        ) / self._speed
        self._macro = (1e-3 * first_ms, 1e-3 * cost.kv_token_read_ms * decoding / self._speed)
        steps = self._ends[0][0] - self._decoded_steps
        self._macro_steps = max(1, min(steps, self._steps_with_room(decoding)))
        self.due_s = now_s + self._macro_s(self._macro_steps)

    def _macro_s(self, steps: int) -> float:
        first_s, more_s = self._macro
        return steps * first_s + more_s * steps * (steps - 1) / 2

    def _steps_by(self, now_s: float) -> int:
        """Return how many steps of the macro-step are over once the one under way at a time is."""
        if self._macro_steps <= 1:
            return self._macro_steps
        first_s, more_s = self._macro
        passed_s = now_s - self._began_s
        if more_s > 0:
            linear = first_s - more_s / 2
            steps = (math.sqrt(linear * linear + 2 * more_s * passed_s) - linear) / more_s
        else:
            steps = passed_s / first_s if first_s > 0 else self._macro_steps
        return max(1, min(self._macro_steps, math.ceil(steps - 1e-9)))

    def _cut(self, now_s: float) -> None:
        """Let the macro-step end with the step that is under way."""
        self._macro_steps = self._steps_by(now_s)
        self.due_s = self._began_s + self._macro_s(self._macro_steps)

    def _steps_with_room(self, decoding: int) -> int:
        """Return how many steps may run before a page could be missing."""
        page_tokens = self.memory.page_tokens
        room = self.memory.available_pages
        return page_tokens * (room // decoding) if room >= decoding else 1

    def _catch_up(self, steps: int) -> None:
        """Account for ``steps`` in which every decoding sequence got a token."""
        self._decoded_steps += steps
        self._kv_tokens += steps * len(self._decoding)

    def _end_step(self, now_s: float) -> list[Job]:
        touched = []
        if self._decoding:
            self._catch_up(max(1, self._macro_steps))
            while self._ends and self._ends[0][0] <= self._decoded_steps:
                _, ticket, job = heapq.heappop(self._ends)
                if job.is_running and job.ticket == ticket:
                    self._leave(job)
                    job.generated_tokens = job.output_tokens
                    touched.append(job)
        for job, new_tokens in self._works:
            if not job.is_running:
                continue
            job.computed_tokens += new_tokens
            if job.computed_tokens >= job.target_tokens:
                self._prefilling.remove(job)
                job.generated_tokens += 1
                if job.first_s is None:
                    job.first_s = now_s
                touched.append(job)
                self._decode_on(job)
        self._works = []
        return touched

    def _decode_on(self, job: Job) -> None:
        left = job.output_tokens - job.generated_tokens
        if left <= 0:
            self._give_back(job)
            return
        job.joined_at = self._decoded_steps
        job.ends_at = self._decoded_steps + left
        self._decoding[job] = None
        self._kv_tokens += job.computed_tokens
        heapq.heappush(self._ends, (job.ends_at, job.ticket, job))

    def _leave(self, job: Job) -> None:
        """Take a decoding sequence out of the batch and give its pages back."""
        decoded = self._decoded_steps - job.joined_at
        self._kv_tokens -= job.computed_tokens + decoded
        del self._decoding[job]
        self._give_back(job)

    def _give_back(self, job: Job) -> None:
        self.memory.release(job)
        job.is_running = False

    def _grow(self) -> None:
        """Give every decoding sequence room for its next token; preempt the youngest if needed."""
        page_tokens = self.memory.page_tokens
        for job in list(self._decoding):
            if not job.is_running:
                continue
            wanted = job.computed_tokens + self._decoded_steps - job.joined_at + 1
            while job.is_running and len(job.pages) * page_tokens < wanted:
                if not self.memory.extend(job, -(-wanted // page_tokens) - len(job.pages)):
                    self._preempt_youngest()

    def _preempt_youngest(self) -> None:
        youngest = max([*self._prefilling, *self._decoding], key=lambda job: job.ticket)
        if youngest in self._decoding:
            youngest.generated_tokens += self._decoded_steps - youngest.joined_at
            self._leave(youngest)
        else:
            self._prefilling.remove(youngest)
            self._give_back(youngest)
        youngest.begin_anew()
        youngest.preemptions += 1
        self.preemptions += 1
        self._waiting.appendleft(youngest)
