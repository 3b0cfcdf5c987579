"""One router process: its parts are built, its listeners opened, it serves, drains and ends."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import secrets
import signal
import sys
import time
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from prompt.codec import load_codec
from prompt.model import CodecLoadError
from router.access_log import open_access_log
from router.admin import client_routes
from router.allocator import keep_large_blocks
from router.app import App
from router.capacity import ShortageLog, capacity_of, open_files_most
from router.config import ConfigError
from router.decision_log import open_decision_log
from router.drain import Stop, drain
from router.epoch import open_scopes
from router.gate import load_secret
from router.lifecycle import Lifecycle
from router.listener import Listener
from router.openapi import with_document
from router.origin import open_guard
from router.sealed_state import open_seals
from router.setting_life import SettingLife
from router.state_reader import enter_reader
from router.supervisor.pulse import PulseDesk
from router.supervisor.share import share_of
from router.tls import listener_contexts, watch_tls
from router.tracing import open_tracing
from router.upkeep import supervise
from router.warm_open import enter_warm_ups
from state.address import redact
from state.embedded import EmbeddedValkey
from state.mirror import Mirror

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping
    from contextlib import AbstractAsyncContextManager

    from prompt.codec import Codec
    from router.access_log import AccessLog
    from router.config import Config
    from router.decision_log import DecisionLog
    from router.supervisor.listener import SharedListener
    from router.supervisor.seat import Seat
    from router.tls import ListenerContext
    from router.tracing import Tracing

    Beside = Callable[[App, str], AbstractAsyncContextManager[object]]

_log = logging.getLogger(__name__)

GC_THRESHOLDS: Final = (10_000, 10, 10)
"""A request makes some 500 objects, hardly any of them in cycles: looked at less often."""
SWITCH_S: Final = 0.0005
"""How long a thread that tokenizes a long prompt may keep the event loop waiting."""


class Served(Struct, frozen=True, kw_only=True):
    """Where a running router can be reached, and its state server, without credentials."""

    url: str
    admin_url: str | None
    state_url: str | None


def load_codecs(config: Config) -> dict[str, Codec]:
    """Return the codec of each configured model; raises ConfigError."""
    codecs: dict[str, Codec] = {}
    for index, model in enumerate(config.models):
        if model.tokenizer is None:
            continue
        try:
            codecs[model.name] = load_codec(Path(model.tokenizer))
        except CodecLoadError as error:
            message = f"models[{index}].tokenizer: {error}"
            raise ConfigError(message) from None
    return codecs


async def serve(
    config: Config,
    ready: Callable[[Served], None],
    beside: Beside | None = None,
    seat: Seat | None = None,
) -> None:
    """Run a router until SIGTERM or SIGINT, then drain; ``ready`` is called once it listens.

    ``beside`` makes what runs as long as the router does, of its parts and the state's URL.
    ``seat`` is what a supervisor gives to one process of several. Raises ConfigError for what only
    starting shows: a tokenizer, an address, a state URL.
    """
    codecs = load_codecs(config)
    secret = load_secret(config)
    async with AsyncExitStack() as stack:
        decisions, access = _enter_logs(stack, share_of(config))
        contexts = listener_contexts(config)
        clients, operators = _enter_listeners(stack, config, contexts, seat)
        state_url = config.state.redis if seat is None else seat.state_url
        if state_url is None:
            state_url = (await stack.enter_async_context(EmbeddedValkey())).url
        scopes = open_scopes(config, secret, state_url, time.monotonic)
        guard = open_seals(config, secret)
        reader = await enter_reader(stack, state_url, config.state.lookup, scopes, guard)
        if isinstance(reader, Mirror):
            reader.limit_memory(config.state.mirror_bytes)
        app = App(config, codecs, reader, decisions, secret, scopes)
        app.log_access(access)
        app.trace_requests(_enter_tracing(stack, share_of(config)))
        app.tls = watch_tls(contexts, app.pool.tls)
        app.metrics.registry.register(app.tls)
        if scopes is not None:
            app.lifecycle = await stack.enter_async_context(Lifecycle(app, scopes))
        enter_warm_ups(stack, app, state_url)
        app.settings = await stack.enter_async_context(SettingLife(app, state_url))
        stack.push_async_callback(app.pool.close)
        stack.push_async_callback(app.resilience.close)
        stack.push_async_callback(app.tokens.close)
        stack.callback(app.prompts.close)
        if beside is not None:
            await stack.enter_async_context(beside(app, state_url))
        app.view.listen = clients.url
        served = Served(
            url=clients.url,
            admin_url=None if operators is None else operators.url,
            state_url=redact(state_url),
        )
        await _serve_until_told(app, clients, operators, lambda: ready(served), seat)


def _enter_listeners(
    stack: AsyncExitStack,
    config: Config,
    contexts: Mapping[str, ListenerContext],
    seat: Seat | None,
) -> tuple[Listener | SharedListener, Listener | None]:
    """Open the listeners; the stack closes them. Raises ConfigError."""
    mode = int(config.socket_mode, 8)
    clients: Listener | SharedListener
    operators = None
    if seat is not None:
        clients, operators = seat.clients(contexts.get("listen")), seat.operators()
    else:
        clients = Listener("listen", config.listen, contexts.get("listen"), mode)
        if config.admin is not None:
            stack.push_async_callback(clients.close)
            operators = Listener("admin", config.admin, contexts.get("admin"), mode)
    stack.push_async_callback(clients.close)
    if operators is not None:
        stack.push_async_callback(operators.close)
    return clients, operators


def _enter_logs(
    stack: AsyncExitStack, config: Config
) -> tuple[DecisionLog | None, AccessLog | None]:
    """Open the logs that are configured; the stack closes them. Raises ConfigError."""
    for key, path in (
        ("decisions.path", config.decisions.path),
        ("access_log.path", config.access_log.path),
    ):
        if path is not None and _is_directory(path):
            message = f"{key}: expected a file, {path} is a directory"
            raise ConfigError(message)
    decisions = open_decision_log(
        config.decisions,
        config.policy,
        secrets.token_hex(6),
        clock=time.monotonic,
        unix_s=time.time(),
    )
    if decisions is not None:
        stack.push_async_callback(decisions.close)
    access = open_access_log(config.access_log, clock=time.monotonic, rng=random.SystemRandom())
    if access is not None:
        stack.push_async_callback(access.lines.close)
    return decisions, access


def _is_directory(path: str) -> bool:
    with suppress(OSError):  # the log itself tells of what cannot be reached
        return Path(path).is_dir()
    return False


def _enter_tracing(stack: AsyncExitStack, config: Config) -> Tracing | None:
    """Open what spans go to, where that is configured; the stack closes it."""
    try:
        tracing = open_tracing(config.tracing, random.SystemRandom())
    except ImportError as error:
        message = f"tracing.otlp: it needs an extra: pip install 'warmroute[otel]' ({error})"
        raise ConfigError(message) from None
    if tracing is not None:
        stack.push_async_callback(tracing.close)
    return tracing


async def _serve_until_told(
    app: App,
    clients: Listener | SharedListener,
    operators: Listener | None,
    ready: Callable[[], None],
    seat: Seat | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain: not ready, still accepting, finish."""
    keep_large_blocks()
    sys.setswitchinterval(SWITCH_S)
    stop = Stop() if seat is None else seat.stop
    loop = asyncio.get_running_loop()
    app.metrics.gauges.tasks = lambda: len(asyncio.all_tasks(loop))
    loop.set_exception_handler(ShortageLog())
    stop.listen(loop)
    async with asyncio.TaskGroup() as tasks:
        background = [
            tasks.create_task(supervise(name, run), name=name) for name, run in _chores(app)
        ]
        if app.tls is not None and app.tls.has_files:
            if seat is None:
                loop.add_signal_handler(signal.SIGHUP, app.tls.reload)
            else:
                seat.on_reload.append(app.tls.reload)
        desk = PulseDesk(app) if seat is not None else None
        await _open_doors(app, clients, operators, seat, desk)
        # What lives as long as the process is not looked at again by every collection.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        ready()
        await stop.asked.wait()
        await drain(app, clients, stop)
        if seat is not None and desk is not None:
            seat.farewell(desk.metrics(), desk.last_words())
        app.live.end()
        for task in background:
            task.cancel()


