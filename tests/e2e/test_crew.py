"""Processes under a supervisor, real ones that do nothing but accept: kept, replaced, given up."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from router.supervisor import crew as crew_module
from router.supervisor.binding import Binding
from router.supervisor.child import Child, told_of
from router.supervisor.crew import FAILURES_MOST, Crew, CrewFailedError, Plan, shared
from router.supervisor.message import End
from support.fleet import until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ROOT = Path(__file__).parents[2]
CLIENTS = 8


@dataclass(slots=True)
class Stand:
    """A crew of ``binding``, and what happened to it."""

    folder: Path
    binding: Binding
    crew: Crew
    running: asyncio.Task[None]
    ended: list[Child] = field(default_factory=list)

    @property
    def pids(self) -> dict[int, int]:
        """The process at each place."""
        return {child.place: child.pid for child in self.crew.children() if child.is_accepting}

    async def ask(self) -> int:
        """Return the pid that answers a new connection; raises OSError where none does."""
        port = int(self.binding.url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            return int(await reader.read())
        finally:
            writer.close()
            await writer.wait_closed()

    async def serves(self, count: int) -> None:
        """Wait until so many accept."""

        async def is_so() -> bool:
            return self.crew.accepting == count

        await until(is_so, f"{count} processes accept")


@contextlib.asynccontextmanager
async def standing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, processes: int = 2
) -> AsyncIterator[Stand]:
    """Run a crew of light processes."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(ROOT), str(ROOT / "tests"))))
    binding = Binding("127.0.0.1:0", processes, is_tls=False, mode=0o600)
    plan = Plan(
        processes=processes,
        command=(sys.executable, "-m", "support.light_process"),
        config=str(folder),
        sockets=tuple(each.fileno() for each in binding.sockets),
        url=binding.url,
        state_url="",
        folder=str(folder),
        log_level="info",
        loop="asyncio",
        drain_s=60.0,
    )
    crew = Crew(plan, random.Random(1))
    crew.on_closed = binding.close
    stand = Stand(folder, binding, crew, asyncio.create_task(crew.run()))
    crew.on_ended = stand.ended.append
    try:
        yield stand
    finally:
        crew.end(End(is_interactive=True))
        await crew.gone()
        await asyncio.gather(stand.running, return_exceptions=True)
        binding.close()


async def test_a_killed_process_leaves_its_connections_to_the_others_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with standing(tmp_path, monkeypatch) as stand:
        await stand.serves(2)
        before = stand.pids
        (tmp_path / "fails").touch()  # nobody follows for now
        os.kill(before[0], signal.SIGKILL)
        await stand.serves(1)
        answers = {await stand.ask() for _ in range(4 * CLIENTS)}
        assert answers == {before[1]}
        (tmp_path / "fails").unlink()
        await stand.serves(2)
        assert stand.pids[1] == before[1]
        assert stand.pids[0] != before[0]
        assert stand.crew.restarts["crashed"] >= 1
        assert not stand.running.done()


async def test_a_restart_replaces_every_process_and_no_connection_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C-20: a storm of connections meets at least one process that takes them, all the time."""
    async with standing(tmp_path, monkeypatch) as stand:
        await stand.serves(2)
        before, answers, is_over = stand.pids, [], asyncio.Event()

        async def storm() -> None:
            while not is_over.is_set():
                answers.append(await stand.ask())

        clients = [asyncio.create_task(storm()) for _ in range(CLIENTS)]
        assert await stand.crew.restart()
        is_over.set()
        await asyncio.gather(*clients)  # raises what any of them met with
        after = stand.pids
        assert not set(before.values()) & set(after.values())
        assert set(answers) <= {*before.values(), *after.values()}
        assert set(answers) & set(before.values())
        assert set(answers) & set(after.values())
        assert stand.crew.restarts == {"crashed": 0, "replaced": 2}
        assert [child.status for child in stand.ended] == [0, 0]


async def test_a_process_that_does_not_come_up_replaces_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with standing(tmp_path, monkeypatch) as stand:
        await stand.serves(2)
        before = stand.pids
        (tmp_path / "fails").touch()
        assert not await stand.crew.restart()
        assert stand.pids == before
        assert {await stand.ask() for _ in range(4 * CLIENTS)} <= set(before.values())


async def test_processes_that_never_last_are_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(crew_module, "PAUSE_BASE_S", 0.01)
    (tmp_path / "fails").touch()
    async with standing(tmp_path, monkeypatch) as stand:
        with pytest.raises(CrewFailedError, match="the last one with status 3: given up") as failed:
            await stand.running
        assert failed.value.status == 1
        assert len(stand.ended) >= FAILURES_MOST


async def test_a_wrong_configuration_ends_the_start_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "refuses").touch()
    async with standing(tmp_path, monkeypatch) as stand:
        with pytest.raises(CrewFailedError) as failed:
            await stand.running
        assert failed.value.status == 2


async def test_all_end_and_then_the_address_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with standing(tmp_path, monkeypatch) as stand:
        await stand.serves(2)
        stand.crew.end(End())
        await stand.crew.gone()
        await stand.running
        with pytest.raises(OSError, match=r"refused|Connect call failed"):
            await stand.ask()
        assert [child.status for child in stand.ended] == [0, 0]


def test_sockets_without_a_process_are_shared_among_the_others() -> None:
    class At:
        def __init__(self, place: int) -> None:
            self.place = place

    first, third = At(0), At(2)
    assert shared([first, third], 4) == [[0, 1], [2, 3]]  # type: ignore[list-item]
    assert shared([first], 3) == [[0, 1, 2]]  # type: ignore[list-item]
    assert shared([first, third], 1) == [[0], [0]]  # type: ignore[list-item]


def test_an_end_is_told_by_its_status_or_its_signal() -> None:
    assert told_of(3) == "status 3"
    assert told_of(-signal.SIGKILL) == "SIGKILL"
