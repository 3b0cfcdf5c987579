"""The log of decisions: what the policy saw, what it answered and what came of it, as JSON lines.

A record is encoded on the event loop, some 10 us, when its request has ended, and written by a
thread in chunks. Nothing waits for the disk: what it does not take in time is dropped and counted.
No prompt text, no tokens. ``replay.decision`` reads it.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import msgspec
from msgspec import Meta, Struct, structs
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from policies.draw import draw_below
from policies.model import Decision, ReplicaView, RoutingRequest
from router.adapter import announced_of
from router.log_file import LogFile
from router.outlook import BYTES_PER_TOKEN

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from prometheus_client import Metric

    from policies.model import Policy
    from router.chooser import Choice, DecidedBy, Routed
    from router.trace import DecisionRecord

_log = logging.getLogger(__name__)

VERSION: Final = 1
FLUSH_S: Final = 0.2
CHUNK_BYTES: Final = 64 * 1024
MAX_RECORD_BYTES: Final = 512 * 1024
MAX_QUEUED_BYTES: Final = 8 * 1024 * 1024
RETRY_S: Final = 5.0
"""How long a path that could not be written is left alone."""
CLOSE_S: Final = 5.0
"""How long the end of the process may wait for the disk."""
SAMPLE_STREAM: Final = 0x5A
"""The stream of draws that no policy uses."""
SAMPLE_STEPS: Final = 1 << 32


class DecisionLogSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where decisions are logged; not at all without ``path``.

    A file holds at most ``max_bytes``, and ``keep_files`` older ones stay beside it. ``sample`` is
    the share of requests that is logged. ``chains`` adds the ids of each prompt's blocks: with them
    the log is a trace to replay.
    """

    path: str | None = None
    max_bytes: Annotated[int, Meta(ge=1 << 20)] = 256 << 20
    keep_files: Annotated[int, Meta(ge=1, le=1_000)] = 4
    sample: Annotated[float, Meta(ge=0, le=1)] = 1.0
    chains: bool = False


class LogHeader(Struct, frozen=True, kw_only=True):
    """The first line of a file, and of each change: whose decisions follow, by which policy."""

    warmroute: str = "decisions"
    version: int = VERSION
    router: str
    policy: Any
    sample: float
    chains: bool
    started_unix_s: float
    settings_version: int = 0


class LoggedPrompt(Struct, frozen=True):
    """One prompt of a request: its tokens, and the 16-byte ids of its full blocks, joined."""

    tokens: int
    chain: bytes


class LoggedResult(Struct, frozen=True, kw_only=True):
    """How a request ended; tokens as the engine counted them. Unknown is None.

    ``held_s`` of the time it waited in the router.
    """

    status: int
    outcome: str
    ttft_s: float | None
    held_s: float
    duration_s: float
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None


class LoggedDecision(Struct, frozen=True, kw_only=True):
    """One decision. Only the last one of a request has a ``result``: that of the whole request.

    ``ended`` and ``error`` tell of this attempt. ``block_tokens`` are those of one id in a chain.
    ``settings_version`` is that of the header above it.
    """

    id: str
    arrived_unix_s: float
    attempt: int
    model: str | None
    is_exact: bool
    unroutable: str | None
    request: RoutingRequest
    views: tuple[ReplicaView, ...]
    decision: Decision
    ended: str
    error: str | None
    kv_source: str | None
    result: LoggedResult | None = None
    block_tokens: int | None = None
    prompts: tuple[LoggedPrompt, ...] | None = None
    settings_version: int = 0


class _Chunk(NamedTuple):
    """Lines to write; ``header`` is what stands above the first of them."""

    records: int
    lines: bytes
    header: bytes