def _chores(app: App) -> Iterator[tuple[str, Callable[[], Awaitable[None]]]]:
    """Yield what runs beside the requests, by its name."""
    yield "health", app.health.run
    yield "names", app.fleet.registration.run
    yield "upkeep", app.upkeep.run
    yield "overload", app.entrance.overload.run
    yield "live", app.live.run
    yield from (app.discovery.loops | app.aside()).items()
    if app.decisions is not None:
        yield "decision log", app.decisions.run
    if app.access is not None:
        yield "access log", app.access.lines.run
    if app.tls is not None and app.tls.has_files:
        yield "TLS", app.tls.run


async def _open_doors(
    app: App,
    clients: Listener | SharedListener,
    operators: Listener | None,
    seat: Seat | None,
    desk: PulseDesk | None,
) -> None:
    """Answer whoever comes; of several processes, once this one serves as well as the others."""
    routes = client_routes(app.proxy, app.admin, app.config.paths)
    inner = app.operator_routes()
    if seat is not None and desk is not None:
        routes, inner = routes | seat.client_routes(), inner | desk.routes()
    if app.gate is not None:
        routes = app.gate.guarded(routes)
    inner = with_document(inner, "warmroute, for operators")
    capacity = capacity_of(app.config.limits, open_files_most())
    if seat is not None and operators is not None:
        await operators.start(inner, capacity.operators)
        await seat.settled(app)
    await clients.start(with_document(routes, "warmroute"), capacity.clients)
    if seat is None and operators is not None:
        await operators.start(open_guard(app.whole).guarded(inner), capacity.operators)
