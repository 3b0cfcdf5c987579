"""What a process tells its supervisor of itself, besides what operators see of any router."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qs

import msgspec
from msgspec import Struct

from router.error import ClientError
from router.history import PREFIXES_MOST, TENANTS_MOST
from router.live import DECISIONS_PER_S, chosen_of
from router.reply import own_response
from router.sums import Batch
from router.supervisor.census import taken
from router.trace import DecisionRecord

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from router.app import App
    from router.client import Handler
    from router.history import History
    from router.reply import Response
    from router.request import Request

METRICS_PATH: Final = "/process/metrics"
PULSE_PATH: Final = "/process/pulse"
WATCHED: Final = "watched"
ARRIVED: Final = "arrived"
PACKED: Final = "application/vnd.msgpack"


class Pulse(Struct, frozen=True):
    """What happened since the last one that arrived, and what is open now.

    ``number`` counts pulses; whoever asks for the next one says which it has. ``unseen`` is what
    pulse ``number`` had, in the last words of a process that does not know whether it arrived.
    ``decisions`` are some of those that ended, of as many as ``left_out`` more: none of them where
    nobody watches.
    """

    number: int
    batch: Batch
    open_requests: int
    loop_lag_s: float
    decisions: tuple[DecisionRecord, ...] = ()
    left_out: int = 0
    unseen: Batch | None = None


_decoder: msgspec.msgpack.Decoder[Pulse] = msgspec.msgpack.Decoder(Pulse)


def read_pulse(data: bytes) -> Pulse:
    """Return what another process told; raises msgspec.DecodeError."""
    return _decoder.decode(data)


class PulseDesk:
    """Answers the supervisor of one process."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._history: History = app.history
        self._history.untold = Batch()
        self._seen: list[DecisionRecord] = []
        self._left_out = 0
        self._number = 0
        self._sent = Batch()
        """What pulse ``_number`` had; told again unless it arrived."""

    def routes(self) -> dict[str, Mapping[str, Handler]]:
        """Return the paths, for the supervisor alone."""
        return {METRICS_PATH: {"GET": self._metrics}, PULSE_PATH: {"GET": self._pulse}}

    def metrics(self) -> bytes:
        """Return the samples of this process."""
        return taken(self._app.metrics.registry)

    def pulse(self, arrived: int) -> bytes:
        """Return what was not told yet, to whom pulse ``arrived`` was the last one."""
        history = self._history
        history.fold()
        batch, history.untold = history.untold or Batch(), Batch()
        if arrived != self._number:
            batch.merge(self._sent, TENANTS_MOST, PREFIXES_MOST)
        self._number, self._sent = self._number + 1, batch
        seen, self._seen = tuple(self._seen), []
        left_out, self._left_out = self._left_out, 0
        return msgspec.msgpack.encode(
            Pulse(
                number=self._number,
                batch=batch,
                open_requests=self._app.proxy.open_requests,
                loop_lag_s=self._app.upkeep.loop_lag_s,
                decisions=seen,
                left_out=left_out,
            )
        )

    def last_words(self) -> bytes:
        """Return the rest, and what may not have arrived."""
        self._history.fold()
        return msgspec.msgpack.encode(
            Pulse(
                number=self._number,
                batch=self._history.untold or Batch(),
                open_requests=0,
                loop_lag_s=0.0,
                unseen=self._sent,
            )
        )

    async def _metrics(self, _: Request) -> Response:
        return own_response(self.metrics(), PACKED)

    async def _pulse(self, request: Request) -> Response:
        query = parse_qs(request.target.partition("?")[2])
        watched, arrived = query.get(WATCHED, ["0"])[0], query.get(ARRIVED, ["0"])[0]
        if watched not in {"0", "1"}:
            message = f"{WATCHED}: expected 0 or 1"
            raise ClientError(message, param=WATCHED)
        if not arrived.isdecimal():
            message = f"{ARRIVED}: expected a whole number"
            raise ClientError(message, param=ARRIVED)
        self._history.on_records = self._pick if watched == "1" else None
        return own_response(self.pulse(int(arrived)), PACKED)

    def _pick(self, records: Sequence[DecisionRecord]) -> None:
        chosen = chosen_of(records, max(0, DECISIONS_PER_S - len(self._seen)))
        self._seen += chosen
        self._left_out += len(records) - len(chosen)
