"""Gathers what the doctor judges: asks the router, the state store and the engines.

Nobody needs to answer: what could not be asked is noted, and what was named and does not answer is
a finding of its own.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from msgspec import Struct, structs

from router.diagnosis import Diagnosis, DiagnosisReport
from router.replica_view import ReplicaView, RouterView
from sidecar.scrape import EngineClient, EngineError
from state.facts import facts_of
from state.model import UNIX_SCHEME
from warmroute.admin_client import AdminClient, AdminError, session
from warmroute.cli import UsageError
from warmroute.doctor_case import Case, Code, EngineReport, Finding, ReplicaCase, Unchecked
from warmroute.doctor_engine import examine_engine
from warmroute.doctor_probe import (
    ProbeFailedError,
    has_been_told,
    predicted_tokens,
    probe_body,
    probe_engine,
    probe_router,
)
from warmroute.doctor_state import StateReport, StateUnreachableError, examine_state
from warmroute.doctor_text import found
from warmroute.doctor_tokens import CannotCompareError, check_tokens
from warmroute.engine_look import is_loopback
from warmroute.tls_option import told_tls

if TYPE_CHECKING:
    from collections.abc import Mapping

    import aiohttp

    from warmroute.doctor_case import ProbeResult, TokenCheck

ENGINE_S: Final = 5.0
MOST_REPLICAS: Final = 64
DEFAULT_BLOCK: Final = 64
ROUTER_KEY_VARIABLE: Final = "WARMROUTE_API_KEY"
_ANY_HOSTS: Final = ("0.0.0.0", "[::]")  # noqa: S104 - compared, not bound


class DoctorSettings(Struct, frozen=True, kw_only=True):
    """What the flags and the environment say. Addresses are ``http://host:port``."""

    admin: str
    is_admin_given: bool = False
    replicas: tuple[str, ...] = ()
    redis: str | None = None
    models: dict[str, str] = {}
    does_probe: bool = False
    engine_key: str | None = None
    router_key: str | None = None

    def __repr__(self) -> str:
        """Leave out what may hold secrets."""
        return f"DoctorSettings(admin={self.admin!r}, replicas={self.replicas!r})"


@dataclass(slots=True)
class _Known:
    """What the router and the store told."""

    router: RouterView | None = None
    views: list[ReplicaView] = field(default_factory=list)
    diagnoses: tuple[Diagnosis, ...] = ()
    state: StateReport | None = None
    findings: list[Finding] = field(default_factory=list)
    unchecked: list[Unchecked] = field(default_factory=list)

    def skip(self, what: str, why: str) -> None:
        """Note what was not checked."""
        note = Unchecked(what=what, why=why)
        if note not in self.unchecked:
            self.unchecked.append(note)


async def gather(settings: DoctorSettings) -> Case:
    """Ask everybody; raises UsageError where there is nobody to ask."""
    known = _Known()
    async with AsyncExitStack() as stack:
        router_headers = _bearer(settings.router_key)
        http = await stack.enter_async_context(session(at=settings.admin))
        admin = AdminClient(http, settings.admin)
        await _ask_router(settings, admin, known)
        await _ask_state(settings, known)
        cases = _replicas(settings, known)
        if not cases:
            _refuse(settings, known)
        engines = await stack.enter_async_context(session(_bearer(settings.engine_key)))
        examined: dict[str, EngineReport | None] = {}
        for index, case in enumerate(cases):
            if case.url not in examined:
                examined[case.url] = await _ask_engine(settings, case, known)
            engine = examined[case.url]
            cases[index] = structs.replace(
                case, engine=engine, tokens=await _tokens(settings, engines, case, engine, known)
            )
        if settings.does_probe:
            clients = await stack.enter_async_context(session(router_headers))
            if known.router is not None and known.router.has_tenants:
                await _probe_tenant(admin, clients, cases, known)
            else:
                for index, case in enumerate(cases):
                    probe = await _probe(admin, (engines, clients), case, known)
                    cases[index] = structs.replace(case, probe=probe)
    return Case(
        replicas=tuple(cases),
        router=known.router,
        fleet=tuple(known.views),
        diagnoses=known.diagnoses,
        has_state=known.state is not None,
        findings=tuple(known.findings),
        unchecked=tuple(known.unchecked),
    )


