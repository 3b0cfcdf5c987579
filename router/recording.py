"""The last requests, kept in memory as a trace: arrival, lengths, block ids, decision, outcome.

No prompt text, no tokens, no ids that clients chose. Lines wait until a chunk of them is worth
compressing, which a thread does; beyond the bound the oldest chunk goes. ``warmroute record``
fetches it, one chunk at a time.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final
from urllib.parse import parse_qs

import msgspec
import zstandard
from msgspec import Meta, Struct
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from router.decision_log import LoggedPrompt, logged_prompts
from router.error import ClientError, NotFoundError
from router.reply import own_response

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from prometheus_client import CollectorRegistry, Metric

    from router.chooser import Choice, Routed
    from router.reply import Response
    from router.request import Request
    from router.trace import DecisionRecord

RECORDING_PATH: Final = "/admin/recording"
NEXT_HEADER: Final = "x-warmroute-next"
SINCE_HEADER: Final = "x-warmroute-since"
CONTENT_TYPE: Final = "application/zstd"
CHUNK_BYTES: Final = 512 * 1024
CHUNKS_LEAST: Final = 8
"""Of a small recording: what goes at once is an eighth of it at most."""
MAX_RECORD_BYTES: Final = 512 * 1024
LEAST_BYTES: Final = 1 << 20
TICK_S: Final = 1.0
LEVEL: Final = 3
_DIGITS: Final = 12
OWN_REASONS: Final = frozenset({"warm_up", "hand_over"})
"""Why requests were sent that no client asked for: no part of the traffic."""


class RecordingSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much memory the recording of the last requests may take, 1 MiB at least; 0: none."""

    max_bytes: Annotated[int, Meta(ge=0, le=1 << 32)] = 16 << 20


def recording_fault(settings: RecordingSettings) -> str | None:
    """Return what is wrong with the settings, beginning with the key; else None."""
    if 0 < settings.max_bytes < LEAST_BYTES:
        return f"max_bytes: expected 0 or at least {LEAST_BYTES}"
    return None


class Recorded(Struct, frozen=True, omit_defaults=True):
    """One request that was sent to a replica, made by place. Unknown is None.

    ``block_tokens`` are those of one id in a chain. ``reason`` and ``replica`` are of the last of
    ``attempts``; ``cached_tokens`` and ``output_tokens`` as the engine counted them. One of the
    router's own requests has one of ``OWN_REASONS``.
    """

    arrived_unix_s: float
    prompt_tokens: int
    replica: str
    reason: str
    predicted_cached_tokens: int
    status: int
    outcome: str
    duration_s: float
    ttft_s: float | None = None
    held_s: float = 0.0
    cached_tokens: int | None = None
    output_tokens: int | None = None
    attempts: int = 1
    model: str | None = None
    tenant: str | None = None
    settings_version: int = 0
    block_tokens: int | None = None
    prompts: tuple[LoggedPrompt, ...] = ()
    side: str | None = None


@dataclass(slots=True)
class _Chunk:
    """Some lines, compressed or about to be; ``last_unix_s`` is the latest arrival among them."""

    number: int
    last_unix_s: float
    lines: bytes
    is_packed: bool = False

    async def pack(self) -> None:
        if not self.is_packed:
            self.lines, self.is_packed = await asyncio.to_thread(_packed, self.lines), True


