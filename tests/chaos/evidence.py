"""What the checker judges: plain records of clients, replicas, routers and the system.

Nothing here knows how the router works. Times are ``time.monotonic`` of one machine, in seconds.
"""

from __future__ import annotations

import enum
import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from chaos.speech import NONCE, chunk, piece

if TYPE_CHECKING:
    from pathlib import Path


_ATTEMPT: Final = re.compile(rb'data: \{"id":"([\w-]+)"')


class End(enum.StrEnum):
    """How a request ended, as its client saw it."""

    COMPLETE = "complete"
    HTTP_ERROR = "HTTP error"
    ERROR_EVENT = "error event"
    CLOSED = "connection closed"
    LEFT = "left by the client"
    HUNG = "hung"


@dataclass(slots=True, kw_only=True)
class ClientLine:
    """One request of a client. ``pieces`` are the good ones from the first on, in order."""

    request: str
    tenant: str
    router: int
    nonce: str
    is_stream: bool
    began_s: float
    is_repeatable: bool = True
    wanted_pieces: int = 0
    prompt: bytes = b""
    own_prefix_tokens: int = 0
    ended_s: float = float("inf")
    status: int | None = None
    end: End = End.HUNG
    pieces: int = 0
    says_done: bool = False
    attempts: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()
    error_code: str = ""
    first_byte_s: float | None = None
    phase: str = ""

    @property
    def took_s(self) -> float:
        """How long the client waited."""
        return self.ended_s - self.began_s


@dataclass(slots=True, kw_only=True)
class Outage:
    """When a router could not answer because of what was done to it."""

    router: int
    from_s: float
    until_s: float = float("inf")


@dataclass(slots=True, kw_only=True)
class Sample:
    """One look at a running router; ``series`` are its metrics by name and labels."""

    router: int
    life: int
    at_s: float
    series: dict[str, float]
    rss_bytes: int = 0
    descriptors: int = 0
    requests: int = 0
    live_ms: float = 0.0


@dataclass(slots=True, kw_only=True)
class Rest:
    """A router when nothing is asked any more."""

    router: int
    inflight: float
    descriptors: int
    descriptors_before: int
    pool: int
    half_closed: int
    rss_bytes: int
    rss_before: int


@dataclass(slots=True, kw_only=True)
class Evidence:
    """All that a run left behind."""

    key: bytes
    clients: list[ClientLine] = field(default_factory=list)
    replicas: list[dict[str, Any]] = field(default_factory=list)
    decisions: list[dict[str, Any]] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    outages: list[Outage] = field(default_factory=list)
    rests: list[Rest] = field(default_factory=list)
    replica_active: dict[str, int] = field(default_factory=dict)
    artefacts: dict[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()
    keys_without_ttl: list[str] = field(default_factory=list)
    redis_clients: tuple[int, int] = (0, 0)
    replica_names: frozenset[str] = frozenset()
    reborn: frozenset[str] = frozenset()


@dataclass(slots=True)
class Reading:
    """What an answer says, taken apart without trust."""

    pieces: int = 0
    says_done: bool = False
    attempts: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    error_code: str = ""

    def add(self, attempt: str, text: str, key: bytes, nonce: str) -> None:
        """Judge the text of one event or answer, which is any number of whole pieces."""
        if attempt not in self.attempts:
            self.attempts.append(attempt)
        for word in text.split():
            if f"{word} " != piece(key, nonce, self.pieces):
                self.faults.append(f"not piece {self.pieces} of this request")
                return
            self.pieces += 1

    def is_torn(self, raw: bytes, key: bytes, nonce: str) -> bool:
        """Return whether an event is the beginning of the next one, ended for an error's sake."""
        found = _ATTEMPT.match(raw)
        if found is None:
            return b'data: {"id":"'.startswith(raw[:13])
        text = piece(key, nonce, self.pieces)
        wanted = [chunk(found[1].decode(), text, is_last=last) for last in (False, True)]
        return any(one.startswith(raw) for one in wanted)


def foreign_canaries(text: str, own: str) -> list[str]:
    """Return canaries in ``text`` that are not ``own``."""
    return sorted(set(NONCE.findall(text)) - {own})


def read_stream(body: bytes, key: bytes, nonce: str) -> Reading:
    """Take a stream apart; what is cut off at its end is no fault."""
    reading = Reading()
    events = body.split(b"\n\n")[:-1]
    for number, raw in enumerate(events):
        # A cut between an event's two line ends leaves one more; a blank line says nothing.
        data = raw.lstrip(b"\n").removeprefix(b"data: ")
        if data == b"[DONE]":
            reading.says_done = True
            continue
        try:
            event = json.loads(data)
        except ValueError:
            is_last = events[number + 1 :][:1] == events[-1:] and b'"error"' in events[-1]
            if not is_last or not reading.is_torn(raw, key, nonce):
                reading.faults.append("an event that is no JSON")
            continue
        if "error" in event:
            reading.error_code = str(event["error"].get("code") or event["error"].get("type"))
        elif reading.says_done or reading.error_code:
            reading.faults.append("text after the end")
        else:
            text = event["choices"][0]["delta"]["content"] if event["choices"] else ""
            reading.add(event["id"], text, key, nonce)
    if foreign_canaries(body.decode("utf-8", "replace"), nonce):
        reading.faults.append("foreign canary")
    return reading


def read_answer(body: bytes, key: bytes, nonce: str) -> Reading:
    """Take a whole answer that is no stream apart."""
    reading = Reading()
    try:
        told = json.loads(body)
    except ValueError:
        reading.faults.append("an answer that is no JSON")
        return reading
    if "error" in told:
        error = told["error"]
        reading.error_code = str(error.get("code") or error.get("type")) if error else ""
    else:
        reading.add(told["id"], told["choices"][0]["message"]["content"], key, nonce)
        reading.says_done = True
    if foreign_canaries(body.decode("utf-8", "replace"), nonce):
        reading.faults.append("foreign canary")
    return reading


class Count:
    """How many lines of one event a ledger has; each byte of it is read once."""

    def __init__(self, path: Path, event: str) -> None:
        self._path = path
        self._wanted = b'{"event": "%b",' % event.encode()
        self._read_bytes = 0
        self._total = 0

    def total(self) -> int:
        """Return the count by now."""
        with self._path.open("rb") as ledger:
            ledger.seek(self._read_bytes)
            data = ledger.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        self._total += whole.count(self._wanted)
        return self._total


def read_ledger(path: Path, from_byte: int = 0) -> list[dict[str, Any]]:
    """Return the lines of a replica's ledger from that byte on; the last may be torn."""
    with path.open("rb") as ledger:
        ledger.seek(from_byte)
        data = ledger.read()
    lines = []
    for line in data.splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return lines
