"""An engine that says what a test wrote down, behind the worker's real HTTP handlers."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from aiohttp.test_utils import TestClient, TestServer
from msgspec import Struct

from prompt.byte import ByteCodec
from sidecar.generation import Delta, EngineHaltedError, Halted
from sidecar.handler import WorkerHandlers
from sidecar.report import KvReport, TierReport

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from aiohttp import web

    from sidecar.generation import Generation

    Script = Callable[[Generation], Sequence[Delta | Halted]]

MODEL = "scripted"
REPORT = KvReport(
    [
        TierReport(
            tier="device",
            page_bytes=100,
            total_pages=10,
            states={"free": 6, "used": 3, "evictable": 1},
            tenants={"abc": {"used": 2}},
            hits=4,
        ),
        TierReport(
            tier="host",
            page_bytes=100,
            total_pages=20,
            states={"free": 20, "used": 0},
            moved_in_bytes=700,
            moved_out_bytes=300,
            saved_ms=1.5,
        ),
    ]
)


class ScriptedSettings(Struct, frozen=True):
    """What the handlers read of the settings."""

    compute: str = "numpy"
    served_name: str = MODEL
    context_tokens: int = 4096
    page_tokens: int = 16


class ScriptedTicket:
    """One submitted generation."""

    def __init__(self, generation: Generation, parent: ScriptedTicket | None) -> None:
        self.generation = generation
        self.parent = parent
        self.sequence = SimpleNamespace(cached_tokens=1, output_tokens=0)


def spoken(text: str) -> Script:
    """Return the script of an answer that says ``text``, one byte per delta."""

    def script(generation: Generation) -> list[Delta | Halted]:
        choice, last = generation.choice, len(text) - 1
        return [
            Delta(choice, [ord(char)], char, "length" if at == last else None)
            for at, char in enumerate(text)
        ]

    return script


class ScriptedEngine:
    """Says what ``script`` returns for each generation, and then nothing more."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.is_halted = False
        self.tickets: list[ScriptedTicket] = []
        self.aborted: list[ScriptedTicket] = []
        self.pins: list[tuple[Any, ...]] = []
        self.submissions: asyncio.Queue[ScriptedTicket] = asyncio.Queue()
        self.aborts = asyncio.Event()

    def submit(
        self,
        generation: Generation,
        sink: Callable[[Delta | Halted], None],
        parent: ScriptedTicket | None = None,
    ) -> ScriptedTicket:
        """Play the script at once."""
        if self.is_halted:
            raise EngineHaltedError
        ticket = ScriptedTicket(generation, parent)
        self.tickets.append(ticket)
        self.submissions.put_nowait(ticket)
        for delta in self.script(generation):
            if isinstance(delta, Delta):
                ticket.sequence.output_tokens += len(delta.token_ids)
            sink(delta)
        return ticket

    def abort(self, ticket: ScriptedTicket) -> None:
        """Note it."""
        self.aborted.append(ticket)
        self.aborts.set()

    def kv_report(self) -> KvReport:
        """Return the same report."""
        return REPORT

    def pin(self, packed_prompt: bytes, salt: str | None, ttl_s: float) -> int:
        """Note it; two pages."""
        self.pins.append(("pin", packed_prompt, salt, ttl_s))
        return 2

    def unpin(self, packed_prompt: bytes, salt: str | None) -> int:
        """Note it; one page."""
        self.pins.append(("unpin", packed_prompt, salt))
        return 1


@asynccontextmanager
async def scripted_worker(
    engine: ScriptedEngine,
    settings: ScriptedSettings | None = None,
    transfer_info: Mapping[str, Any] | None = None,
) -> AsyncIterator[TestClient[web.Request, web.Application]]:
    """Serve ``engine`` on a free loopback port."""
    stand_ins: Any = settings or ScriptedSettings()
    scripted: Any = engine
    app = WorkerHandlers(stand_ins, scripted, ByteCodec(), {}, transfer_info).app()
    async with TestClient(TestServer(app, handler_cancellation=True)) as client:
        yield client
