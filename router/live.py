"""What operators see as it happens: server-sent events and snapshots, made once for all viewers.

``GET /admin/events`` sends ``history`` once, then ``snapshot`` and ``points`` every second and
``decisions`` as they happen, at most ``DECISIONS_PER_S`` of them, and how many were left out. Fewer
than there is room for are all shown; of more, those that went wrong come first, and the others are
taken evenly. Without a viewer nothing of it is made.

A viewer that does not take what it is sent is dropped once ``UNSENT_MOST_BYTES`` wait for it: it
comes back by itself, and gets the history again. Nothing here waits for a viewer.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, Protocol

import msgspec
from msgspec import Struct

from router.error import OverloadedError
from router.header import header_lines, response_head
from router.reply import SERVER, own_response
from router.wire import ClientStream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from router.client import Handler
    from router.header import Framing
    from router.history import History
    from router.reply import Response
    from router.request import Request
    from router.snapshot import Snapshot
    from router.trace import DecisionRecord

TICK_S: Final = 0.25
TICKS_PER_S: Final = 4
VIEWERS_MOST: Final = 32
UNSENT_MOST_BYTES: Final = 512 * 1024
DECISIONS_PER_S: Final = 20
DECISIONS_FIRST: Final = 40
"""So many of the last decisions a viewer gets at first."""
FRESH_S: Final = 0.5
"""Snapshots that are asked for are this old at most."""
_HEAD_LINES: Final = header_lines(
    [
        b"Content-Type", b"text/event-stream; charset=utf-8",
        b"Cache-Control", b"no-store",
        b"X-Accel-Buffering", b"no",
        b"Server", SERVER,
    ]
)  # fmt: skip


class Brief(Struct, frozen=True, kw_only=True):
    """One decision in a line; ``/admin/explain`` has all of it."""

    request_id: str
    at_unix_s: float
    model: str | None
    tenant: str | None
    replica: str | None
    reason: str | None
    attempts: int
    prompt_tokens: int
    predicted_tokens: int | None
    reported_tokens: int | None
    held_s: float
    ttft_s: float | None
    duration_s: float
    status: int
    outcome: str


class Decisions(Struct, frozen=True, kw_only=True):
    """Decisions since the last event, oldest first, and how many were left out."""

    decisions: tuple[Brief, ...]
    left_out: int = 0


class Seen(Protocol):
    """Where snapshots come from."""

    viewers: Callable[[], int]

    def tick(self) -> None:
        """Look, about once a second."""
        ...

    def now(self) -> Snapshot:
        """Return everything at this moment."""
        ...


class Latest(Protocol):
    """Where the last decisions are."""

    def latest(self, count: int) -> Iterator[DecisionRecord]:
        """Yield up to ``count`` of them, newest first."""
        ...


@dataclass(slots=True, eq=False)
class _Viewer:
    stream: ClientStream
    is_over: asyncio.Future[None]

    def send(self, event: bytes) -> bool:
        """Write; False for a viewer that is too slow, which is dropped."""
        if self.stream.unsent_bytes > UNSENT_MOST_BYTES:
            self.stream.abort()
            self.end()
            return False
        if not self.stream.send(b"", event):
            self.end()  # it left by itself
        return True

    def end(self) -> None:
        """Let its handler return."""
        if not self.is_over.done():
            self.is_over.set_result(None)


class Live:
    """Runs as long as the router; ``is_ended``: no viewer is taken any more."""

    def __init__(
        self,
        history: History,
        snapshots: Seen,
        trace: Latest,
        sample: Callable[[], tuple[int, float]],
        clock: Callable[[], float],
    ) -> None:
        self._history = history
        self._snapshots = snapshots
        self._trace = trace
        self._sample = sample
        self._clock = clock
        self._viewers: set[_Viewer] = set()
        self._seen: list[DecisionRecord] = []
        self._left_out = 0
        self._tens = 0
        self._body = b""
        self._made_s: float | None = None
        self.is_ended = False
        self.dropped = 0
        """Viewers that were too slow."""
        snapshots.viewers = lambda: len(self._viewers)

    def routes(self) -> dict[str, Mapping[str, Handler]]:
        """Return the paths, for the operators' listener only."""
        return {
            "/admin/events": {"GET": self.events},
            "/admin/snapshot": {"GET": self.snapshot},
            "/admin/history": {"GET": self.history},
        }

    async def run(self) -> None:
        """Tick until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            self.tick()

    def tick(self) -> None:
        """Add up what happened; tell the viewers, if there are any."""
        history = self._history
        history.sample(*self._sample())
        history.fold()
        closed = history.advance()
        if closed:
            self._snapshots.tick()
        if not self._viewers:
            self._body = b""
            return
        if self._seen or self._left_out:
            self._send(self._decisions())
        if closed:
            self._send(_event(b"points", self._points(closed)), _event(b"snapshot", self._made()))

    async def snapshot(self, _: Request) -> Response:
        """Answer everything at one moment."""
        self._history.fold()
        return _json(self._made(FRESH_S))

    async def history(self, _: Request) -> Response:
        """Answer the last minutes, second by second and in tens of seconds."""
        return _json(msgspec.json.encode(self._history.view()))

    async def events(self, request: Request) -> ClientStream:
        """Send events until the viewer leaves, is dropped, or the router ends."""
        if self.is_ended or len(self._viewers) >= VIEWERS_MOST:
            message = "the router ends" if self.is_ended else f"{VIEWERS_MOST} viewers are there"
            raise OverloadedError(message)
        framing: Framing = "close" if request.is_http10 else "chunked"
        stream = ClientStream(request, HTTPStatus.OK, framing, keep_alive=False)
        head = response_head(
            HTTPStatus.OK,
            _HEAD_LINES,
            framing=framing,
            length=None,
            is_http10=request.is_http10,
            keep_alive=False,
        )
        viewer = _Viewer(stream, asyncio.get_running_loop().create_future())
        try:
            self._begin(viewer, head)
            await viewer.is_over
        finally:
            self._leave(viewer)
        return stream

    def end(self) -> None:
        """Tell every viewer that the router ends, and let it go."""
        self.is_ended = True
        last_words = _event(b"end", b'{"reason":"the router ends"}')
        for viewer in list(self._viewers):
            viewer.send(last_words)
            viewer.stream.finish()
            viewer.end()

    def _begin(self, viewer: _Viewer, head: bytes) -> None:
        if not self._viewers:
            self._seen, self._left_out = [], 0
            self._history.fold()
            self._history.on_records = self._pick
        latest = [_brief(record) for record in self._trace.latest(DECISIONS_FIRST)]
        first = Decisions(decisions=tuple(reversed(latest)))
        self._viewers.add(viewer)
        viewer.stream.send(
            head,
            b"retry: 2000\n\n"
            + _event(b"history", msgspec.json.encode(self._history.view()))
            + _event(b"decisions", msgspec.json.encode(first))
            + _event(b"snapshot", self._made(FRESH_S)),
        )

    def _leave(self, viewer: _Viewer) -> None:
        self._viewers.discard(viewer)
        if not self._viewers:
            self._history.on_records = None

    def _send(self, *events: bytes) -> None:
        data = b"".join(events)
        for viewer in list(self._viewers):
            self.dropped += not viewer.send(data)
            if viewer.is_over.done():
                self._viewers.discard(viewer)

    def _made(self, fresh_s: float = 0.0) -> bytes:
        """Return a snapshot as JSON, at most ``fresh_s`` old."""
        now_s = self._clock()
        if not self._body or self._made_s is None or now_s - self._made_s > fresh_s:
            self._body = msgspec.json.encode(self._snapshots.now())
            self._made_s = now_s
        return self._body

    def _pick(self, records: Sequence[DecisionRecord]) -> None:
        """Keep some of what happened for the next event."""
        room = DECISIONS_PER_S // TICKS_PER_S - len(self._seen)
        chosen = chosen_of(records, max(0, room))
        self._seen += chosen
        self._left_out += len(records) - len(chosen)

    def _decisions(self) -> bytes:
        seen, self._seen = self._seen, []
        left_out, self._left_out = self._left_out, 0
        told = Decisions(decisions=tuple(_brief(one) for one in seen), left_out=left_out)
        return _event(b"decisions", msgspec.json.encode(told))

    def _points(self, closed: int) -> bytes:
        """Return the seconds that were closed, and the tens that ended with them."""
        view = self._history.view()
        seconds = view.seconds[-closed:]
        tens = [point for point in view.tens if point.start_unix_s + 10 > seconds[0].start_unix_s]
        return msgspec.json.encode({"seconds": seconds, "tens": tens})


def chosen_of(records: Sequence[DecisionRecord], most: int) -> list[DecisionRecord]:
    """Return at most so many: what went wrong first, the others evenly; in their order."""
    if len(records) <= most:
        return list(records)
    wrong = [at for at, record in enumerate(records) if is_wrong(record)]
    right = [at for at, record in enumerate(records) if not is_wrong(record)]
    picked = _evenly(wrong, most)
    picked += _evenly(right, most - len(picked))
    return [records[at] for at in sorted(picked)]


def is_wrong(record: DecisionRecord) -> bool:
    """Return whether a request failed, was shed or needed another try."""
    return record.status >= HTTPStatus.BAD_REQUEST or len(record.attempts) > 1


def _evenly(places: Sequence[int], most: int) -> list[int]:
    if len(places) <= most:
        return list(places)
    return [places[index * len(places) // most] for index in range(most)]


def _brief(record: DecisionRecord) -> Brief:
    decision = record.attempts[-1].decision if record.attempts else None
    return Brief(
        request_id=record.request_id,
        at_unix_s=record.started_unix_s,
        model=record.model,
        tenant=record.tenant,
        replica=decision.replica if decision is not None else None,
        reason=decision.reason.value if decision is not None else None,
        attempts=len(record.attempts),
        prompt_tokens=record.prompt_tokens,
        predicted_tokens=decision.predicted_cached_tokens if decision is not None else None,
        reported_tokens=record.reported_cached_tokens,
        held_s=record.held_s,
        ttft_s=record.ttft_s,
        duration_s=record.duration_s,
        status=record.status,
        outcome=record.outcome,
    )


def _event(name: bytes, data: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name, data)


def _json(body: bytes) -> Response:
    return own_response(body, "application/json", headers={"Cache-Control": "no-store"})
