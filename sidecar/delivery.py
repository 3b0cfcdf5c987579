"""Brings what the engine generates to a client, whole or as a stream of events."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from aiohttp import web
from msgspec import structs

from sidecar.answer import Answer, ChatWriter, CompletionWriter, Usage
from sidecar.api import DONE, ApiError, error_event
from sidecar.generation import Halted
from state.prefix import TOKEN_BYTES

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from sidecar.engine import Ticket
    from sidecar.generation import Delta, HaltReason
    from sidecar.runner import Sampled
    from sidecar.sampling import Sampling

STOPPING: Final = "The engine is shutting down."
FAILED: Final = "The engine failed on this request."
TIMED_OUT: Final = "The engine did not finish this request in the time that it may take."
_HALTS: Final[dict[HaltReason, tuple[int, str]]] = {
    "stopping": (503, STOPPING),
    "timed_out": (504, TIMED_OUT),
    "failed": (500, FAILED),
}

_log = logging.getLogger(__name__)

Writer = ChatWriter | CompletionWriter


class Delivery:
    """One request's answer: ``deltas`` has what the engine says of ``tickets``, one per choice."""

    def __init__(
        self,
        tickets: Sequence[Ticket],
        deltas: asyncio.Queue[Delta | Halted],
        sampling: Sampling,
        writer: Writer,
        spell: Callable[[int], str],
    ) -> None:
        self._tickets = tickets
        self._deltas = deltas
        self._sampling = sampling
        self._writer = writer
        self._spell = spell
        self._completion_tokens = [0] * len(tickets)

    async def whole(self) -> web.Response:
        """Wait for all choices; raises ApiError where the engine ends one of them early."""
        choices = len(self._tickets)
        texts: list[list[str]] = [[] for _ in range(choices)]
        token_ids: list[list[int]] = [[] for _ in range(choices)]
        sampled: list[list[Sampled]] = [[] for _ in range(choices)]
        answers: dict[int, Answer] = {}
        while len(answers) < choices:
            delta = await self._next()
            if isinstance(delta, Halted):
                raise ApiError(*_HALTS[delta.reason])
            choice = delta.choice
            texts[choice].append(delta.text)
            token_ids[choice] += delta.token_ids
            sampled[choice] += delta.sampled
            if delta.finish is not None:
                answers[choice] = Answer(
                    text="".join(texts[choice]),
                    token_ids=token_ids[choice],
                    sampled=sampled[choice],
                    finish=delta.finish,
                    stopped_by=delta.stopped_by,
                )
        body = self._writer.whole([answers[choice] for choice in range(choices)], self._usage())
        return web.Response(body=body, content_type="application/json")

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Send deltas as they come; a stream that cannot go on ends with an error event."""
        headers = {
            "Content-Type": "text/event-stream; charset=utf-8",
            "Cache-Control": "no-cache",
        }
        response = web.StreamResponse(headers=headers)
        try:
            await response.prepare(request)
            await self._send(response)
            await response.write_eof()
        except ConnectionError:
            _log.debug("the client left in the middle of a stream")
        return response

    async def _send(self, response: web.StreamResponse) -> None:
        open_choices = len(self._tickets)
        pending = [self._writer.opening([self._usage_of(each) for each in range(open_choices)])]
        while open_choices:
            delta = await self._next()
            if isinstance(delta, Halted):
                pending.append(error_event(*_HALTS[delta.reason]))
                break
            self._completion_tokens[delta.choice] += len(delta.token_ids)
            pending.append(self._writer.delta(delta, self._usage_of(delta.choice)))
            open_choices -= delta.finish is not None
            if open_choices and self._deltas.empty():
                await response.write(b"".join(pending))
                pending = []
        else:
            if self._sampling.wants_usage:
                pending.append(self._writer.usage(self._usage()))
            pending.append(DONE)
        await response.write(b"".join(pending))

    async def _next(self) -> Delta | Halted:
        """Return the next delta, with what stopped it at the end of its text if that is wanted."""
        delta = await self._deltas.get()
        if isinstance(delta, Halted) or delta.stopped_by is None:
            return delta
        if not self._sampling.include_stop_str_in_output:
            return delta
        by = delta.stopped_by
        stop = by if isinstance(by, str) else self._spell(by)
        return structs.replace(delta, text=delta.text + stop)

    def _usage_of(self, choice: int) -> Usage | None:
        """Return what one choice took so far, for clients that want to know with every chunk."""
        if not self._sampling.wants_continuous_usage:
            return None
        return Usage(_prompt_tokens(self._tickets[choice]), self._completion_tokens[choice])

    def _usage(self) -> Usage:
        """Add up what the answers took; a prompt with several answers counts once."""
        firsts = [ticket for ticket in self._tickets if ticket.generation.sample == 0]
        return Usage(
            prompt_tokens=sum(_prompt_tokens(ticket) for ticket in firsts),
            completion_tokens=sum(ticket.sequence.output_tokens for ticket in self._tickets),
            cached_tokens=sum(ticket.sequence.cached_tokens or 0 for ticket in firsts),
        )


def _prompt_tokens(ticket: Ticket) -> int:
    return len(ticket.generation.packed_prompt) // TOKEN_BYTES
