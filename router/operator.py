"""What operators look at while the router runs, built from its parts: page, events, snapshots."""

from __future__ import annotations

import time
from importlib import metadata
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from msgspec import Struct

from router.error import NotFoundError
from router.explanation import headline
from router.live import Live
from router.page import Page
from router.recording import RECORDING_PATH, RecordingDesk
from router.reply import json_response
from router.shadow_policy import SHADOW_PATH, ShadowDesk
from router.snapshot import SnapshotParts, Snapshots
from router.trace import DecisionRecord
from router.warm_up import WarmUpDesk

if TYPE_CHECKING:
    from collections.abc import Mapping

    from router.app import App
    from router.client import Handler
    from router.history import History
    from router.reply import Response
    from router.request import Request
    from router.trace import DecisionTrace

EXPLAIN_PATH = "/admin/explain"


class Explained(Struct, frozen=True, kw_only=True):
    """One decision in words and in numbers."""

    lines: list[str]
    record: DecisionRecord


class Explain:
    """Answers ``?request=ID`` with what ``warmroute explain`` says."""

    def __init__(self, trace: DecisionTrace) -> None:
        self._trace = trace

    async def answer(self, request: Request) -> Response:
        """Answer one decision by request id, the router's or the client's."""
        query = parse_qs(request.target.partition("?")[2])
        record = self._trace.find(query.get("request", [""])[0])
        if record is None:
            message = "request id: not among the decisions kept"
            raise NotFoundError(message)
        return json_response(Explained(lines=headline(record), record=record))


def open_live(app: App, history: History) -> Live:
    """Return what tells operators of ``app`` as it happens; it runs beside the router."""
    clock = time.monotonic
    quotas, hold = app.quotas, app.hold
    parts = SnapshotParts(
        view=app.view,
        fleet=app.fleet,
        registered=app.reader.replicas,
        heat=app.know.heat,
        diagnoses=app.feedback.diagnoses,
        history=history,
        clock=clock,
        unix_clock=time.time,
        version=_version(),
        tenants=[tenant.name for tenant in app.config.tenants],
        tenant_inflight=quotas.inflight if quotas is not None else None,
        is_draining=lambda: app.admin.is_draining,
        open_requests=lambda: app.proxy.open_requests,
        held_requests=hold.__len__ if hold is not None else int,
        replica_connections=lambda: app.pool.open_connections,
        loop_lag_s=lambda: app.upkeep.loop_lag_s,
        warm_up=lambda one: "" if app.warm_ups is None else app.warm_ups.told(one),
        canary=lambda: None if app.settings is None else app.settings.canary_row(),
    )

    def sample() -> tuple[int, float]:
        return app.proxy.open_requests, app.upkeep.loop_lag_s

    return Live(history, Snapshots(parts), app.trace, sample, clock)


def page_routes(app: App) -> dict[str, Mapping[str, Handler]]:
    """Return the operators' paths that a browser asks for, and ``warmroute top``."""
    explain = Explain(app.trace)
    return {
        **Page().routes(),
        **app.live.routes(),
        EXPLAIN_PATH: {"GET": explain.answer},
        RECORDING_PATH: {"GET": RecordingDesk(app.recording).answer},
        SHADOW_PATH: {"GET": ShadowDesk(app.shadow).answer},
        **WarmUpDesk(app.warm_ups).routes(),
    }


def _version() -> str:
    try:
        return metadata.version("warmroute")
    except metadata.PackageNotFoundError:
        return "not installed"
