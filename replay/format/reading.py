"""What every format is read with: options, lines, faults; and the loop over lines."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

from msgspec import Meta, Struct

from replay.format.fault import BadLineError, Faults
from replay.format.kind import IdsWatch
from replay.format.line import LINE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Item = TypeVar("Item")
Tokens = Annotated[int, Meta(ge=1)]
A_COUNT: Final = "an integer of at least 1"
A_NAME: Final = "a string or an integer"
SECONDS: Final = "a number of seconds"


class ReadOptions(Struct, frozen=True, kw_only=True):
    """How files are read where they do not say it themselves.

    ``block_tokens`` is what one id stands for; None: what is usual for the format (512 in Mooncake
    traces, else 64). Conversations without times start ``sessions_per_s`` times a second at random;
    between two turns pass ``think_s`` in the mean; both are drawn from ``seed``. ``window`` lines
    are held to put agent calls and conversations in order.
    """

    block_tokens: int | None = None
    sessions_per_s: float = 1.0
    think_s: float = 10.0
    seed: int = 0
    window: int = 4096
    line_bytes: int = LINE_BYTES

    def checked(self) -> ReadOptions:
        """Return these options; raises ValueError for one that makes no sense."""
        _demand("block_tokens", self.block_tokens is None or self.block_tokens >= 1, "at least 1")
        _demand("sessions_per_s", 0 < self.sessions_per_s < math.inf, "above 0 and finite")
        _demand("think_s", 0 <= self.think_s < math.inf, "at least 0 and finite")
        _demand("window", self.window >= 0, "at least 0")
        _demand("line_bytes", self.line_bytes >= 1, "at least 1")
        return self


def _demand(name: str, holds: object, what: str) -> None:
    if not holds:
        message = f"{name}: expected {what}"
        raise ValueError(message)


class Reading:
    """One pass over a file."""

    def __init__(
        self, lines: Iterator[tuple[int, bytes]], faults: Faults, options: ReadOptions
    ) -> None:
        self.lines = lines
        self.faults = faults
        self.options = options
        self.ids = IdsWatch()

    def each(self, parse: Callable[[int, bytes], Item]) -> Iterator[Item]:
        """Yield what ``parse`` makes of line number and line; BadLineError is a fault."""
        for number, line in self.lines:
            try:
                item = parse(number, line)
            except BadLineError as bad:
                self.faults.add(number, str(bad))
                continue
            yield item


def session_name(value: Any) -> str:
    """Return a session's name as traces have it: a string, a number or nothing."""
    return "" if value is None else str(value)
