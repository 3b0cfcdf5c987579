"""What a trace is: requests with arrival times, lengths, and ids of the prefix blocks they share.

No text and no tokens: two prompts share what the ids say they share. An id names a whole prefix,
the block and all before it, so that equal ids mean equal prefixes. Only full blocks have ids: a
partial last block is nobody else's to reuse.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from msgspec import Struct

from state.model import BlockId

if TYPE_CHECKING:
    from collections.abc import Iterator


class TraceRequest(Struct, frozen=True, kw_only=True):
    """One request. ``arrival_s`` counts from the trace's first one; ``line`` is where it stood.

    ``prompt_tokens`` are at least 1 and at least what ``chain`` covers; ``output_tokens`` are at
    least 1. ``session`` and ``tenant`` are empty where the trace names none.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    chain: tuple[BlockId, ...]
    session: str = ""
    tenant: str = ""
    line: int = 0


class Trace(Protocol):
    """A trace that was opened: ``for request in trace`` reads it from the start, in order."""

    @property
    def name(self) -> str:
        """What the trace is called in reports: its file's name."""

    @property
    def block_tokens(self) -> int:
        """The tokens that one id of a chain stands for."""

    def __iter__(self) -> Iterator[TraceRequest]:
        """Yield the requests by arrival; raises TraceError at a bad line."""


class TraceError(Exception):
    """A line of a trace cannot be used: says the line, the field and what was expected."""
