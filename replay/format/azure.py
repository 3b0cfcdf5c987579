"""Azure LLM inference traces: arrivals and lengths as CSV. Nothing is known of prefixes.

The columns have one of the names below, in any order and among others; times are dates, with a zone
or in UTC, or seconds.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from replay.format.date import NANOSECONDS, nanoseconds_of
from replay.format.fault import BadLineError, shown
from replay.format.order import Forward
from replay.format.reading import A_COUNT
from replay.trace import TraceError, TraceRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from replay.format.reading import Reading

BLOCK_TOKENS: Final = 64
_TIME_COLUMNS: Final = ("TIMESTAMP", "arrival_timestamp", "arrived_at")
_PROMPT_COLUMNS: Final = ("ContextTokens", "num_prefill_tokens")
_OUTPUT_COLUMNS: Final = ("GeneratedTokens", "num_decode_tokens")
_COUNT: Final = re.compile(r"[0-9]{1,9}", re.ASCII)
_A_TIME: Final = "a date like 2023-11-16 18:15:46.68 or seconds"


def cells_of(line: bytes) -> list[str]:
    """Return the cells of a line of CSV whose cells hold no commas."""
    return [cell.strip().strip('"') for cell in line.decode("utf-8", "replace").split(",")]


def columns_of(header: bytes) -> tuple[int, int, int] | None:
    """Return where time, prompt tokens and output tokens stand; None: not such a header."""
    cells = cells_of(header)
    places = []
    for names in (_TIME_COLUMNS, _PROMPT_COLUMNS, _OUTPUT_COLUMNS):
        found = [cells.index(name) for name in names if name in cells]
        if not found:
            return None
        places.append(found[0])
    return places[0], places[1], places[2]


class _Parser:
    def __init__(self, header: bytes, columns: tuple[int, int, int]) -> None:
        self._names = cells_of(header)
        self._columns = columns
        self._arrivals = Forward(self._names[columns[0]], NANOSECONDS)

    def parse(self, number: int, line: bytes) -> TraceRequest:
        cells = cells_of(line)
        if len(cells) != len(self._names):
            message = f"expected {len(self._names)} columns, got {len(cells)} in {shown(line)}"
            raise BadLineError(message)
        time, prompt, output = self._columns
        nanoseconds = nanoseconds_of(cells[time])
        if nanoseconds is None:
            raise self._bad(time, _A_TIME, cells)
        prompt_tokens = self._count(prompt, cells)
        output_tokens = self._count(output, cells)
        return TraceRequest(
            arrival_s=self._arrivals.since_first_s(nanoseconds),
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            chain=(),
            line=number,
        )

    def _count(self, place: int, cells: list[str]) -> int:
        count = int(cells[place]) if _COUNT.fullmatch(cells[place]) else 0
        if count < 1:
            raise self._bad(place, A_COUNT, cells)
        return count

    def _bad(self, place: int, expected: str, cells: list[str]) -> BadLineError:
        got = cells[place]
        return BadLineError(
            f"{self._names[place]}: expected {expected}, got {got[:60] or 'nothing'}"
        )


def read_azure(reading: Reading) -> Iterator[TraceRequest]:
    """Yield the requests of an Azure trace; raises TraceError where its header is missing."""
    for number, header in reading.lines:
        columns = columns_of(header)
        if columns is None:
            message = (
                f"line {number}: expected a header with the columns {_TIME_COLUMNS[0]},"
                f"{_PROMPT_COLUMNS[0]},{_OUTPUT_COLUMNS[0]}, got {shown(header)}"
            )
            raise TraceError(message)
        return reading.each(_Parser(header, columns).parse)
    return iter(())
