"""The operator's paths: liveness, readiness, metrics, models, replicas, decisions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

from router.error import ClientError, NotFoundError
from router.header import header_value
from router.metrics import CONTENT_TYPE, OPEN_METRICS, OPEN_METRICS_TYPE
from router.reply import json_response, own_response
from router.server import LOAD_PATHS, PREFIX_PATHS

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from router.client import Handler
    from router.entrance import AdmissionView
    from router.feedback import Feedback
    from router.fleet import FleetTable
    from router.health import Health
    from router.metrics import Metrics
    from router.proxy import Proxy
    from router.replica_view import FleetView
    from router.reply import Response
    from router.request import Request
    from router.trace import DecisionTrace
    from state.store import FleetReader

DECISIONS_DEFAULT = 20
DECISIONS_MOST = 1_000
LIMIT_DIGITS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminParts:
    """What the operator's paths show."""

    reader: FleetReader
    fleet: FleetTable
    health: Health
    trace: DecisionTrace
    metrics: Metrics
    view: FleetView
    feedback: Feedback
    admission: Callable[[], AdmissionView]


class Admin:
    """Handlers that answer from memory; none waits for anything."""

    def __init__(self, parts: AdminParts) -> None:
        self._parts = parts
        self.is_draining = False

    async def livez(self, _: Request) -> Response:
        """Answer that the process runs and its event loop turns."""
        return own_response(b"ok\n", "text/plain; charset=utf-8")

    async def readyz(self, _: Request) -> Response:
        """Answer 200 when requests can be served: not draining, and some replica is up."""
        parts = self._parts
        members = parts.fleet.members().values()
        up = sum(parts.health.is_up(m.replica) and not m.is_draining for m in members)
        is_ready = up > 0 and not self.is_draining
        rung, age_s = parts.reader.freshness()
        load = parts.admission()
        state = {
            "ready": is_ready,
            "draining": self.is_draining,
            "replicas_up": up,
            "replicas": len(members),
            "rung": rung.value,
            "state_age_s": round(age_s, 3),
            "overload": load.rung,
            "inflight": load.inflight,
            "places": load.places,
            "waiting": load.waiting,
        }
        return json_response(state, status=200 if is_ready else 503)

    async def metrics(self, request: Request) -> Response:
        """Answer the metrics in Prometheus text form, or as OpenMetrics where that is accepted."""
        metrics = self._parts.metrics
        if OPEN_METRICS in (header_value(request.headers.received, b"accept") or b""):
            return own_response(metrics.render_open(), OPEN_METRICS_TYPE)
        return own_response(metrics.render(), CONTENT_TYPE)

    async def models(self, _: Request) -> Response:
        """Answer the models of all live replicas, merged, in the OpenAI shape."""
        parts = self._parts
        names = sorted(parts.fleet.live_models(parts.health))
        cards = [
            {"id": name, "object": "model", "created": 0, "owned_by": "warmroute"} for name in names
        ]
        return json_response({"object": "list", "data": cards})

    async def replicas(self, _: Request) -> Response:
        """Answer every replica with what the router knows of it."""
        return json_response(self._parts.view.replicas())

    async def router(self, _: Request) -> Response:
        """Answer what the router itself is told, and how good its knowledge is."""
        return json_response(self._parts.view.router())

    async def trust(self, _: Request) -> Response:
        """Answer how far predictions come true, by replica and by tenant."""
        return json_response(self._parts.feedback.report())

    async def diagnoses(self, _: Request) -> Response:
        """Answer why predictions fail, where they do."""
        return json_response(self._parts.feedback.diagnoses.report())

    async def decisions(self, request: Request) -> Response:
        """Answer the last decisions, newest first; ``?limit=`` says how many."""
        query = parse_qs(request.target.partition("?")[2])
        limit = query.get("limit", [str(DECISIONS_DEFAULT)])[0]
        is_short_number = limit.isdecimal() and len(limit) <= LIMIT_DIGITS
        if not is_short_number or not 1 <= int(limit) <= DECISIONS_MOST:
            message = f"limit: expected 1 to {DECISIONS_MOST}"
            raise ClientError(message, param="limit")
        return json_response(list(self._parts.trace.latest(int(limit))))

    async def decision(self, request: Request) -> Response:
        """Answer one decision by request id (the router's or the client's)."""
        request_id = request.path.rpartition("/")[2]
        record = self._parts.trace.find(request_id)
        if record is None:
            message = "request id: not among the decisions kept"
            raise NotFoundError(message)
        return json_response(record)


def client_routes(
    proxy: Proxy, admin: Admin, paths: Collection[str] = ()
) -> dict[str, Mapping[str, Handler]]:
    """Return the table of the listener that clients use; ``paths`` are passed through too."""
    routes: dict[str, Mapping[str, Handler]] = {
        path: {"POST": proxy.handle} for path in PREFIX_PATHS | LOAD_PATHS | set(paths)
    }
    routes["/v1/models"] = {"GET": admin.models, "HEAD": admin.models}
    return routes | probe_routes(admin)


def probe_routes(admin: Admin) -> dict[str, Mapping[str, Handler]]:
    """Return the paths that both listeners answer."""
    return {
        "/livez": {"GET": admin.livez, "HEAD": admin.livez},
        "/readyz": {"GET": admin.readyz, "HEAD": admin.readyz},
        "/metrics": {"GET": admin.metrics, "HEAD": admin.metrics},
    }


def admin_routes(admin: Admin) -> dict[str, Mapping[str, Handler]]:
    """Return the table of the operator's listener."""
    return {
        "/admin/replicas": {"GET": admin.replicas},
        "/admin/router": {"GET": admin.router},
        "/admin/trust": {"GET": admin.trust},
        "/admin/diagnoses": {"GET": admin.diagnoses},
        "/debug/replicas": {"GET": admin.replicas},
        "/debug/decisions": {"GET": admin.decisions},
        "/debug/decisions/{id}": {"GET": admin.decision},
        **probe_routes(admin),
    }
