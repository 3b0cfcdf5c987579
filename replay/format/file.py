"""A trace file, whatever its format: opened once, read as often as wanted."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Final

from replay.format import agent, azure, conversation, mooncake, recording, text
from replay.format.detect import Format, detected
from replay.format.fault import Faults
from replay.format.kind import IdsKind
from replay.format.line import lines_of
from replay.format.reading import Reading, ReadOptions
from replay.trace import TraceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from replay.trace import TraceRequest

_READERS: Final[dict[Format, Callable[[Reading], Iterator[TraceRequest]]]] = {
    Format.MOONCAKE: mooncake.read_mooncake,
    Format.RECORDING: recording.read_recording,
    Format.AZURE: azure.read_azure,
    Format.CONVERSATION: conversation.read_conversation,
    Format.AGENT: agent.read_agent,
}
_BLOCK_TOKENS: Final = {
    Format.MOONCAKE: mooncake.BLOCK_TOKENS,
    Format.AZURE: azure.BLOCK_TOKENS,
    Format.CONVERSATION: text.BLOCK_TOKENS,
    Format.AGENT: text.BLOCK_TOKENS,
}


class TraceFile:
    """A trace in a file; every ``for`` over it reads it again from the start, a line at a time.

    ``skipped``, ``first_skipped`` and ``ids_kind`` tell of the pass that was started last, up to
    where it is.
    """

    def __init__(
        self,
        path: Path,
        found: Format,
        block_tokens: int,
        options: ReadOptions,
        *,
        skip_bad: bool,
    ) -> None:
        self._path = path
        self._format = found
        self._block_tokens = block_tokens
        self._options = options
        self._skip_bad = skip_bad
        self._reading: Reading | None = None

    @property
    def name(self) -> str:
        """The file's name."""
        return self._path.name

    @property
    def format(self) -> Format:
        """What the file is."""
        return self._format

    @property
    def block_tokens(self) -> int:
        """The tokens that one id of a chain stands for."""
        return self._block_tokens

    @property
    def skipped(self) -> int:
        """Bad lines so far."""
        return self._reading.faults.skipped if self._reading else 0

    @property
    def first_skipped(self) -> tuple[str, ...]:
        """What was wrong with the first three of them."""
        return tuple(self._reading.faults.first) if self._reading else ()

    @property
    def ids_kind(self) -> IdsKind:
        """What the ids of a Mooncake trace were found to name."""
        return self._reading.ids.kind if self._reading else IdsKind.UNKNOWN

    def __iter__(self) -> Iterator[TraceRequest]:
        """Yield the requests by arrival; raises TraceError at a bad line and for no requests."""
        faults = Faults(skip_bad=self._skip_bad)
        with closing(lines_of(self._path, faults, self._options.line_bytes)) as lines:
            reading = self._reading = Reading(lines, faults, self._options)
            is_empty = True
            for request in _READERS[self._format](reading):
                is_empty = False
                yield request
        if is_empty:
            told = f": all {faults.skipped} were bad, {faults.first[0]}" if faults.first else ""
            message = f"the file has no usable line{told}"
            raise TraceError(message)


def open_trace(
    path: Path,
    *,
    format: str | None = None,  # noqa: A002 - what users call it
    skip_bad: bool = False,
    options: ReadOptions | None = None,
) -> TraceFile:
    """Open a trace; the format is told from its content where ``format`` does not name one.

    Raises TraceError for a file that cannot be read or is no trace, ValueError for wrong options.
    With ``skip_bad`` bad lines are counted and passed over.
    """
    chosen = (options or ReadOptions()).checked()
    named = None if format is None else Format(format)
    if not path.exists():
        message = f"{path}: no such file"
        raise TraceError(message)
    if not path.is_file():
        message = f"{path}: expected a file; a trace is read more than once"
        raise TraceError(message)
    with closing(lines_of(path, Faults(skip_bad=skip_bad), chosen.line_bytes)) as lines:
        if named is None:
            named, number, line = detected(lines)
        else:
            number, line = next(lines, (1, b""))
    block_tokens = chosen.block_tokens or _BLOCK_TOKENS.get(named, 0)
    if named is Format.RECORDING:
        block_tokens = recording.header_of(number, line).block_tokens
        if chosen.block_tokens not in {None, block_tokens}:
            message = f"block_tokens: the recording has {block_tokens}"
            raise ValueError(message)
    return TraceFile(path, named, block_tokens, chosen, skip_bad=skip_bad)
