"""Which format a file has: told from what stands in it, whatever its name."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final

import msgspec

from replay.format.azure import columns_of
from replay.format.fault import shown
from replay.trace import TraceError

if TYPE_CHECKING:
    from collections.abc import Iterable

_LOOKED_AT: Final = 64
"""Lines: a file may start with bad ones."""


class Format(enum.StrEnum):
    """The formats that traces come in."""

    MOONCAKE = "mooncake"
    RECORDING = "recording"
    AZURE = "azure"
    CONVERSATION = "conversation"
    AGENT = "agent"


_MARKS: Final = (
    (Format.RECORDING, {"warmroute"}),
    (Format.MOONCAKE, {"hash_ids"}),
    (Format.CONVERSATION, {"messages"}),
    (Format.AGENT, {"timestamp_us", "input"}),
)
"""The fields that show a format of JSON lines; the first that fits."""


def format_of(line: bytes) -> Format | None:
    """Return the format that ``line`` shows; None where it shows none."""
    if columns_of(line) is not None:
        return Format.AZURE
    try:
        fields = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    return next((found for found, marks in _MARKS if fields.keys() >= marks), None)


def detected(lines: Iterable[tuple[int, bytes]]) -> tuple[Format, int, bytes]:
    """Return the format of a file with the first line that shows it.

    Raises TraceError for an empty file, and where no line of the first ones shows a format.
    """
    first: tuple[int, bytes] | None = None
    for looked_at, (number, line) in enumerate(lines):
        first = first or (number, line)
        found = format_of(line)
        if found is not None:
            return found, number, line
        if looked_at == _LOOKED_AT:
            break
    if first is None:
        message = "the file is empty: expected a trace"
        raise TraceError(message)
    message = (
        f"line {first[0]}: expected a Mooncake line (with hash_ids), a recording's header (with"
        " warmroute), a header TIMESTAMP,ContextTokens,GeneratedTokens, a conversation (with"
        f" messages) or an agent's call (with timestamp_us and input), got {shown(first[1])}"
    )
    raise TraceError(message)
