"""The bundled worker: one engine process with a paged KV cache.

``python -m sidecar.worker --json '{"port": 8000}'`` runs one and prints where it listens.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import logging
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec
import uvloop
import zmq
from aiohttp import web

from prompt.model import CodecLoadError
from sidecar.assembly import assemble
from sidecar.compute.model import ModelError
from sidecar.handler import WorkerHandlers
from sidecar.publisher import KEPT_BATCHES, SEND_HIGH_WATER_MARK, EventFormat, EventPublisher
from sidecar.setting import SettingError, WorkerAddress, WorkerSettings
from sidecar.store import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable

    from sidecar.assembly import Assembly
    from sidecar.engine import Engine
    from sidecar.pagechange import PageChange

_BACKLOG: Final = 1024
_CLOSING_S: Final = 2.0


async def serve_worker(
    settings: WorkerSettings, ready: Callable[[WorkerAddress], None] | None = None
) -> None:
    """Serve until cancelled; then finish open requests for the grace period and return.

    Raises OSError or zmq.ZMQError where an address is taken, and what ``assemble`` raises.
    """
    publisher: EventPublisher | None = None

    def publish(news: list[PageChange]) -> None:
        if publisher is not None:
            publisher.publish(news, time.time())

    built = await asyncio.to_thread(assemble, settings, publish)
    settings = built.settings
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(_close, built)
        listener = _listener(settings.host, settings.port)
        stack.callback(listener.close)
        http = _http_address(settings.host, listener.getsockname()[1])
        topic = f"kv@{http.removeprefix('http://')}@{settings.served_name}"
        publisher = EventPublisher(_event_format(settings), topic)
        stack.callback(publisher.close)
        events, replay = publisher.bind(settings.events_endpoint, settings.replay_endpoint)
        address = WorkerAddress(http, events, replay)
        transfer_info = await _start_transfer(built, stack)
        sources = _event_sources(address, topic)
        app = WorkerHandlers(settings, built.engine, built.codec, sources, transfer_info).app()
        app.on_shutdown.append(lambda _: _drain(built.engine, settings.shutdown_grace_s))
        runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=_CLOSING_S
        )
        await runner.setup()
        await web.SockSite(runner, listener, backlog=_BACKLOG).start()
        if ready is not None:
            ready(address)
        await _supervise(built, publisher, runner)


async def _start_transfer(
    built: Assembly, stack: contextlib.AsyncExitStack
) -> dict[str, Any] | None:
    """Serve pages to other workers, if wanted; return what they are told about it."""
    port = built.settings.transfer_port
    if built.transfer is None or port is None:
        return None
    _, port = await built.transfer.start(built.settings.host, port)
    stack.push_async_callback(built.transfer.close)
    return {"port": port, "namespace": built.namespace.hex()}


def _close(built: Assembly) -> None:
    built.ledger.close()
    built.runner.close()
    if built.disk is not None:
        built.disk.close()


async def _supervise(built: Assembly, publisher: EventPublisher, runner: web.AppRunner) -> None:
    """Run the background tasks; end all when one fails or this task is cancelled."""
    engine = built.engine
    tasks = [
        asyncio.create_task(engine.run(), name="engine"),
        asyncio.create_task(publisher.serve_replay(), name="replay"),
    ]
    if built.mover is not None:
        tasks.append(asyncio.create_task(built.mover.write_behind(), name="disk"))
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        engine.halt("failed")
        for task in done:
            task.result()
    finally:
        await runner.cleanup()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _drain(engine: Engine, grace_s: float) -> None:
    """Let open requests finish for ``grace_s``, then end those that are left."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(engine.drained(), grace_s)
    engine.halt()


def _event_format(settings: WorkerSettings) -> EventFormat:
    return EventFormat(
        page_tokens=settings.page_tokens,
        hashes=settings.event_hashes,
        encoding=settings.event_encoding,
    )


def _event_sources(address: WorkerAddress, topic: str) -> dict[str, Any]:
    return {
        "0": {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": address.events,
            "replay_endpoint": address.replay,
            "buffer_steps": KEPT_BATCHES,
            "hwm": SEND_HIGH_WATER_MARK,
            "max_queue_size": SEND_HIGH_WATER_MARK,
            "topic": topic,
        }
    }


def _listener(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        why = (error.strerror or str(error)).partition(" (while attempting")[0]
        at = _http_address(host, port).removeprefix("http://")
        key = "port" if error.errno in {errno.EADDRINUSE, errno.EACCES} else "host"
        message = f"{key}: cannot listen on {at}: {why}; choose another one with --{key}"
        raise OSError(message) from None


def _http_address(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class WorkerStartError(Exception):
    """An address cannot be used, or the settings cannot be had."""


async def run_worker_process(settings: WorkerSettings) -> None:
    """Serve until SIGTERM or SIGINT; prints one ready line on standard output.

    Raises WorkerStartError, and CodecLoadError for a bad tokenizer. What goes wrong later is raised
    as it is: no setting is to blame.
    """
    is_ready = False

    def tell_ready(address: WorkerAddress) -> None:
        nonlocal is_ready
        is_ready = True
        _print_ready(address)

    serving = asyncio.create_task(serve_worker(settings, tell_ready))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, serving.cancel)
    try:
        await serving
    except asyncio.CancelledError:
        if not serving.cancelled():
            raise
    except (OSError, zmq.ZMQError, SettingError, ModelError, StoreError) as error:
        if is_ready:
            raise
        raise WorkerStartError(str(error)) from error


def _print_ready(address: WorkerAddress) -> None:
    line = f"ready {address.http} events {address.events} replay {address.replay}\n"
    sys.stdout.write(line)
    sys.stdout.flush()


def main() -> int:
    """Run a worker from JSON settings; status 2 where they or an address cannot be used."""
    parser = argparse.ArgumentParser(description="Run one bundled worker.")
    parser.add_argument("--json", default="{}", help="WorkerSettings as a JSON object")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s %(message)s")
    try:
        settings = msgspec.json.decode(arguments.json, type=WorkerSettings)
        uvloop.run(run_worker_process(settings))
    except (msgspec.DecodeError, CodecLoadError, WorkerStartError) as error:
        sys.stderr.write(f"worker: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
