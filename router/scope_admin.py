"""The operator's paths for scopes: what there is, a new epoch after a deletion or for a change.

Each change is written to the audit log before and after it, where there is one. A change that the
store or the disk did not take yet is answered with 202: it counts in this router, and goes on being
tried.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qs, unquote

from msgspec import Struct

from router.audit_log import AuditError
from router.epoch import Forgotten
from router.error import (
    AuditFailedError,
    ClientError,
    ConflictError,
    NotFoundError,
    ReplicaError,
)
from router.rank import one_of_each_engine
from router.reply import json_response
from router.upstream import fetch
from state.scope_purge import Purged

if TYPE_CHECKING:
    from collections.abc import Mapping

    from router.audit_log import AuditLog
    from router.client import Handler
    from router.epoch import Renewal, ScopeEpochs
    from router.fleet import FleetTable, Member
    from router.reply import Response
    from router.request import Request
    from router.upstream import UpstreamPool

_log = logging.getLogger(__name__)

SCOPE_PATH: Final = "/admin/scopes/"
ROTATE: Final = "/rotate"
RESET_PATHS: Final = ("/reset_prefix_cache", "/flush_cache")
"""vLLM's and the bundled worker's, and SGLang's. An engine without the path answers 404."""
RESET_S: Final = 10.0
ENGINE_TENANT_CHARACTERS: Final = 12
BEGUN: Final = "begun"
DONE: Final = "done"
PENDING: Final = "pending"
"""The store or the disk did not take it yet."""
PARTIAL: Final = "partial"
"""Some engine did not forget what it has cached."""
_OK: Final = range(200, 300)
_NOT_FOUND: Final = 404


class EngineResets(Struct, frozen=True, kw_only=True):
    """What became of the engines' caches; ``failed`` says why, by replica."""

    reset: int
    failed: dict[str, str]


class ScopeChange(Struct, frozen=True, kw_only=True):
    """The answer to a change of a scope."""

    scope: str
    action: str
    result: str
    epoch: int
    is_shared: bool
    is_kept: bool
    index: Purged | None
    local: Forgotten
    engines: EngineResets | None = None


class ScopeState(Struct, frozen=True, kw_only=True):
    """One scope as this router knows it. ``live_epochs``: 2 after a rotation.

    ``engine_tenant`` is what a bundled worker calls it: another one with each epoch.
    """

    scope: str
    epoch: int
    live_epochs: int
    engine_tenant: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopeAdminParts:
    """What the paths work with. ``audit`` is None where nothing is written down."""

    epochs: ScopeEpochs
    fleet: FleetTable
    pool: UpstreamPool
    audit: AuditLog | None


