"""The one thread of a runner, and what a batch must be before it gets there."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NoReturn, TypeVar

from sidecar.runner import RunnerError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from sidecar.runner import Batch

Result = TypeVar("Result")


class StepThread:
    """Does everything in the order it was asked; two steps never overlap.

    Not even when whoever awaited the first has gone: it runs to its end.
    """

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._is_closed = False

    async def run(self, work: Callable[[], Result]) -> Result:
        """Return what ``work`` returns; raises what it raises, and RunnerError once closed."""
        if self._is_closed:
            refuse("the runner is closed")
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def run_now(self, work: Callable[[], Result]) -> Result:
        """Do ``work`` there and wait for it: for what comes before the first step."""
        return self._thread.submit(work).result()

    def close(self) -> None:
        """Wait for what is under way and take no more. Idempotent."""
        self._is_closed = True
        self._thread.shutdown(wait=True, cancel_futures=True)


def expect_counts(**counts: int | None) -> None:
    """Raise ValueError that names a setting below 1; None is left out."""
    for name, count in counts.items():
        if count is not None and count < 1:
            message = f"{name}: expected at least 1, got {count}"
            raise ValueError(message)


def expect_pages(pages: Iterable[int], total_pages: int) -> None:
    """Raise RunnerError for a page that is not there."""
    for page in pages:
        if not 0 <= page < total_pages:
            refuse(f"page: expected one of {total_pages}, got {page}")


def expect_moves(batch: Batch, total_pages: int, content_bytes: int) -> None:
    """Raise RunnerError if ``batch`` moves a page that is not there, or has a wrong buffer."""
    expect_pages((save.page for save in batch.saves), total_pages)
    expect_pages((load.page for load in batch.loads), total_pages)
    expect_pages((page for copy in batch.copies for page in copy), total_pages)
    buffers = [save.target for save in batch.saves]
    buffers += [memoryview(load.content) for load in batch.loads]
    for buffer in buffers:
        if buffer.nbytes != content_bytes:
            refuse(f"content: expected {content_bytes} bytes, got {buffer.nbytes}")


def refuse(message: str) -> NoReturn:
    """Raise RunnerError."""
    raise RunnerError(message)
