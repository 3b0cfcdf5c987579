"""The operators' listener of several processes: one address that answers for the whole.

What each process knows a part of is put together. What all know alike, and everything that changes
something, goes to the process that leads: the shared state tells the others.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs, urlencode

from msgspec import Struct, structs
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from router.admin import DECISIONS_DEFAULT
from router.billing import BILLING_PATH, BillingReport, TenantUse
from router.body import read_body
from router.canary_admin import CANARY_PATH, CanaryView
from router.config import LimitSettings
from router.diagnosis import DiagnosisReport
from router.error import OverloadedError
from router.header import header_value
from router.metrics import CONTENT_TYPE, OPEN_METRICS, OPEN_METRICS_TYPE
from router.operator import EXPLAIN_PATH, Explained
from router.page import Page
from router.recording import NEXT_HEADER, RECORDING_PATH
from router.replica_view import ReplicaView, RouterView
from router.reply import json_response, own_response
from router.shadow_policy import SHADOW_PATH, ShadowReport
from router.supervisor import whole
from router.supervisor.ask import ask
from router.supervisor.canary import canary
from router.supervisor.poll import DECISIONS_PATH, FRESH_S, SNAPSHOT_PATH
from router.trace import DecisionRecord
from router.trust import TrustReport
from router.warm_up import WARM_UP_PATH, WarmUpView, whole_warm_ups

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from prometheus_client import Metric

    from router.client import Answer as Answered
    from router.client import Handler
    from router.reply import Response
    from router.request import Request
    from router.supervisor.ask import Answer
    from router.supervisor.census import Census
    from router.supervisor.child import Child
    from router.supervisor.crew import Crew
    from router.supervisor.poll import Poll

PROCESSES_PATH: Final = "/admin/processes"
OK: Final = 200
CHUNKS_MOST: Final = 10_000_000
"""Chunks of the recording of one process, whose number is in front of theirs."""
FORWARDED: Final = (
    "/*",
    "/admin/scopes/{name}",
    "/admin/scopes/{name}/rotate",
    "/admin/settings/{version}",
    "/admin/replicas/{id}/drain",
    "/admin/replicas/{id}/undrain",
)
METHODS: Final = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")


class ProcessView(Struct, frozen=True, kw_only=True):
    """One process. ``leads``: it answers what only one answers."""

    process: int
    pid: int
    place: int
    accepts: bool
    leads: bool


class CrewMetrics(Collector):
    """What there is of processes, besides what they count themselves."""

    def __init__(self, accepting: Callable[[], int], restarts: Mapping[str, int]) -> None:
        self._accepting = accepting
        self._restarts = restarts

    def collect(self) -> Iterable[Metric]:
        """Yield how many there are, and how many were started again."""
        text = "Router processes that accept connections."
        yield GaugeMetricFamily("warmroute_processes", text, value=float(self._accepting()))
        text = "Processes that were started in place of another one, by why."
        family = CounterMetricFamily("warmroute_process_restarts", text, labels=["reason"])
        for reason, count in self._restarts.items():
            family.add_metric([reason], float(count))
        yield family


class Front:
    """Answers operators. ``listen`` is where clients reach the router."""

    def __init__(self, crew: Crew, poll: Poll, census: Census, listen: str, since: float) -> None:
        self._crew = crew
        self._poll = poll
        self._census = census
        self._listen = listen
        self._since_unix_s = since
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(census)
        self._registry.register(CrewMetrics(lambda: crew.accepting, crew.restarts))
        self.is_draining = False

    def routes(self) -> dict[str, Mapping[str, Handler]]:
        """Return the table of the operators' listener."""
        forward: dict[str, Handler] = dict.fromkeys(METHODS, self._forward)
        routes: dict[str, Mapping[str, Handler]] = dict.fromkeys(FORWARDED, forward)
        return {
            **routes,
            **Page().routes(),
            **self._poll.live.routes(),
            SNAPSHOT_PATH: {"GET": self._snapshot},
            "/admin/events": {"GET": self._events},
            PROCESSES_PATH: {"GET": self._processes},
            "/admin/replicas": {"GET": self._merging(list[ReplicaView], whole.replicas)},
            "/debug/replicas": {"GET": self._merging(list[ReplicaView], whole.replicas)},
            "/admin/router": {
                "GET": self._merging(RouterView, partial(whole.router, listen=self._listen))
            },
            "/admin/trust": {"GET": self._merging(TrustReport, whole.trust)},
            "/admin/diagnoses": {"GET": self._merging(DiagnosisReport, whole.diagnoses)},
            WARM_UP_PATH: {"GET": self._merging(WarmUpView, whole_warm_ups)},
            SHADOW_PATH: {"GET": self._merging(ShadowReport, whole.shadow)},
            BILLING_PATH: {"GET": self._merging(BillingReport, self._bill)},
            RECORDING_PATH: {"GET": self._recording},
            DECISIONS_PATH: {"GET": self._decisions},
            "/debug/decisions/{id}": {"GET": self._merging_found(DecisionRecord)},
            EXPLAIN_PATH: {"GET": self._merging_found(Explained)},
            "/livez": _both(self._livez),
            CANARY_PATH: {"GET": self._canary, "POST": self._forward},
            "/readyz": _both(self._readyz),
            "/metrics": _both(self.metrics),
        }

    async def metrics(self, request: Request) -> Response:
        """Answer the metrics of all processes together."""
        await self._poll.count()
        if OPEN_METRICS in (header_value(request.headers.received, b"accept") or b""):
            text: bytes = openmetrics.generate_latest(self._registry)  # type: ignore[no-untyped-call]
            return own_response(text, OPEN_METRICS_TYPE)
        return own_response(generate_latest(self._registry), CONTENT_TYPE)

    async def _livez(self, _: Request) -> Response:
        return own_response(b"ok\n", "text/plain; charset=utf-8")

    async def _readyz(self, _: Request) -> Response:
        """Answer 200 where a process is ready that takes connections."""
        told = [
            answer.decoded(dict[str, Any])
            for child, answer in await self._poll.everyone("/readyz")
            if child.is_accepting
        ]
        is_ready = any(one["ready"] for one in told) and not self.is_draining
        state: dict[str, Any] = {
            "ready": is_ready,
            "draining": self.is_draining,
            "processes": self._crew.accepting,
        }
        for key, merge in _READY.items():
            if told:
                state[key] = merge([one[key] for one in told])
        return json_response(state, status=OK if is_ready else 503)

    async def _processes(self, _: Request) -> Response:
        lead = self._crew.lead
        return json_response(
            [
                ProcessView(
                    process=child.number,
                    pid=child.pid,
                    place=child.place,
                    accepts=child.is_accepting,
                    leads=child is lead,
                )
                for child in self._crew.children()
            ]
        )

    async def _snapshot(self, request: Request) -> Response:
        await self._seen(FRESH_S)
        return await self._poll.live.snapshot(request)

    async def _events(self, request: Request) -> Answered:
        await self._seen(FRESH_S)
        told = await self._poll.everyone(f"{DECISIONS_PATH}?limit={DECISIONS_DEFAULT}")
        self._poll.told.records = _latest(told)
        return await self._poll.live.events(request)

    async def _seen(self, fresh_s: float) -> None:
        await self._poll.look(fresh_s)
        if not self._poll.has_seen:
            raise _nobody()

    # What is put together.

    def _merging(self, kind: Any, merge: Callable[[list[Any]], object]) -> Handler:
        """Return a handler that asks everyone the same and answers what ``merge`` makes of it."""

        async def answer(request: Request) -> Response:
            told = await self._asked(request.target)
            good = [one for _, one in told if one.status == OK]
            if not good:
                return told[0][1].response()
            return json_response(merge([one.decoded(kind) for one in good]))

        return answer

    def _merging_found(self, kind: Any) -> Handler:
        """Return a handler for one decision, of whichever process made it; the last one made."""

        async def answer(request: Request) -> Response:
            told = await self._asked(request.target)
            good = [one.decoded(kind) for _, one in told if one.status == OK]
            if not good:
                return told[0][1].response()
            return json_response(max(good, key=lambda one: _record(one).started_unix_s))

        return answer

    async def _canary(self, request: Request) -> Response:
        """Answer how a canary stands in all processes."""
        told = await self._asked(request.target)
        good = {child.number: one.decoded(CanaryView) for child, one in told if one.status == OK}
        if not good:
            return told[0][1].response()
        return json_response(canary(good))

    async def _decisions(self, request: Request) -> Response:
        told = await self._asked(request.target)
        good = [(child, one) for child, one in told if one.status == OK]
        if not good:
            return told[0][1].response()
        query = parse_qs(request.target.partition("?")[2])
        limit = int(query.get("limit", [str(DECISIONS_DEFAULT)])[0])
        return json_response(_latest(good)[:limit])

    async def _recording(self, request: Request) -> Response:
        """Answer a chunk of the recording of one process, and where the next one is."""
        query = {
            name: values[0] for name, values in parse_qs(request.target.partition("?")[2]).items()
        }
        told = query.get("from", "0")
        life, chunk = divmod(int(told) if told.isdecimal() else 0, CHUNKS_MOST)
        children = sorted(self._crew.children(), key=lambda child: child.life)
        children = [child for child in children if child.life >= life]
        if not children:
            raise _nobody()
        first = children[0]
        if told.isdecimal() and len(told) <= len(str(CHUNKS_MOST)) + 8:
            query["from"] = str(chunk if first.life == life else 0)
        answer = await ask(first.path, request, target=f"{RECORDING_PATH}?{urlencode(query)}")
        following = answer.header(NEXT_HEADER.encode())
        lines = tuple(line for line in answer.lines if line[0].lower() != NEXT_HEADER.encode())
        number = None
        if following is not None:
            number = first.life * CHUNKS_MOST + int(following)
        elif len(children) > 1:
            number = children[1].life * CHUNKS_MOST
        if number is not None and answer.status == OK:
            lines = (*lines, (NEXT_HEADER.encode(), str(number).encode()))
        return structs.replace(answer, lines=lines).response()

    def _bill(self, told: Sequence[BillingReport]) -> BillingReport:
        """Return what tenants got of all processes, also of those that ended."""
        ages = [one.held_age_s for one in told if one.held_age_s is not None]

        def counted(use: TenantUse, field: str) -> int:
            name = f"warmroute_cache_{field}_total"
            return round(self._census.count(name, (("tenant", use.tenant),)))

        return BillingReport(
            since_unix_s=self._since_unix_s,
            held_age_s=min(ages, default=None),
            tenants=[
                TenantUse(
                    tenant=use.tenant,
                    scope=use.scope,
                    requests=counted(use, "requests"),
                    hits=counted(use, "hits"),
                    unreported=counted(use, "unreported"),
                    prompt_tokens=counted(use, "prompt_tokens"),
                    saved_tokens=counted(use, "saved_tokens"),
                )
                for use in told[0].tenants
            ],
            scopes=max(told, key=lambda one: one.held_age_s is not None).scopes,
        )

    async def _asked(self, target: str) -> list[tuple[Child, Answer]]:
        if target.startswith(BILLING_PATH):
            await self._poll.count()
        told = await self._poll.everyone(target)
        if not told:
            raise _nobody()
        return told

    # What one process answers.

    async def _forward(self, request: Request) -> Response:
        body = await read_body(request, LimitSettings())
        child = self._crew.lead or next(iter(self._crew.children()), None)
        if child is None:
            raise _nobody()
        return (await ask(child.path, request, body)).response()


def _nobody() -> OverloadedError:
    return OverloadedError("no router process is ready yet")


def _both(handler: Handler) -> dict[str, Handler]:
    return {"GET": handler, "HEAD": handler}


def _record(found: DecisionRecord | Explained) -> DecisionRecord:
    return found.record if isinstance(found, Explained) else found


def _latest(told: Sequence[tuple[Child, Answer]]) -> list[DecisionRecord]:
    records: list[DecisionRecord] = []
    for _, answer in told:
        records += answer.decoded(list[DecisionRecord])
    return sorted(records, key=lambda one: one.started_unix_s, reverse=True)


def _least_known(rungs: list[str]) -> str:
    names = [rung.value for rung in whole.RUNGS]
    return max(rungs, key=names.index)


def _most_loaded(rungs: list[str]) -> str:
    return max(rungs, key=whole.load_order)


_READY: Final[dict[str, Callable[[list[Any]], object]]] = {
    "replicas_up": max,
    "replicas": max,
    "rung": _least_known,
    "state_age_s": max,
    "overload": _most_loaded,
    "inflight": sum,
    "places": sum,
    "waiting": sum,
}