def _bearer(key: str | None) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


async def _ask_router(settings: DoctorSettings, admin: AdminClient, known: _Known) -> None:
    try:
        known.router = await admin.get("/admin/router", RouterView)
        known.views = await admin.get("/admin/replicas", list[ReplicaView])
    except AdminError as error:
        known.router = None
        if settings.is_admin_given:
            known.findings.append(
                found(
                    Code.ROUTER_UNREACHABLE,
                    None,
                    seen=f"{error}.",
                    fix="warmroute doctor --admin URL with the address of its admin listener",
                )
            )
        else:
            known.skip("the router's side", str(error))
        return
    report = await admin.find("/admin/diagnoses", DiagnosisReport)
    if report is not None:
        known.diagnoses = report.active


async def _ask_state(settings: DoctorSettings, known: _Known) -> None:
    if settings.redis is None:
        if known.router is None:
            known.skip("sidecars", "neither a router nor --redis tells of them")
        return
    try:
        known.state = await examine_state(settings.redis)
    except ValueError as error:
        message = f"--redis: {error}"
        raise UsageError(message) from None
    except StateUnreachableError as error:
        known.findings.append(
            found(
                Code.STATE_UNREACHABLE,
                None,
                seen=f"{error}.",
                fix="start the store, or give its URL: warmroute doctor --redis URL",
            )
        )


def _replicas(settings: DoctorSettings, known: _Known) -> list[ReplicaCase]:
    """Return who is to be examined: those that were named, else all that anybody knows."""
    state = known.state
    cases: dict[str, ReplicaCase] = {}
    for view in known.views:
        cases[view.replica] = ReplicaCase(
            name=view.replica, url=view.endpoint, view=view, facts=view.facts
        )
    for name, record in state.records.items() if state is not None else ():
        case = cases.get(name) or ReplicaCase(name=name, url=record.endpoint)
        facts = case.facts or (facts_of(record, state.facts) if state is not None else None)
        cases[name] = structs.replace(case, record=record, facts=facts)
    join_views(cases)
    if not settings.replicas:
        more = len(cases) - MOST_REPLICAS
        if more > 0:
            known.skip(f"{more} more replicas", "name them with --replica URL")
        return list(cases.values())[:MOST_REPLICAS]
    chosen = []
    for url in settings.replicas:
        ours = [case for case in cases.values() if case.url == url]
        chosen += ours or [ReplicaCase(name=url.partition("//")[2] or url, url=url)]
    return chosen


def join_views(cases: dict[str, ReplicaCase]) -> None:
    """Let a replica that the router was configured with, and its record elsewhere, be one."""
    twins = {
        case.url: case
        for case in cases.values()
        if case.view is not None and not case.view.registered
    }
    for case in [case for case in cases.values() if case.view is None]:
        twin = twins.get(case.url)
        if twin is not None:  # ranks of one engine have one
            cases.pop(twin.name, None)
            cases[case.name] = structs.replace(case, view=twin.view)


def _refuse(settings: DoctorSettings, known: _Known) -> None:
    if known.router is not None or known.findings or known.state is not None:
        known.skip("replicas", "nobody knows of any: name one with --replica URL")
        return
    message = (
        f"nobody to ask: no router answers at {settings.admin} (--admin), and no --replica is named"
    )
    raise UsageError(message)


async def _ask_engine(
    settings: DoctorSettings, case: ReplicaCase, known: _Known
) -> EngineReport | None:
    try:
        async with EngineClient(
            case.url, api_key=settings.engine_key, timeout_s=ENGINE_S, tls=told_tls()
        ) as client:
            return await examine_engine(client)
    except EngineError as error:
        is_named = case.url in settings.replicas
        is_down = case.view is None or not case.view.up
        if is_named or is_down:
            known.findings.append(
                found(
                    Code.ENGINE_UNREACHABLE,
                    case.name,
                    seen=f"{case.url}: {error}.{_as_the_router_sees(case)}",
                    fix=f"check that the engine runs: curl {case.url}/health",
                )
            )
        else:
            known.skip(f"the engine of {case.name}", f"{case.url}: {error}")
        return None


