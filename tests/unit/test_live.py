"""Events for viewers: made once for all, bounded, and nobody waits for a slow one."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import pytest

from router.history import History
from router.live import (
    DECISIONS_FIRST,
    DECISIONS_PER_S,
    TICKS_PER_S,
    UNSENT_MOST_BYTES,
    VIEWERS_MOST,
    Live,
    chosen_of,
)
from router.trace import DecisionTrace
from support.decided import Clock, decided
from support.listening import Listening, listening
from support.raw import get

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from router.request import Request
    from router.snapshot import Snapshots

EVENTS = get("/admin/events")


@dataclass
class Counted:
    """Snapshots in whose place there is a number."""

    made: int = 0
    ticks: int = 0
    padding: str = ""
    viewers: Callable[[], int] = field(default=lambda: 0)

    def now(self) -> dict[str, Any]:
        self.made += 1
        return {"made": self.made, "padding": self.padding}

    def tick(self) -> None:
        self.ticks += 1


@dataclass
class Rig:
    """A live server whose clock the test turns."""

    clock: Clock
    history: History
    trace: DecisionTrace
    snapshots: Counted
    live: Live
    server: Listening

    def tick(self, times: int = 1) -> None:
        for _ in range(times):
            self.clock.now_s += 1.0 / TICKS_PER_S
            self.live.tick()

    async def viewer(self, request: bytes = EVENTS) -> Viewer:
        client = await self.server.client()
        client.send(request)
        viewer = Viewer(client.reader)
        await viewer.head()
        return viewer

    async def until_viewers(self, count: int) -> None:
        async with asyncio.timeout(20):
            while self.snapshots.viewers() != count:  # noqa: ASYNC110 - observes from outside
                await asyncio.sleep(0.002)


@dataclass
class Viewer:
    """Reads a chunked stream of events."""

    reader: asyncio.StreamReader
    status: int = 0
    lines: str = ""
    rest: bytes = b""
    is_chunked: bool = True

    async def head(self) -> None:
        async with asyncio.timeout(20):
            self.lines = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        self.status = int(self.lines.split(" ", 2)[1])
        self.is_chunked = "chunked" in self.lines

    async def event(self) -> tuple[str, Any]:
        """Return the next event's name and data; ``("", None)`` at the end."""
        async with asyncio.timeout(20):
            while b"\n\n" not in self.rest:
                more = await self._more()
                if not more:
                    return "", None
                self.rest += more
        text, _, self.rest = self.rest.partition(b"\n\n")
        fields = dict(line.split(": ", 1) for line in text.decode().split("\n"))
        if "data" not in fields:
            return await self.event()
        return fields["event"], json.loads(fields["data"])

    async def events(self, count: int) -> list[tuple[str, Any]]:
        return [await self.event() for _ in range(count)]

    async def _more(self) -> bytes:
        if not self.is_chunked:
            return await self.reader.read(65_536)
        size = int(await self.reader.readuntil(b"\r\n"), 16)
        return (await self.reader.readexactly(size + 2))[:-2]


@pytest.fixture(name="rig")
async def running() -> AsyncIterator[Rig]:
    clock = Clock()
    history = History(clock, 5_000.0)
    trace = DecisionTrace(100)
    snapshots = Counted()
    live = Live(history, cast("Snapshots", snapshots), trace, lambda: (0, 0.0), clock)
    routes = live.routes()

    async def handle(request: Request) -> Any:
        return await routes[request.path]["GET"](request)

    async with listening(handle=handle) as server:
        yield Rig(clock, history, trace, snapshots, live, server)
        live.end()


async def test_a_viewer_gets_what_was_and_then_what_is(rig: Rig) -> None:
    for number in range(DECISIONS_FIRST + 10):
        rig.trace.add(decided(number))
        rig.history.note(decided(number))
    rig.tick(TICKS_PER_S)
    viewer = await rig.viewer()
    assert viewer.status == 200
    assert "Content-Type: text/event-stream" in viewer.lines
    assert "Cache-Control: no-store" in viewer.lines
    (_, history), (_, decisions), (_, snapshot) = await viewer.events(3)
    assert [point["requests"] for point in history["seconds"]] == [DECISIONS_FIRST + 10]
    shown = [one["request_id"] for one in decisions["decisions"]]
    assert shown == [f"id{number}" for number in range(10, DECISIONS_FIRST + 10)], "oldest first"
    assert snapshot["made"] == 1
    rig.history.note(decided(99))
    rig.tick(TICKS_PER_S)
    events = await viewer.events(3)
    assert [name for name, _ in events] == ["decisions", "points", "snapshot"]
    assert [one["request_id"] for one in events[0][1]["decisions"]] == ["id99"]
    assert [point["requests"] for point in events[1][1]["seconds"]] == [1]


async def test_the_tens_that_end_come_with_their_last_second(rig: Rig) -> None:
    viewer = await rig.viewer()
    await viewer.events(3)
    rig.tick(10 * TICKS_PER_S)
    tens = [data["tens"] for name, data in await viewer.events(20) if name == "points"]
    assert [len(one) for one in tens] == [0] * 9 + [1]