class Recording(Collector):
    """Takes requests that have ended; ``run`` compresses them and keeps the bound."""

    def __init__(self, settings: RecordingSettings, unix_clock: Callable[[], float]) -> None:
        self._max_bytes = settings.max_bytes
        self._chunk_bytes = min(CHUNK_BYTES, settings.max_bytes // CHUNKS_LEAST)
        self._unix_clock = unix_clock
        self._encode_into = msgspec.json.Encoder().encode_into
        self._pending = bytearray()
        self._last_unix_s = 0.0
        self._chunks: deque[_Chunk] = deque()
        self._number = 0
        """Of the chunk that the pending lines will be."""
        self._dropped = 0

    @property
    def held_bytes(self) -> int:
        """The memory that it takes."""
        return len(self._pending) + sum(len(chunk.lines) for chunk in self._chunks)

    def note(self, record: DecisionRecord, choice: Choice, routed: Routed) -> None:
        """Take a request that has ended; ``choice`` is its last one."""
        self.add(recorded(record, choice, routed))

    def add(self, one: Recorded) -> None:
        """Take one line."""
        pending, before = self._pending, len(self._pending)
        if before > self._max_bytes // 2:  # more in a tick than there is room for
            self._dropped += 1
            return
        try:
            self._encode_into(one, pending, -1)
        except ValueError:  # a name that is no Unicode
            del pending[before:]
        if not 0 < len(pending) - before <= min(MAX_RECORD_BYTES, self._max_bytes // 2):
            del pending[before:]
            self._dropped += 1
            return
        pending += b"\n"
        self._last_unix_s = max(self._last_unix_s, one.arrived_unix_s)

    async def run(self) -> None:
        """Compress what has come together, until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            await self.settle()

    async def settle(self) -> None:
        """Compress the pending lines where they are enough, and let the oldest chunks go."""
        if len(self._pending) >= self._chunk_bytes:
            chunk = self._pending_chunk()
            self._pending.clear()
            self._number, self._last_unix_s = self._number + 1, 0.0
            self._chunks.append(chunk)
            await chunk.pack()
        while self._chunks and self.held_bytes > self._max_bytes:
            self._chunks.popleft()

    async def chunk_from(self, number: int, since_unix_s: float) -> tuple[bytes, int | None]:
        """Return the first chunk from ``number`` on as a Zstandard frame, and the next number.

        Chunks without a request since ``since_unix_s`` are passed over. None: it was the last one.
        """
        for chunk in self._chunks:
            if chunk.number >= number and chunk.last_unix_s >= since_unix_s:
                found = _Chunk(chunk.number, chunk.last_unix_s, chunk.lines, chunk.is_packed)
                await found.pack()
                return found.lines, found.number + 1
        pending = self._pending_chunk()
        if number > pending.number or not pending.lines:
            return b"", None
        await pending.pack()
        return pending.lines, None

    async def answer(self, request: Request) -> Response:
        """Answer one chunk: ``?from=`` says which, ``?minutes=`` of which time."""
        query = parse_qs(request.target.partition("?")[2])
        minutes = _number(query, "minutes")
        since_unix_s = 0.0 if minutes is None else self._unix_clock() - 60.0 * minutes
        frame, following = await self.chunk_from(_number(query, "from") or 0, since_unix_s)
        headers = {SINCE_HEADER: str(since_unix_s)}
        if following is not None:
            headers[NEXT_HEADER] = str(following)
        return own_response(frame, CONTENT_TYPE, headers=headers)

    def collect(self) -> Iterable[Metric]:
        """Yield what it holds and what it could not take."""
        text = "Memory of the recording of the last requests."
        yield GaugeMetricFamily("warmroute_recording_bytes", text, value=float(self.held_bytes))
        text = "Requests that the recording could not take."
        yield CounterMetricFamily("warmroute_recording_dropped", text, value=float(self._dropped))

    def _pending_chunk(self) -> _Chunk:
        return _Chunk(self._number, self._last_unix_s, bytes(self._pending))


def open_recording(
    settings: RecordingSettings, registry: CollectorRegistry, unix_clock: Callable[[], float]
) -> Recording | None:
    """Return the recording that the settings leave room for; None where that is none."""
    if not settings.max_bytes:
        return None
    recording = Recording(settings, unix_clock)
    registry.register(recording)
    return recording


class RecordingDesk:
    """Answers operators, also that there is no recording."""

    def __init__(self, recording: Recording | None) -> None:
        self._recording = recording

    async def answer(self, request: Request) -> Response:
        """Answer a chunk of the recording."""
        if self._recording is None:
            message = "recording: there is none (recording.max_bytes of the configuration is 0)"
            raise NotFoundError(message)
        return await self._recording.answer(request)


def recorded(record: DecisionRecord, choice: Choice, routed: Routed) -> Recorded:
    """Return what is kept of a request."""
    block_tokens, prompts = logged_prompts(choice, routed) or (None, ())
    decision = choice.decision
    return Recorded(
        record.started_unix_s,
        record.prompt_tokens or record.reported_prompt_tokens or 0,
        decision.replica,
        decision.reason,  # a string itself
        decision.predicted_cached_tokens,
        record.status,
        record.outcome,
        record.duration_s,
        record.ttft_s,
        record.held_s,
        record.reported_cached_tokens,
        record.reported_output_tokens,
        len(record.attempts),
        record.model,
        record.tenant,
        record.settings_version,
        block_tokens,
        prompts,
        record.side,
    )


def _packed(lines: bytes) -> bytes:
    packed = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True).compress(lines)
    return bytes(memoryview(packed))  # a copy: the library's own takes what it might have needed


def _number(query: Mapping[str, list[str]], name: str) -> int | None:
    """Return a whole number of the query, None where it is not there."""
    if name not in query:
        return None
    text = query[name][0]
    if not text.isdecimal() or not text.isascii() or len(text) > _DIGITS:
        message = f"{name}: expected a whole number"
        raise ClientError(message, param=name)
    return int(text)
