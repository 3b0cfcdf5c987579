"""Routers with two tenants for timing audits, and ``warmroute audit`` run against them.

``VICTIM`` and ``ATTACKER`` have scopes of their own; ``PARTNER`` and ``FRIEND`` are of one group.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from asyncio.subprocess import PIPE
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from support.fleet import MODEL, FleetPlan, LocalFleet
from support.stage import Actor, staged_router, stream_two_events
from support.tenant import key_of, tenant_config
from support.tokenizer import write_tokenizer
from warmroute.audit_judge import Report

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

VICTIM: Final = "victim"
ATTACKER: Final = "attacker"
PARTNER: Final = "partner"
FRIEND: Final = "friend"
_GROUP: Final = {"share": "friends"}
_PATIENT: Final = {"patience_s": 20.0, "patience_cap_s": 20.0}
_AUDIT_S: Final = 7_200.0


class Audited(NamedTuple):
    """How ``warmroute audit`` ended; ``report`` is None where it did not get that far."""

    status: int
    report: Report | None
    told: str


def tenants(folder: Path) -> dict[str, Any]:
    """Return the part of a router's configuration that knows the four tenants."""
    return tenant_config(folder, VICTIM, ATTACKER, partner=_GROUP, friend=_GROUP)


def _tokenizer(folder: Path) -> Path:
    return write_tokenizer(folder / "tokenizer")


@contextlib.asynccontextmanager
async def engines(
    folder: Path, *, preset: str = "llama-8b-h100", speed_up: float = 1.0, **config: Any
) -> AsyncIterator[LocalFleet]:
    """Start two workers whose clocks take time for a prefill, and a router that has a tokenizer."""
    settings = tenants(folder) | config
    plan = FleetPlan(
        tokenizer=_tokenizer(folder),
        preset=preset,
        speed_up=speed_up,
        sidecar_flags=("--deployment-key-file", settings["deployment_key_file"]),
        config=settings,
    )
    async with LocalFleet(folder, plan) as fleet:
        yield fleet


@contextlib.asynccontextmanager
async def asked_engines(folder: Path) -> AsyncIterator[LocalFleet]:
    """Start engines that take no time, and a router that has to ask them for tokens."""
    settings = tenants(folder) | {"tokens": _PATIENT}
    plan = FleetPlan(
        worker_flags=("--tokenizer", str(_tokenizer(folder)), "--max-model-len", "1000000"),
        sidecar_flags=("--deployment-key-file", settings["deployment_key_file"]),
        pages=65_536,
        config=settings,
    )
    async with LocalFleet(folder, plan) as fleet:
        yield fleet


@contextlib.asynccontextmanager
async def reading_router(folder: Path) -> AsyncIterator[LocalFleet]:
    """Start a router with a tokenizer in front of replicas that answer at once."""
    actors = [Actor("a", answer=stream_two_events), Actor("b", answer=stream_two_events)]
    config = tenants(folder)
    async with staged_router(folder, actors, tokenizer=_tokenizer(folder), **config) as stage:
        yield stage.fleet


async def audit(
    fleet: LocalFleet,
    *flags: str,
    of: tuple[str, str] = (VICTIM, ATTACKER),
    stderr: int | None = PIPE,
) -> Audited:
    """Run ``warmroute audit`` on two tenants, as a process of its own."""
    return await audit_command(
        {"FIRST": key_of(of[0]), "SECOND": key_of(of[1])},
        *("--target", fleet.router.url, "--model", MODEL),
        *("--key-env", "FIRST", "--key-env", "SECOND", "--json", *flags),
        stderr=stderr,
    )


async def audit_command(
    variables: Mapping[str, str], *flags: str, stderr: int | None = PIPE
) -> Audited:
    """Run ``warmroute audit`` with ``flags`` alone; None lets its stderr be seen at once."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "warmroute", "audit", *flags),
        stdout=PIPE,
        stderr=stderr,
        env={**os.environ, **variables},
    )
    try:
        async with asyncio.timeout(_AUDIT_S):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    report = msgspec.json.decode(out, type=Report) if out else None
    return Audited(process.returncode or 0, report, (err or b"").decode())


async def predicted_tokens(fleet: LocalFleet, tenant: str, limit: int = 1_000) -> list[int]:
    """Return what the router predicted to be cached of a tenant's last requests."""
    records = await fleet.decisions(limit)
    return [
        attempt["decision"]["predicted_cached_tokens"]
        for record in records
        if record["tenant"] == tenant
        for attempt in record["attempts"]
    ]