class DecisionLog(Collector):
    """Takes records on the event loop; a thread of its own writes them, until it is closed."""

    def __init__(
        self,
        settings: DecisionLogSettings,
        path: Path,
        header: LogHeader,
        clock: Callable[[], float],
    ) -> None:
        self._header = header
        self._line = line = msgspec.json.encode(header) + b"\n"
        self._above = line
        self._decided_by: DecidedBy | None = None
        self._clock = clock
        self._path = path
        self._file = LogFile(path, line, settings.max_bytes, settings.keep_files)
        self._sample = settings.sample
        self._has_chains = settings.chains
        self._encode_into = msgspec.json.Encoder().encode_into
        self._pending = bytearray()
        self._pending_records = 0
        self._chunks: queue.SimpleQueue[_Chunk | None] = queue.SimpleQueue()
        # Each of these has one thread that changes it, so that none needs a lock.
        self._handed_bytes = 0
        self._dropped_here = 0
        self._settled_bytes = 0
        self._dropped_there = 0
        self._written = 0
        self._retry_at_s: float | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._write_all, name="decision-log", daemon=True)
        self._thread.start()
        self._chunks.put(_Chunk(0, b"", line))  # the header: a path of no use is told at the start

    @property
    def dropped(self) -> int:
        """Decisions that were not logged although they were to be."""
        return self._dropped_here + self._dropped_there

    @property
    def written(self) -> int:
        """Decisions that are in the file."""
        return self._written

    def collect(self) -> Iterable[Metric]:
        """Yield both counts in Prometheus form."""
        for name, text, count in (
            ("written", "Decisions written to the decision log.", self.written),
            ("dropped", "Decisions that the log could not take.", self.dropped),
        ):
            yield CounterMetricFamily(f"warmroute_decision_log_{name}", text, value=float(count))

    # On the event loop.

    def add(self, record: DecisionRecord, choices: Sequence[Choice], routed: Routed) -> None:
        """Log the decisions of a request that has ended: one for each attempt."""
        for number, choice in enumerate(choices, 1):
            request = choice.request
            if request is None or not self._is_sampled(request):
                continue
            if self._is_closed or self._backlog_bytes() > MAX_QUEUED_BYTES:
                self._dropped_here += 1
                continue
            decision = logged(record, number, choice, request)
            if self._has_chains:
                decision = with_chains(decision, choice, routed)
            if choice.decided_by is not self._decided_by and choice.decided_by is not None:
                self._follow(choice.decided_by)
            self._append(decision)

    async def run(self) -> None:
        """Hand over what waits, every ``FLUSH_S``, until cancelled."""
        while True:
            await asyncio.sleep(FLUSH_S)
            self._hand_over()

    async def close(self) -> None:
        """Write the rest, for at most ``CLOSE_S``; what comes later is dropped."""
        if self._is_closed:
            return
        self._hand_over()
        self._is_closed = True
        self._chunks.put(None)
        await asyncio.to_thread(self._thread.join, CLOSE_S)
        if self._thread.is_alive():
            _log.warning("decision log: %s did not take the rest in time", self._path)

    def _is_sampled(self, request: RoutingRequest) -> bool:
        if self._sample >= 1.0:
            return True
        return draw_below(SAMPLE_STEPS, request, SAMPLE_STREAM) < self._sample * SAMPLE_STEPS

    def _backlog_bytes(self) -> int:
        return len(self._pending) + self._handed_bytes - self._settled_bytes

    def _follow(self, decided_by: DecidedBy) -> None:
        """Let a header go before decisions by another rule, or by other settings.

        Requests end in another order than they were decided in: it may go to and fro for a while.
        """
        self._decided_by = decided_by
        header = structs.replace(
            self._header,
            policy=msgspec.to_builtins(decided_by.policy),
            settings_version=decided_by.settings_version,
        )
        line = msgspec.json.encode(header) + b"\n"
        if line != self._line:
            self._line = line
            self._pending += line

    def _append(self, decision: LoggedDecision) -> None:
        pending = self._pending
        before = len(pending)
        try:
            self._encode_into(decision, pending, -1)
        except ValueError:  # a name that is no Unicode
            del pending[before:]
        if not 0 < len(pending) - before <= MAX_RECORD_BYTES:
            del pending[before:]
            self._dropped_here += 1
            return
        pending += b"\n"
        self._pending_records += 1
        if len(pending) >= CHUNK_BYTES:
            self._hand_over()

    def _hand_over(self) -> None:
        if self._pending and not self._is_closed:
            chunk = _Chunk(self._pending_records, bytes(self._pending), self._above)
            self._above = self._line
            self._handed_bytes += len(chunk.lines)
            self._pending.clear()
            self._pending_records = 0
            self._chunks.put(chunk)

    # In the thread.

    def _write_all(self) -> None:
        while (chunk := self._chunks.get()) is not None:
            self._file.header = chunk.header
            if self._has_written(chunk.lines):
                self._written += chunk.records
            else:
                self._dropped_there += chunk.records
            self._settled_bytes += len(chunk.lines)
        self._file.close()

    def _has_written(self, lines: bytes) -> bool:
        """Write ``lines``; False where that is not possible, or was not a moment ago."""
        now_s = self._clock()
        if self._retry_at_s is not None and now_s < self._retry_at_s:
            return False
        try:
            self._file.write(lines)
        except OSError as error:
            if self._retry_at_s is None:
                told = error.strerror or error
                _log.warning("decision log: cannot write %s: %s; it is dropped", self._path, told)
            self._retry_at_s = now_s + RETRY_S
            return False
        if self._retry_at_s is not None:
            self._retry_at_s = None
            _log.info("decision log: %s can be written again", self._path)
        return True


