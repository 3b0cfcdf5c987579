"""A decision log as a trace: its requests, by arrival, for a replay in virtual time or live."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from msgspec import Struct, structs

from replay.decision_file import DecisionLogReader
from replay.trace import TraceError, TraceRequest
from state.model import BlockId

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from replay.decision_file import LoggedLine, LoggedPrompt

ID_BYTES: Final = 16


class _Arrival(Struct, frozen=True):
    """A request on its way into a trace; ``output_tokens`` is None where the engine told none."""

    at_unix_s: float
    output_tokens: int | None
    request: TraceRequest


class LoggedTrace:
    """The trace in a decision log that was written with ``chains``; in memory, as logs are bounded.

    A request with several prompts becomes as many requests, its output divided among them. Where
    the engine told no output tokens, the mean of the others stands in, or 1. What was refused
    before a decision is not in the log. Raises TraceError for a log that cannot be used.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._block_tokens: int | None = None
        self._ids: dict[bytes, BlockId] = {}
        self._requests = self._read()

    @property
    def name(self) -> str:
        """The file's name."""
        return self._path.name

    @property
    def block_tokens(self) -> int:
        """The tokens that one id of a chain stands for."""
        return self._block_tokens or 1

    def __iter__(self) -> Iterator[TraceRequest]:
        """Yield the requests by arrival."""
        return iter(self._requests)

    def _read(self) -> list[TraceRequest]:
        arrivals = [
            one
            for line in DecisionLogReader(self._path)
            if line.decision.result is not None
            for one in self._arrivals(line)
        ]
        if arrivals and self._block_tokens is None:
            message = f"{self._path.name}: no ids of prefix blocks; log with decisions.chains: true"
            raise TraceError(message)
        arrivals.sort(key=lambda one: one.at_unix_s)
        known = [one.output_tokens for one in arrivals if one.output_tokens is not None]
        assumed = max(1, round(sum(known) / len(known))) if known else 1
        return [
            structs.replace(
                one.request,
                arrival_s=max(0.0, one.at_unix_s - arrivals[0].at_unix_s),
                output_tokens=assumed if one.output_tokens is None else max(1, one.output_tokens),
            )
            for one in arrivals
        ]

    def _arrivals(self, line: LoggedLine) -> Iterator[_Arrival]:
        record, result = line.decision, line.decision.result
        told_tokens = result.output_tokens if result is not None else None
        prompts = record.prompts or ()
        for prompt in prompts:
            self._check(line, prompt)
            share = None if told_tokens is None else max(1, told_tokens // len(prompts))
            chain = tuple(self._id(prompt.chain[at : at + ID_BYTES]) for at in _starts(prompt))
            yield self._arrival(line, prompt.tokens, share, chain)
        if not prompts:
            reported = result.prompt_tokens if result is not None else None
            yield self._arrival(
                line, record.request.prompt_tokens or reported or 1, told_tokens, ()
            )

    @staticmethod
    def _arrival(
        line: LoggedLine, prompt_tokens: int, told_tokens: int | None, chain: tuple[BlockId, ...]
    ) -> _Arrival:
        record = line.decision
        request = TraceRequest(
            arrival_s=0.0,
            prompt_tokens=max(1, prompt_tokens),
            output_tokens=1,
            chain=chain,
            session=record.request.session or "",
            line=line.place.line,
        )
        return _Arrival(record.arrived_unix_s, told_tokens, request)

    def _check(self, line: LoggedLine, prompt: LoggedPrompt) -> None:
        """Take the first record's block size for the trace's; raises TraceError for another."""
        block = line.decision.block_tokens
        if self._block_tokens is None:
            self._block_tokens = block
        if block is None or block < 1 or block != self._block_tokens:
            message = f"{line.place}: block_tokens: expected {self._block_tokens}, got {block}"
            raise TraceError(message)
        if len(prompt.chain) % ID_BYTES or len(prompt.chain) // ID_BYTES * block > prompt.tokens:
            message = f"{line.place}: prompts: the chain does not fit {prompt.tokens} tokens"
            raise TraceError(message)

    def _id(self, block: bytes) -> BlockId:
        """Return the one object that stands for an id, as most ids occur many times."""
        return self._ids.setdefault(block, BlockId(block))


def _starts(prompt: LoggedPrompt) -> range:
    return range(0, len(prompt.chain), ID_BYTES)


def trace_requests(path: Path) -> Iterator[TraceRequest]:
    """Yield the requests of a decision log by arrival; raises TraceError as LoggedTrace does."""
    return iter(LoggedTrace(path))
