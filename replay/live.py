"""A trace against a real target: every request at its time, whatever became of those before.

Open loop: a slow target gets no fewer requests. Only ``concurrency`` bounds how many are under way;
what had to wait for that, or for this process, is sent late, and how late is told.
"""

from __future__ import annotations

import asyncio
from math import ceil
from typing import TYPE_CHECKING, Annotated, Final, Protocol

from msgspec import Meta, Struct

from replay.journal import Record
from replay.outcome import Outcome, ReplayRun
from replay.sharing import Sharing

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Sequence

    from replay.synthesis import Prompt, Prompts
    from replay.target import Answer
    from replay.trace import TraceRequest

LATE_S: Final = 0.010
"""From here on a request counts as late."""
UNTOLD: Final = "untold"
"""The replica of an answer that does not name it."""
CONCURRENCY: Final = 4_096


class Asks(Protocol):
    """What a target does."""

    def body_of(self, prompt: Prompt) -> bytes:
        """Return the request that asks for an answer to ``prompt``."""
        ...

    async def ask(self, body: bytes) -> Answer:
        """Return what became of one request; a failure is an answer, too."""
        ...


class LiveSettings(Struct, frozen=True, kw_only=True):
    """``concurrency`` bounds the requests under way: more wait, and count as late."""

    concurrency: Annotated[int, Meta(ge=1)] = CONCURRENCY


class Lateness(Struct, frozen=True, kw_only=True):
    """How punctual the requests were sent: those ``LATE_S`` after their time, and by how much."""

    late_requests: int
    p99_s: float
    max_s: float


class LiveReplay:
    """Sends a trace's requests; ``on_record`` gets every outcome as it comes.

    ``clock`` is monotonic, in seconds, and ``sleep`` goes by it.
    """

    def __init__(
        self,
        target: Asks,
        prompts: Prompts,
        settings: LiveSettings,
        clock: Callable[[], float],
        on_record: Callable[[Record], None],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._target = target
        self._prompts = prompts
        self._free = asyncio.Semaphore(settings.concurrency)
        self._clock = clock
        self._on_record = on_record
        self._sleep = sleep
        self._sharing = Sharing(())
        self._began_s = 0.0

    async def play(self, requests: Sequence[TraceRequest], done: Collection[int] = ()) -> None:
        """Send all ``requests`` but the ordinals ``done``, the first of them at once.

        Raises what ``on_record`` raises. Cancelled, it gives up what is under way.
        """
        self._sharing = Sharing(requests)
        coming = [(at, one) for at, one in enumerate(requests) if at not in done]
        if not coming:
            return
        try:
            async with asyncio.TaskGroup() as group:
                self._began_s = self._clock() - coming[0][1].arrival_s
                for ordinal, request in coming:
                    await self._send_in_time(ordinal, request, group)
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _send_in_time(
        self, ordinal: int, request: TraceRequest, group: asyncio.TaskGroup
    ) -> None:
        prompt = self._prompts.prompt_for(ordinal, request)
        body = self._target.body_of(prompt)
        due_s = self._began_s + request.arrival_s
        # At least once for every request, so that answers are read also while this is behind.
        await self._sleep(max(0.0, due_s - self._clock()))
        await self._free.acquire()
        group.create_task(self._send(ordinal, request, prompt, body))
        # It is sent before the next prompt is made.
        await asyncio.sleep(0)

    async def _send(self, ordinal: int, request: TraceRequest, prompt: Prompt, body: bytes) -> None:
        try:
            sent_s = self._clock() - self._began_s
            answer = await self._target.ask(body)
        finally:
            self._free.release()
        told_prompt, told_output = answer.prompt_tokens, answer.output_tokens
        outcome = Outcome(
            ordinal=ordinal,
            line=request.line,
            arrival_s=sent_s,
            prefix=self._sharing.prefix(request),
            prompt_tokens=prompt.prompt_tokens if told_prompt is None else told_prompt,
            output_tokens=prompt.output_tokens if told_output is None else told_output,
            replica=answer.replica or UNTOLD,
            reason=answer.reason or "",
            predicted_cached_tokens=answer.predicted_cached_tokens,
            cached_tokens=answer.cached_tokens,
            ttft_s=answer.ttft_s,
            duration_s=answer.duration_s,
            session=request.session,
            tenant=request.tenant,
            error=answer.error,
        )
        self._on_record(Record(outcome=outcome, late_s=max(0.0, sent_s - request.arrival_s)))


def lateness_of(records: Sequence[Record]) -> Lateness:
    """Return how punctual the requests of ``records`` were."""
    late = sorted(record.late_s for record in records)
    return Lateness(
        late_requests=sum(1 for one in late if one > LATE_S),
        p99_s=late[ceil(0.99 * len(late)) - 1] if late else 0.0,
        max_s=late[-1] if late else 0.0,
    )


def run_of(trace: str, label: str, records: Sequence[Record], seed: int) -> ReplayRun:
    """Return the replay that ``records`` are of; what nobody measured is unknown."""
    outcomes = sorted((record.outcome for record in records), key=lambda one: one.ordinal)
    told = {one.replica for one in outcomes}
    return ReplayRun(
        trace=trace,
        policy=label,
        replicas=tuple(sorted(told - {UNTOLD} or told)),
        outcomes=tuple(outcomes),
        span_s=max((one.arrival_s + one.duration_s for one in outcomes), default=0.0),
        seed=seed,
    )
