"""Sidecars that a supervisor runs for its processes: one for a replica, told when they end."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, cast

from router.supervisor.message import Launch, SidecarEnded
from router.supervisor.sidecars import Sidecars
from support.fleet import until

if TYPE_CHECKING:
    from collections.abc import Mapping

    from router.supervisor.child import Child
    from router.supervisor.message import Message


class Asking:
    """A process that asked for sidecars, and what it was told."""

    def __init__(self) -> None:
        self.told: list[Message] = []

    def send(self, message: Message) -> None:
        self.told.append(message)


class Stand:
    """Sidecars that are shell scripts."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[bytes]] = []
        self.environments: list[Mapping[str, str]] = []
        self.sidecars = Sidecars(self.start)

    def start(self, command: list[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        self.environments.append(environment)
        self.started.append(subprocess.Popen(["/bin/sh", "-c", f"exec {command[0]}"]))
        return self.started[-1]

    def ask(self, who: Asking, number: int, replica: str, script: str) -> None:
        told = Launch(sidecar=number, replica=replica, command=(script,), environment={"A": "b"})
        self.sidecars.launch(cast("Child", who), told)

    async def looked(self, who: Asking, count: int) -> None:
        async def is_so() -> bool:
            self.sidecars.look()
            return len(who.told) == count

        await until(is_so, f"{count} ends told")


async def test_who_asked_for_a_sidecar_is_told_how_it_ended() -> None:
    stand, first, second = Stand(), Asking(), Asking()
    stand.ask(first, 7, "a", "sleep 600")
    stand.ask(second, 1, "b", "sh -c 'exit 3'")
    await stand.looked(second, 1)
    assert second.told == [SidecarEnded(1, 3)]
    assert first.told == []
    assert stand.environments == [{"A": "b"}] * 2
    await stand.sidecars.close()
    assert [process.poll() for process in stand.started] == [-15, 3]


async def test_a_replica_has_one_sidecar_whoever_asks_for_it_next() -> None:
    """The process that leads now knows nothing of what the one before it had launched."""
    stand, first, second = Stand(), Asking(), Asking()
    stand.ask(first, 1, "a", "sleep 600")
    stand.ask(second, 1, "a", "sleep 600")
    assert stand.started[0].wait(30) == -9
    assert stand.started[1].poll() is None
    await stand.sidecars.close()
    assert stand.started[1].poll() == -15


async def test_a_program_that_cannot_be_started_is_one_that_ended() -> None:
    def broken(*_: object) -> subprocess.Popen[bytes]:
        raise FileNotFoundError

    who = Asking()
    sidecars = Sidecars(broken)
    told = Launch(sidecar=4, replica="a", command=("x",), environment={})
    sidecars.launch(cast("Child", who), told)
    assert who.told == [SidecarEnded(4, 1)]
    await sidecars.close()