class ScopeAdmin:
    """Handlers of the operator's listener; clients have none of these paths."""

    def __init__(self, parts: ScopeAdminParts) -> None:
        self._parts = parts
        self._changes: set[asyncio.Task[Response]] = set()

    def routes(self) -> dict[str, Mapping[str, Handler]]:
        """Return the table of these paths; ``{name}`` stands for one scope."""
        return {
            SCOPE_PATH.removesuffix("/"): {"GET": self.scopes},
            f"{SCOPE_PATH}{{name}}": {"DELETE": self.delete},
            f"{SCOPE_PATH}{{name}}{ROTATE}": {"POST": self.rotate},
        }

    async def scopes(self, _: Request) -> Response:
        """Answer every scope with the counter of its epoch."""
        epochs = self._parts.epochs
        return json_response(
            [
                ScopeState(
                    scope=scope,
                    epoch=epoch.counter,
                    live_epochs=len(epoch.live_names),
                    engine_tenant=engine_tenant(epochs.live_digests(scope)[0]),
                )
                for scope, epoch in sorted(epochs.book.epochs().items())
            ]
        )

    async def delete(self, request: Request) -> Response:
        """Make all that a scope has cached unreachable, at once and for good."""
        scope, is_resetting = self._scope(request), _flag(request, "reset_engines")
        return await self._change(request, scope, "delete", is_resetting=is_resetting)

    async def rotate(self, request: Request) -> Response:
        """Begin a new epoch; routers on the one before go on with that until they hear of it."""
        return await self._change(request, self._scope(request), "rotate", is_resetting=False)

    async def _change(
        self, request: Request, scope: str, action: str, *, is_resetting: bool
    ) -> Response:
        if not self._parts.epochs.can_renew:
            message = "tenants_state_file: expected a file that keeps epochs beyond a restart"
            raise ConflictError(message, param="tenants_state_file")
        work = self._changed(request.peer or "unknown", scope, action, is_resetting=is_resetting)
        change = asyncio.create_task(work)
        self._changes.add(change)
        change.add_done_callback(self._changes.discard)
        return await asyncio.shield(change)  # a client that leaves stops it nowhere

    async def settled(self) -> None:
        """Wait until no change is under way."""
        await asyncio.gather(*self._changes, return_exceptions=True)

    async def _changed(
        self, actor: str, scope: str, action: str, *, is_resetting: bool
    ) -> Response:
        epochs = self._parts.epochs
        before = epochs.book.epoch(scope).counter
        await self._audit(actor, action, scope, before, {}, BEGUN)
        renewal = await epochs.renew(scope, keeps_previous=action == "rotate")
        engines = await self._reset_engines() if is_resetting else None
        is_done = renewal.is_shared and renewal.is_kept and renewal.index is not None
        result = DONE if is_done else PENDING
        if is_done and engines is not None and engines.failed:
            result = PARTIAL
        await self._audit(actor, action, scope, renewal.epoch, _counts(renewal, engines), result)
        change = ScopeChange(
            scope=scope,
            action=action,
            result=result,
            epoch=renewal.epoch,
            is_shared=renewal.is_shared,
            is_kept=renewal.is_kept,
            index=renewal.index,
            local=renewal.local,
            engines=engines,
        )
        return json_response(change, status=200 if result == DONE else 202)

    def _scope(self, request: Request) -> str:
        name = request.path.removeprefix(SCOPE_PATH).removesuffix(ROTATE)
        scope = unquote(name)
        if scope not in self._parts.epochs.book:
            message = "scope: expected one of GET /admin/scopes, as tenant:NAME or group:NAME"
            raise NotFoundError(message, param="scope")
        return scope

    async def _audit(
        self,
        actor: str,
        action: str,
        scope: str,
        epoch: int,
        counts: Mapping[str, int],
        result: str,
    ) -> None:
        audit = self._parts.audit
        if audit is None:
            return
        try:
            await audit.write(
                f"scope.{action}", result, actor=actor, scope=scope, epoch=epoch, counts=counts
            )
        except AuditError as error:
            done = "nothing was done" if result == BEGUN else f"the {action} was done all the same"
            message = f"audit_log: it cannot be written, {done}"
            _log.error("audit_log: %s; %s", error, done)
            raise AuditFailedError(message) from error

    async def _reset_engines(self) -> EngineResets:
        """Let every engine forget all that it has cached, healthy or not."""
        members = one_of_each_engine(self._parts.fleet.members().values())
        faults = await asyncio.gather(*map(self._reset, members))
        failed = {
            str(member.replica): fault
            for member, fault in zip(members, faults, strict=True)
            if fault is not None
        }
        return EngineResets(reset=len(members) - len(failed), failed=failed)

    async def _reset(self, member: Member) -> str | None:
        """Return why the engine did not forget; None when it did."""
        for path in RESET_PATHS:
            try:
                status, _, _ = await fetch(
                    member.endpoint, path, self._parts.pool, RESET_S, body=b""
                )
            except ReplicaError as error:
                return error.code
            if status in _OK:
                return None
            if status != _NOT_FOUND:
                return f"status {status} of {path}"
        return "it has no path for this (vLLM has one with VLLM_SERVER_DEV_MODE=1)"


def engine_tenant(scope_digest: str) -> str:
    """Return what a bundled worker shows of a scope, and takes for its quota."""
    return scope_digest.removeprefix("salt:")[:ENGINE_TENANT_CHARACTERS]


def _counts(renewal: Renewal, engines: EngineResets | None) -> dict[str, int]:
    counts = {"placements": renewal.local.placements, "roots": renewal.local.roots}
    if renewal.index is not None:
        counts |= {"index_keys": renewal.index.keys, "index_blocks": renewal.index.blocks}
    if engines is not None:
        counts |= {"engines_reset": engines.reset, "engines_failed": len(engines.failed)}
    return counts


def _flag(request: Request, name: str) -> bool:
    """Return the only parameter that the path has; raises ClientError for another one."""
    query = parse_qs(request.target.partition("?")[2], keep_blank_values=True)
    values = query.pop(name, ["false"])
    if query or len(values) != 1 or values[0] not in {"true", "false"}:
        message = f"{name}: expected true or false, and no other parameter"
        raise ClientError(message, param=name)
    return values[0] == "true"
