"""Processes that evaluate trials side by side; each builds its evaluation once.

A pipe each and no shared state: a process whose pipe closes ends, so that none outlives the sweep.
"""

from __future__ import annotations

import multiprocessing
import signal
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Protocol, Self, TypeAlias

from replay.trace import TraceError
from replay.trial import Figures, TrialError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from multiprocessing.context import SpawnProcess

    from policies.union import AnyPolicy
    from replay.trial import Build, Cell, Evaluate

Task: TypeAlias = "tuple[AnyPolicy, Cell]"


class Crew(Protocol):
    """Who evaluates."""

    def answers(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Figures]]:
        """Yield the place of each task and its figures, as they end; raises TrialError."""


class Alone:
    """This process evaluates, one after another."""

    def __init__(self, build: Build) -> None:
        self._build = build
        self._evaluate: Evaluate | None = None

    def answers(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Figures]]:
        """See ``Crew``."""
        if self._evaluate is None:
            self._evaluate = self._build()
        for place, (policy, cell) in enumerate(tasks):
            yield place, self._evaluate(policy, cell)


class Processes:
    """As many processes as asked for, spawned when there is something to do."""

    def __init__(self, build: Build, count: int) -> None:
        self._build = build
        self._count = count
        self._members: list[tuple[SpawnProcess, Connection]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process, connection in self._members:
            connection.close()
            process.terminate()
        for process, _connection in self._members:
            process.join()
        self._members.clear()

    def answers(self, tasks: Sequence[Task]) -> Iterator[tuple[int, Figures]]:
        """See ``Crew``."""
        if not self._members and tasks:
            self._start()
        waiting = list(enumerate(tasks))[::-1]
        busy: dict[Connection, int] = {}
        idle = [connection for _, connection in self._members]
        while waiting or busy:
            while waiting and idle:
                connection = idle.pop()
                place, task = waiting.pop()
                with suppress(BrokenPipeError):  # a process that ended is noticed below
                    connection.send(task)
                busy[connection] = place
            ready = wait(list(busy))
            for connection in [one for one in busy if one in ready]:
                figures = self._received(connection)
                idle.append(connection)
                yield busy.pop(connection), figures

    def _received(self, connection: Connection) -> Figures:
        try:
            answer = connection.recv()
        except (EOFError, ConnectionResetError):
            message = "a process of the sweep ended before its answer: out of memory, or killed"
            raise TrialError(message) from None
        if isinstance(answer, Figures):
            return answer
        raise TrialError(str(answer))

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        # Ctrl-C is for this process, which ends the others: they inherit that it is ignored.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            for _ in range(self._count):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(self._build, theirs), daemon=True)
                process.start()
                theirs.close()
                self._members.append((process, ours))
        finally:
            signal.signal(signal.SIGINT, before)


def _serve(build: Build, connection: Connection) -> None:
    """Answer trials until the pipe closes."""
    evaluate: Evaluate | None = None
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            policy, cell = connection.recv()
            try:
                evaluate = evaluate or build()
                connection.send(evaluate(policy, cell))
            except (TrialError, TraceError) as error:
                connection.send(str(error))