async def test_a_snapshot_is_made_once_for_all_viewers_and_never_for_none(rig: Rig) -> None:
    rig.tick(5 * TICKS_PER_S)
    assert (rig.snapshots.made, rig.snapshots.ticks) == (0, 5)
    for _ in range(5):
        await rig.viewer()
    await rig.until_viewers(5)
    before = rig.snapshots.made
    assert before == 1, "what is not half a second old is good for all"
    rig.tick(3 * TICKS_PER_S)
    assert rig.snapshots.made == before + 3


async def test_a_viewer_whose_first_events_could_not_be_made_is_not_kept(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails() -> None:
        message = "no snapshot"
        raise RuntimeError(message)

    monkeypatch.setattr(rig.snapshots, "now", fails)
    with pytest.raises(asyncio.IncompleteReadError):
        await rig.viewer()
    assert rig.snapshots.viewers() == 0
    assert rig.history.on_records is None


async def test_one_viewer_too_many_is_told_so_and_finds_room_later(rig: Rig) -> None:
    viewers = [await rig.viewer() for _ in range(VIEWERS_MOST)]
    assert {viewer.status for viewer in viewers} == {200}
    assert (await rig.viewer()).status == 503
    await rig.server.clients[0].close()
    await rig.until_viewers(VIEWERS_MOST - 1)
    assert (await rig.viewer()).status == 200


async def test_a_viewer_that_takes_nothing_is_dropped_and_the_others_miss_nothing(
    rig: Rig,
) -> None:
    rig.snapshots.padding = "x" * (UNSENT_MOST_BYTES // 4)
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    slow.connect(("127.0.0.1", rig.server.port))
    slow.sendall(EVENTS)
    quick = await rig.viewer()
    await rig.until_viewers(2)
    await quick.events(3)
    rounds = 0
    while rig.snapshots.viewers() == 2 and rounds < 100:
        rig.tick(TICKS_PER_S)
        rounds += 1
        assert [name for name, _ in await quick.events(2)] == ["points", "snapshot"]
    assert rounds < 100
    assert rig.live.dropped == 1
    rig.tick(TICKS_PER_S)
    assert [name for name, _ in await quick.events(2)] == ["points", "snapshot"]
    await rig.server.until_connections(1)
    slow.close()


async def test_a_viewer_that_leaves_costs_nothing_any_more(rig: Rig) -> None:
    await rig.viewer()
    await rig.until_viewers(1)
    await rig.server.clients[0].close()
    await rig.until_viewers(0)
    made = rig.snapshots.made
    rig.history.note(decided())
    rig.tick(3 * TICKS_PER_S)
    assert rig.snapshots.made == made
    assert rig.history.on_records is None
    assert rig.live.dropped == 0


async def test_the_end_is_told_and_the_stream_ends_cleanly(rig: Rig) -> None:
    viewer = await rig.viewer()
    await viewer.events(3)
    rig.live.end()
    assert [name for name, _ in await viewer.events(2)] == ["end", ""]
    await rig.server.until_connections(0)
    assert (await rig.viewer()).status == 503


async def test_an_old_client_gets_the_events_without_chunks(rig: Rig) -> None:
    viewer = await rig.viewer(b"GET /admin/events HTTP/1.0\r\nHost: a\r\n\r\n")
    assert not viewer.is_chunked
    assert [name for name, _ in await viewer.events(3)] == ["history", "decisions", "snapshot"]
    rig.live.end()
    assert [name for name, _ in await viewer.events(2)] == ["end", ""]


async def test_decisions_are_bounded_and_those_left_out_are_counted(rig: Rig) -> None:
    viewer = await rig.viewer()
    await viewer.events(3)
    for _ in range(TICKS_PER_S):
        for number in range(1_000):
            rig.history.note(decided(number))
        rig.tick()
    told = [data for name, data in await viewer.events(6) if name == "decisions"]
    shown = sum(len(data["decisions"]) for data in told)
    assert shown == DECISIONS_PER_S
    assert shown + sum(data["left_out"] for data in told) == 4_000


def test_what_went_wrong_is_shown_first_and_the_rest_evenly() -> None:
    records = [decided(number) for number in range(100)]
    records[50] = decided(50, status=502, outcome="failed")
    first = records[10].attempts[0]
    records[10] = decided(10, attempts=(first, first))
    chosen = [record.ordinal for record in chosen_of(records, 5)]
    assert {10, 50} <= set(chosen)
    assert chosen == sorted(chosen)
    assert len(chosen) == 5
    assert max(chosen) > 50, "not only the first ones"
    assert chosen_of(records[:3], 5) == records[:3]
    assert chosen_of(records, 0) == []


async def test_a_snapshot_that_is_asked_for_often_is_made_twice_a_second(rig: Rig) -> None:
    async def ask() -> int:
        client = await rig.server.client()
        client.send(get("/admin/snapshot"))
        reply = await client.reply()
        assert reply.all(b"cache-control") == [b"no-store"]
        made: int = json.loads(reply.body)["made"]
        return made

    assert [await ask() for _ in range(5)] == [1] * 5
    rig.clock.now_s += 0.6
    assert await ask() == 2
