"""Keeps the processes of one router running, and replaces and ends them without losing a request.

Every process has a place: the listening socket that is its own, where there are as many. A process
that is not there leaves its socket to the others until the next one is ready. A restart starts the
next process first, lets it accept, and only then retires the one before it, one place at a time.

A process that ends unasked is started again, after a pause that grows. Where none of them lasts,
that is given up: ``FAILURES_MOST`` ends in a row, none of which any process outlived by
``STEADY_S``.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from router.supervisor.child import Child, told_of
from router.supervisor.message import End, Orders, Reload, Retire
from state.rhythm import Backoff

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from router.supervisor.message import Launch

_log = logging.getLogger(__name__)

EXIT_CONFIG: Final = 2
CRASHED: Final = "crashed"
REPLACED: Final = "replaced"
RESTARTS: Final = (CRASHED, REPLACED)
"""Why a process was started in place of another one."""
FAILURES_MOST: Final = 6
STEADY_S: Final = 10.0
PAUSE_BASE_S: Final = 0.5
PAUSE_CAP_S: Final = 10.0
START_S: Final = 600.0
"""A process that is not ready by then is ended."""
OVERDUE_S: Final = 15.0
"""So long beyond the time to drain a process may take; then it is killed."""


class Plan(Struct, frozen=True, kw_only=True):
    """What all processes are started with.

    ``sockets`` are descriptors, ``drain_s`` is the longest time that a process may take to end.
    """

    processes: int
    command: tuple[str, ...]
    config: object
    sockets: tuple[int, ...]
    url: str
    state_url: str
    folder: str
    log_level: str
    loop: str
    drain_s: float


class CrewFailedError(Exception):
    """No process lasts; ``status`` is what to exit with, the text says why."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Crew:
    """The processes of ``plan``; ``run`` keeps them until it is cancelled or they are ended."""

    def __init__(self, plan: Plan, rng: random.Random) -> None:
        self._plan = plan
        self._rng = rng
        self._children: dict[int, Child] = {}
        """The one that serves, or begins to, by place."""
        self._others: set[Child] = set()
        """Those that begin beside it or end."""
        self._lives = 0
        self._failures = 0
        self._backoff = Backoff(PAUSE_BASE_S, PAUSE_CAP_S, rng)
        self._lead: Child | None = None
        self._end: End | None = None
        self._restarting = asyncio.Lock()
        self._relieved: set[asyncio.Task[bool]] = set()
        self._burials: set[asyncio.Future[None]] = set()
        self._locks = [asyncio.Lock() for _ in range(plan.processes)]
        """Held while a process begins that takes the place."""
        self.restarts = dict.fromkeys(RESTARTS, 0)
        self.on_ended: Callable[[Child], None] = lambda _: None
        self.on_launch: Callable[[Child, Launch], None] = lambda *_: None
        self.on_closed: Callable[[], None] = lambda: None
        """Is called when the last process stopped accepting, as all end."""
        self.serving = asyncio.Event()
        """Set once every place had a process that was ready."""

    def children(self) -> list[Child]:
        """Return those that answer operators: in the order of their places, and who ends last."""
        serving = [self._children[place] for place in sorted(self._children)]
        return [one for one in [*serving, *self._others] if one.is_ready and not one.ended.is_set()]

    @property
    def accepting(self) -> int:
        """How many take connections."""
        return sum(child.is_accepting for child in self._children.values())

    @property
    def lead(self) -> Child | None:
        """The one that does what only one does."""
        return self._lead

    async def run(self) -> None:
        """Keep every place taken until all were told to end; raises CrewFailedError."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for place in range(self._plan.processes):
                    tasks.create_task(self._keep(place), name=f"place {place}")
        except* CrewFailedError as failed:
            first = failed.exceptions[0]
            self.end(End(is_interactive=True))
            await self.gone()
            raise first from None

    def end(self, told: End) -> None:
        """Let all end; told again, in a hurry."""
        self._end = told
        for child in [*self._children.values(), *self._others]:
            child.has_to_end = True
            child.send(told)
        self._look_at_doors()

    def reload(self) -> None:
        """Let all read their certificates again."""
        for child in [*self._children.values(), *self._others]:
            child.send(Reload())

    async def gone(self) -> None:
        """Wait until all are gone, after they were told to end; who takes too long is killed."""
        waiting = [*self._children.values(), *self._others]
        try:
            async with asyncio.timeout(self._plan.drain_s + OVERDUE_S):
                for child in waiting:
                    await child.ended.wait()
        except TimeoutError:
            for child in waiting:
                if not child.ended.is_set():
                    _log.error("process %d does not end and is killed", child.number)
                child.kill()
            for child in waiting:
                await child.ended.wait()

    async def restart(self) -> bool:
        """Replace every process, one after the other; False where a new one did not come up."""
        async with self._restarting:
            for place in range(self._plan.processes):
                if self._end is not None or not await self._replace(place):
                    return False
        return True

    # One place.

    async def _keep(self, place: int) -> None:
        while True:
            async with self._locks[place]:  # one that is about to take over is waited for
                if self._end is not None:
                    return
                if place not in self._children:
                    self._children[place] = await self._started(place)
            await self._until_over(place)
            child = self._children.pop(place)
            self._look_at_doors()
            if self._end is None:
                self.restarts[CRASHED] += 1
                await self._pause(child)

    async def _until_over(self, place: int) -> None:
        """Wait until the process at ``place`` is gone and no other one took it over."""
        while True:
            child = self._children[place]
            starting = asyncio.ensure_future(self._ready(child))
            try:
                await child.ended.wait()
            finally:
                starting.cancel()
            if self._children[place] is child:
                return

    async def _pause(self, child: Child) -> None:
        """Wait before the next start; raise CrewFailedError where there is no use in it."""
        lasted = child.ready_s is not None and self._now_s() - child.ready_s >= STEADY_S
        steady = lasted or any(
            one.ready_s is not None and self._now_s() - one.ready_s >= STEADY_S
            for one in self._children.values()
        )
        if steady:
            self._failures = 0
        if lasted:
            self._backoff.reset()
        self._failures += 1
        how = told_of(child.status)
        if child.status == EXIT_CONFIG and not self.serving.is_set():
            message = "it is not started: see above"
            raise CrewFailedError(message, EXIT_CONFIG)
        if self._failures >= FAILURES_MOST:
            message = (
                f"{self._failures} processes in a row ended by themselves soon after their start,"
                f" the last one with {how}: given up"
            )
            raise CrewFailedError(message, 1)
        pause_s = self._backoff.next_s()
        _log.error(
            "process %d (pid %d) ended with %s, the next one starts in %.1f s",
            child.number,
            child.pid,
            how,
            pause_s,
        )
        await asyncio.sleep(pause_s)

    async def _replace(self, place: int) -> bool:
        """Let another process take over a place; False where it did not come up."""
        async with self._locks[place]:
            after = await self._started(place, is_successor=True)
            await self._ready(after)
            if not after.is_accepting or self._end is not None:
                after.has_to_end = True
                after.send(self._end or End(is_interactive=True))
                _log.error("process %d did not come up to replace another one", after.number)
                return False
            before = self._children.get(place)
            self._children[place] = after
            self._others.discard(after)
            self.restarts[REPLACED] += 1
            if before is not None:
                before.has_to_end = True
                self._others.add(before)
            self._look_at_doors()
        if before is not None and not before.ended.is_set():
            before.send(Retire())
            await before.ended.wait()
        return True

    async def _started(self, place: int, *, is_successor: bool = False) -> Child:
        """Return a new process for a place, which it has not taken yet."""
        plan = self._plan
        taken = {one.number for one in [*self._children.values(), *self._others]}
        number = next(number for number in range(len(taken) + 1) if number not in taken)
        orders = Orders(
            number=number,
            config=plan.config,
            sockets=plan.sockets,
            url=plan.url,
            state_url=plan.state_url,
            folder=plan.folder,
            is_successor=is_successor or self.accepting > 0,
            log_level=plan.log_level,
            loop=plan.loop,
        )
        self._lives += 1
        child = Child(orders, place, self._lives)
        child.on_leaving = self._look_at_doors
        child.on_relieve = lambda: self._relieve(child)
        child.on_launch = lambda told: self.on_launch(child, told)
        self._others.add(child)  # its number is taken from now on
        try:
            await child.start(plan.command)
        except OSError as error:
            _log.error("a process cannot be started: %s", error.strerror)
            child.ended.set()
        if self._end is not None:
            child.send(self._end)
        self._burials.add(burial := asyncio.ensure_future(self._bury(child)))
        burial.add_done_callback(self._burials.discard)
        return child

    async def _bury(self, child: Child) -> None:
        await child.ended.wait()
        self._others.discard(child)
        self.on_ended(child)

    async def _ready(self, child: Child) -> None:
        """Wait until a process is ready or gone; one that is neither in time is killed."""
        try:
            async with asyncio.timeout(START_S):
                await child.until(lambda: child.is_ready)
        except TimeoutError:
            _log.error("process %d was not ready after %.0f s", child.number, START_S)
            child.kill()
        if self._children.get(child.place) is child:
            self._others.discard(child)
            self._look_at_doors()
            if all(
                place in self._children and self._children[place].is_ready
                for place in range(self._plan.processes)
            ):
                self.serving.set()

    def _relieve(self, child: Child) -> None:
        """Replace a process that was told by a signal to end."""
        if self._end is not None or self._children.get(child.place) is not child:
            child.has_to_end = True
            child.send(self._end or End())
            return
        task = asyncio.ensure_future(self._replace(child.place))
        self._relieved.add(task)
        task.add_done_callback(self._relieved.discard)

    def _look_at_doors(self) -> None:
        """Share the sockets among those that accept; one of them leads."""
        accepting = [
            child
            for _, child in sorted(self._children.items())
            if child.is_accepting and not child.ended.is_set()
        ]
        if self._end is not None:
            if not accepting:
                self.on_closed()
            return
        if not accepting:
            return
        for child, places in zip(
            accepting, shared(accepting, len(self._plan.sockets)), strict=True
        ):
            child.accept_from(places)
        if self._lead not in accepting:
            self._lead = accepting[0]
            self._lead.lead()

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()


def shared(accepting: Sequence[Child], sockets: int) -> list[list[int]]:
    """Return the sockets of each: its own, and its part of those whose own process is away."""
    if sockets == 1:
        return [[0] for _ in accepting]
    found = [[child.place] for child in accepting]
    free = sorted(set(range(sockets)) - {child.place for child in accepting})
    for turn, place in enumerate(free):
        found[turn % len(found)].append(place)
    return found