def _as_the_router_sees(case: ReplicaCase) -> str:
    fault = case.view.fault if case.view is not None else None
    return "" if fault is None else f" The router: {fault}."


async def _tokens(
    settings: DoctorSettings,
    http: aiohttp.ClientSession,
    case: ReplicaCase,
    engine: EngineReport | None,
    known: _Known,
) -> tuple[TokenCheck, ...]:
    if engine is None:
        return ()
    directories = _directories(settings, known)
    checks = []
    for model in engine.models:
        if model not in directories:
            continue
        try:
            checks.append(await check_tokens(http, case.url, model, directories[model]))
        except CannotCompareError as error:
            known.skip(f"the tokens of {model} on {case.name}", str(error))
    return tuple(checks)


def _directories(settings: DoctorSettings, known: _Known) -> Mapping[str, str]:
    """Return where the router's own files are, by model, as far as they are on this host."""
    models = known.router.models if known.router is not None else ()
    told = {model.name: model.tokenizer for model in models if model.tokenizer is not None}
    return {**told, **settings.models}


async def _probe(
    admin: AdminClient,
    sessions: tuple[aiohttp.ClientSession, aiohttp.ClientSession],
    case: ReplicaCase,
    known: _Known,
) -> ProbeResult | None:
    """Send one prompt twice, and ask the router what it would have expected."""
    engines, clients = sessions
    engine, router = case.engine, known.router
    if engine is None or not engine.models:
        return None
    block_tokens = (case.facts.block_tokens if case.facts is not None else None) or DEFAULT_BLOCK
    body = probe_body(engine.models[0], block_tokens)
    client_url = _client_url(router, admin.base) if router is not None else None
    try:
        rank = case.view.rank if case.view is not None else None
        result = await probe_engine(engines, case.url, body, rank)
        if router is None or client_url is None or case.view is None:
            return result
        await has_been_told(admin, case.name, case.view.resident_blocks)
    except ProbeFailedError as error:
        known.skip(f"a probe of {case.name}", str(error))
        return None
    try:
        predicted = await predicted_tokens(clients, client_url, admin, body, case.name)
    except ProbeFailedError as error:
        known.skip(f"what the router expected of {case.name}", str(error))
        return result
    return structs.replace(result, predicted_tokens=predicted)


async def _probe_tenant(
    admin: AdminClient, clients: aiohttp.ClientSession, cases: list[ReplicaCase], known: _Known
) -> None:
    """Send one prompt twice as a tenant: other requests would not share its prefixes."""
    model = next((name for case in cases if case.engine for name in case.engine.models), None)
    url = _client_url(known.router, admin.base) if known.router is not None else None
    if model is None or url is None:
        return
    try:
        replica, probe = await probe_router(clients, url, admin, probe_body(model, DEFAULT_BLOCK))
    except ProbeFailedError as error:
        known.skip("a probe", f"{error} (tenants: the key of one in {ROUTER_KEY_VARIABLE})")
        return
    for index, case in enumerate(cases):
        if case.name == replica:
            cases[index] = structs.replace(case, probe=probe)


def _client_url(router: RouterView, admin: str) -> str | None:
    """Return where clients reach the router, seen from here; None where that cannot be done."""
    url = router.listen
    if url is not None and url.startswith(UNIX_SCHEME):
        return None
    if url is not None and is_loopback(url) and not is_loopback(admin):
        return None  # of its own host
    for host in _ANY_HOSTS if url is not None else ():
        if url is not None and f"//{host}:" in url:
            own = admin.partition("//")[2].rpartition(":")[0]
            return url.replace(f"//{host}:", f"//{own}:")
    return url