def open_decision_log(
    settings: DecisionLogSettings,
    policy: Policy,
    router: str,
    *,
    clock: Callable[[], float],
    unix_s: float,
) -> DecisionLog | None:
    """Return the log of ``router`` that the settings ask for; None without a path."""
    if settings.path is None:
        return None
    header = LogHeader(
        router=router,
        policy=msgspec.to_builtins(policy),
        sample=settings.sample,
        chains=settings.chains,
        started_unix_s=unix_s,
    )
    return DecisionLog(settings, Path(settings.path), header, clock)


def logged(
    record: DecisionRecord, number: int, choice: Choice, request: RoutingRequest
) -> LoggedDecision:
    """Return what is logged of attempt ``number``, without chains."""
    attempt = record.attempts[number - 1]
    result = None
    if number == len(record.attempts):
        result = LoggedResult(
            status=record.status,
            outcome=record.outcome,
            ttft_s=record.ttft_s,
            held_s=record.held_s,
            duration_s=record.duration_s,
            prompt_tokens=record.reported_prompt_tokens,
            cached_tokens=record.reported_cached_tokens,
            output_tokens=record.reported_output_tokens,
        )
    return LoggedDecision(
        id=record.request_id,
        arrived_unix_s=record.started_unix_s,
        attempt=number,
        model=record.model,
        is_exact=record.is_exact,
        unroutable=record.unroutable,
        request=request,
        views=choice.views,
        decision=choice.decision,
        ended=attempt.outcome,
        error=attempt.error,
        kv_source=attempt.kv_source,
        result=result,
        settings_version=choice.decided_by.settings_version if choice.decided_by else 0,
    )


def with_chains(decision: LoggedDecision, choice: Choice, routed: Routed) -> LoggedDecision:
    """Return ``decision`` with the ids of the prompt's blocks on the chosen replica."""
    announced = announced_of(routed, choice.member) if routed.is_exact else None
    units = 1 if routed.is_exact else BYTES_PER_TOKEN
    for branch in routed.branches:
        if branch.announced == announced:
            prompts = zip(routed.prompt.prompts, branch.chains, strict=True)
            return structs.replace(
                decision,
                block_tokens=branch.identity.block_tokens // units,
                prompts=tuple(
                    LoggedPrompt(prompt.count // units, b"".join(chain))
                    for prompt, chain in prompts
                ),
            )
    return decision
