"""How far the demo is: a moving bar for people, plain lines for files and pipes."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console
    from rich.progress import TaskID


class Progress(Protocol):
    """Steps one after another; some of them advance by a known number of things."""

    def begin(self, step: str, things: int | None = None) -> None:
        """End the step before and begin this one."""

    def advance(self) -> None:
        """Count one thing of this step."""

    def end(self) -> None:
        """End the last step."""


class LineProgress:
    """One line when a step begins, one per quarter of its things."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._step = ""
        self._things = 0
        self._done = 0

    def begin(self, step: str, things: int | None = None) -> None:
        """See ``Progress``."""
        self._step, self._things, self._done = step, things or 0, 0
        self._console.print(step, soft_wrap=True)

    def advance(self) -> None:
        """See ``Progress``."""
        self._done += 1
        quarter = max(1, self._things // 4)
        if self._done % quarter == 0 or self._done == self._things:
            self._console.print(f"{self._step}: {self._done} of {self._things}", soft_wrap=True)

    def end(self) -> None:
        """See ``Progress``."""


class BarProgress:
    """A bar per step, all of them kept on the screen."""

    def __init__(self, bar: Bar) -> None:
        self._bar = bar
        self._task: TaskID | None = None

    def begin(self, step: str, things: int | None = None) -> None:
        """See ``Progress``."""
        self.end()
        self._task = self._bar.add_task(step, total=things)

    def advance(self) -> None:
        """See ``Progress``."""
        if self._task is not None:
            self._bar.advance(self._task)

    def end(self) -> None:
        """See ``Progress``."""
        if self._task is not None:
            # A step of unknown length is whole now; one that was counted shows its count.
            if self._bar.tasks[self._task].total is None:
                self._bar.update(self._task, total=1, completed=1)
            self._bar.stop_task(self._task)


@contextmanager
def progress_on(console: Console) -> Iterator[Progress]:
    """Show progress on ``console`` while the block runs."""
    if not console.is_terminal:
        yield LineProgress(console)
        return
    columns = (
        TextColumn("{task.description:<24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Bar(*columns, console=console) as bar:
        progress = BarProgress(bar)
        yield progress
        progress.end()
