"""Large bodies are read apart from the event loop, one at a time, in steps of bounded length.

A decoder holds the interpreter for as long as one call of it takes, in whichever thread. So there
is one thread for large bodies: the event loop waits for one such call at most, and gets its turn
before the next one. What makes a call long beyond the bytes themselves is the number of values in
them, which is bounded first, by slices.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final, TypeVar

from prompt.body import value_marks
from prompt.model import BadPromptError
from prompt.pace import keep_pace, rest

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")

LARGE_BODY_BYTES: Final = 512 * 1024
"""A hostile body of this size costs 8 ms where it is read; a change of threads 0.1 ms."""
MAX_BODY_VALUES: Final = 2_000_000
"""Values of one body: a call of the decoder takes 8 ns for each."""
MAX_WAITING: Final = 32
"""Large bodies that may wait for the thread."""
_SLICE_BYTES: Final = 256 * 1024
_ESCAPED: Final = re.compile(rb"\\.", re.DOTALL)
_BACKSLASH: Final = b"\\"
_QUOTE: Final = b'"'


class LaneFullError(Exception):
    """Too many large bodies wait to be read."""


class Lane:
    """One thread for work on large bodies. ``close`` drops what waits."""

    def __init__(self, max_waiting: int = MAX_WAITING) -> None:
        self._max_waiting = max_waiting
        self._open = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="large-body")

    async def run(self, work: Callable[[], _T]) -> _T:
        """Return what ``work`` returns, or raise what it raises; LaneFullError at once."""
        if self._open > self._max_waiting:
            raise LaneFullError
        loop = asyncio.get_running_loop()
        # Open until the thread is done, not until the client is gone: the work is what counts.
        self._open += 1
        working = self._thread.submit(_at_pace, work)
        working.add_done_callback(lambda _: call_soon(loop, self._end))
        return await asyncio.wrap_future(working, loop=loop)

    def _end(self) -> None:
        self._open -= 1

    def close(self) -> None:
        """Drop what waits; running work ends by itself and its result is dropped."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _at_pace(work: Callable[[], _T]) -> _T:
    keep_pace()
    return work()


def refuse_dense(body: bytes) -> None:
    """Raise BadPromptError where a body has more values than a decoder gets through in time.

    Commas in texts are no values: where all marks together are too many, texts are left out.
    """
    if _marks(body) > MAX_BODY_VALUES and _marks_outside_texts(body) > MAX_BODY_VALUES:
        name = "body"
        raise BadPromptError(name, f"at most {MAX_BODY_VALUES} values")


def _marks(body: bytes) -> int:
    found = 0
    for at in range(0, len(body), _SLICE_BYTES):
        found += value_marks(body[at : at + _SLICE_BYTES])
        rest()
    return found


def _marks_outside_texts(body: bytes) -> int:
    found, at, is_in_text = 0, 0, False
    while at < len(body) and found <= MAX_BODY_VALUES:
        piece = body[at : at + _SLICE_BYTES]
        if (len(piece) - len(piece.rstrip(_BACKSLASH))) % 2 and len(piece) > 1:
            piece = piece[:-1]  # an escape is not cut in two
        at += len(piece)
        if _BACKSLASH in piece:
            piece = _ESCAPED.sub(b"", piece)
        parts = piece.split(_QUOTE)
        outside = b"".join(parts[1::2] if is_in_text else parts[::2])
        found += value_marks(outside)
        is_in_text ^= len(parts) % 2 == 0
        rest()
    return found


def call_soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    """Run ``callback`` on the loop, unless that has ended in the meantime."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(callback)
