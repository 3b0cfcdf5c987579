"""A fleet with tenants: their keys, routers with an epoch file each, and what a request got."""

from __future__ import annotations

import hashlib
import secrets
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from support.fleet import MODEL, FleetPlan, LocalFleet, Router
from support.tokenizer import write_tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

TEXT: Final = "quick brown foxes jump over lazy dogs " * 60


def key_of(tenant: str) -> str:
    """Return the API key of a tenant of these tests."""
    return f"sk-{tenant}-of-a-test"


def tenant(name: str, **settings: Any) -> dict[str, Any]:
    """Return the settings of a tenant that sees receipts."""
    digest = hashlib.sha256(key_of(name).encode()).hexdigest()
    return {"name": name, "key_digests": [digest], "receipts": True, **settings}


def write_secret(folder: Path) -> Path:
    """Write a deployment key that only its owner may read."""
    path = folder / "deployment.key"
    path.touch(0o600)
    path.write_text(secrets.token_hex(32))
    return path


@dataclass(frozen=True, slots=True)
class Got:
    """What a request got: what its router predicted, and what the engine had."""

    status: int
    predicted_tokens: int
    cached_tokens: int
    prompt_tokens: int
    headers: Mapping[str, str]


class TenantFleet:
    """Routers with tenants in front of bundled workers; ``secret`` is everybody's."""

    def __init__(self, fleet: LocalFleet, folder: Path, config: dict[str, Any]) -> None:
        self.fleet = fleet
        self.folder = folder
        self.config = config

    async def router(self, name: str, **config: Any) -> Router:
        """Start a router with an epoch file and an audit log of its own."""
        named = {
            "tenants_state_file": str(self.epochs(name)),
            "audit_log": str(self.audit(name)),
        }
        router = await self.fleet.start_router(**{**self.config, **named, **config})
        self.fleet.routers.append(router)
        await self.fleet.all_up(router)
        return router

    def epochs(self, name: str) -> Path:
        """Return where the router of that name keeps its epochs."""
        return self.folder / f"{name}.epochs.json"

    def audit(self, name: str) -> Path:
        """Return where the router of that name writes its audit log."""
        return self.folder / f"{name}.audit.jsonl"

    async def ask(self, router: Router, tenant_name: str, text: str = TEXT) -> Got:
        """Send one chat and wait for its answer."""
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 1,
        }
        headers = {"Authorization": f"Bearer {key_of(tenant_name)}"}
        url = f"{router.url}/v1/chat/completions"
        async with self.fleet.http.post(url, json=body, headers=headers) as answer:
            told = msgspec.json.decode(await answer.read())
            usage = told.get("usage", {})
            details = usage.get("prompt_tokens_details") or {}
            predicted = answer.headers.get("x-warmroute-predicted-cached-tokens", "0")
            return Got(
                answer.status,
                int(predicted),
                int(details.get("cached_tokens") or 0),
                int(usage.get("prompt_tokens", 0)),
                dict(answer.headers),
            )

    async def call(self, method: str, router: Router, path: str) -> tuple[int, Any]:
        """Return status and JSON of an operator's request."""
        async with self.fleet.http.request(method, f"{router.admin_url}{path}") as answer:
            return answer.status, msgspec.json.decode(await answer.read())

    async def epoch(self, router: Router, scope: str) -> int:
        """Return the counter of a scope's epoch as ``router`` knows it."""
        _, scopes = await self.call("GET", router, "/admin/scopes")
        return next(int(one["epoch"]) for one in scopes if one["scope"] == scope)


@asynccontextmanager
async def tenant_fleet(
    folder: Path,
    state_url: str,
    *names: str | dict[str, Any],
    replicas: int = 1,
    pages: int = 8192,
    worker_flags: tuple[str, ...] = (),
    **config: Any,
) -> AsyncIterator[TenantFleet]:
    """Start workers and sidecars; routers follow."""
    key = str(write_secret(folder))
    plan = FleetPlan(
        state_url=state_url,
        replicas=replicas,
        pages=pages,
        routers=0,
        tokenizer=write_tokenizer(folder / "tokenizer"),
        worker_flags=worker_flags,
        sidecar_flags=("--deployment-key-file", key),
        config={"seed": 7, "deployment_key_file": key},
    )
    tenants = [tenant(name) if isinstance(name, str) else name for name in names]
    async with LocalFleet(folder, plan) as fleet:
        yield TenantFleet(fleet, folder, {"tenants": tenants, **config})
