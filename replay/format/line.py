"""The lines of a file, with their numbers, one at a time."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING, Final

from replay.format.packed import UNPACK_ERRORS, unpacked
from replay.trace import TraceError

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from replay.format.fault import Faults

LINE_BYTES: Final = 64 << 20
"""The longest line that is read."""
_END_BYTES: Final = len(b"\r\n")
_SKIP_BYTES: Final = 1 << 20
_UTF8_MARK: Final = b"\xef\xbb\xbf"
_UTF16_MARKS: Final = (b"\xff\xfe", b"\xfe\xff")


def lines_of(
    path: Path, faults: Faults, line_bytes: int
) -> Generator[tuple[int, bytes], None, None]:
    """Yield line number and line, without the line's end and the mark at the file's start.

    Blank lines are passed over. A line of more than ``line_bytes`` is a fault. Raises TraceError
    where the file cannot be opened, unpacked or read.
    """
    number = 0
    try:
        with unpacked(path) as stream:
            while raw := stream.readline(line_bytes + _END_BYTES):
                number += 1
                is_too_long = len(raw.removesuffix(b"\n").removesuffix(b"\r")) > line_bytes
                if is_too_long and not raw.endswith(b"\n"):
                    _skip_rest(stream)
                if number == 1:
                    raw = _unmarked(raw)
                line = raw.strip()
                if is_too_long:
                    faults.add(number, f"expected at most {line_bytes} bytes, got more")
                elif line:
                    yield number, line
    except UNPACK_ERRORS as error:
        message = f"line {number + 1}: {path.name} cannot be read: {error}"
        raise TraceError(message) from error


def _skip_rest(stream: IO[bytes]) -> None:
    """Pass over the rest of a line."""
    while rest := stream.readline(_SKIP_BYTES):
        if rest.endswith(b"\n"):
            return


def _unmarked(raw: bytes) -> bytes:
    if raw.startswith(_UTF16_MARKS):
        message = "line 1: expected UTF-8 text, got UTF-16"
        raise TraceError(message)
    return raw.removeprefix(_UTF8_MARK)
