"""The operators' paths for a canary: how it stands, start, promote, stop.

Each of the last three is a change of the settings as any other: a version with author and reason.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from router.canary_keeper import PROMOTED, ROLLED_BACK, settings_after
from router.canary_row import row_of
from router.canary_setting import (
    CanaryId,
    CanarySettings,
    Duration,
    MaxRequests,
    Percent,
    TenantName,
)
from router.canary_verdict import CanaryVerdict
from router.canary_words import counts_of, note_of
from router.error import ClientError, ConflictError, NotFoundError, UnprovenError
from router.reply import json_response
from router.setting_view import Author, Reason, Version
from router.settings import CANARY
from router.split import CANDIDATE, CONTROL

if TYPE_CHECKING:
    from collections.abc import Mapping

    from router.canary import Canary
    from router.canary_keeper import CanaryKeeper
    from router.canary_row import CanaryRow
    from router.client import Handler
    from router.reply import Response
    from router.request import Request
    from router.setting_change import SettingAdminParts, SettingChanges
    from state.setting_book import SettingDocument

CANARY_PATH: Final = "/admin/canary"
PROMOTE_PATH: Final = f"{CANARY_PATH}/promote"
STOP_PATH: Final = f"{CANARY_PATH}/stop"
SEED_BITS: Final = 53


class StartBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A canary to begin: ``policy`` has what differs from the one in force.

    Without a ``seed`` one is drawn. ``guardrails`` has what differs from the usual ones.
    """

    policy: dict[str, Any]
    author: Author
    reason: Reason
    id: CanaryId | UnsetType = UNSET
    split: Literal["hash", "tenant"] = "hash"
    percent: Percent | UnsetType = UNSET
    tenants: tuple[TenantName, ...] | UnsetType = UNSET
    seed: int | UnsetType = UNSET
    duration_s: Duration | UnsetType = UNSET
    max_requests: MaxRequests | UnsetType = UNSET
    guardrails: dict[str, Any] | UnsetType = UNSET
    at_end: Literal["wait", "promote"] = "wait"
    expected_version: Version | None = None
    dry_run: bool = False


class EndBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who stops a canary, and why."""

    author: Author
    reason: Reason
    expected_version: Version | None = None
    dry_run: bool = False


class PromoteBody(EndBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who promotes a canary, and why. ``force``: whatever its verdict says."""

    force: bool = False


class EndedCanary(Struct, frozen=True, kw_only=True):
    """How the last canary ended: the version of the settings that says so."""

    version: int
    unix_s: float
    author: str
    reason: str
    verdict: CanaryVerdict | None


State = Literal["none", "running", "ending", "waiting"]


class SideCounts(Struct, frozen=True, kw_only=True):
    """Requests of both sides that one router process counted itself."""

    control: int
    candidate: int


class ProcessCanary(Struct, frozen=True, kw_only=True):
    """How a canary stands in one of several processes; ``own`` is None where it is not running."""

    process: int
    state: State
    settings_version: int
    own: SideCounts | None
    fault: str


class CanaryView(Struct, frozen=True, kw_only=True):
    """How a canary stands.

    ``state``: ``none``; ``running``; ``ending``, which this router did and the store does not know
    yet; ``waiting`` to be promoted or stopped. ``counted_by``: of how many lives of routers the
    figures are. ``note``: why its split cannot tell anything; empty where it can. ``fault``: why
    the figures are of this router alone. ``own`` are its own requests.
    ``processes`` are those of the router, where it has several (``router.supervisor.canary``).
    """

    state: State
    settings_version: int
    unix_s: float
    settings: CanarySettings | None = None
    left_s: float | None = None
    counted_by: int = 0
    verdict: CanaryVerdict | None = None
    note: str = ""
    fault: str = ""
    last: EndedCanary | None = None
    own: SideCounts | None = None
    processes: tuple[ProcessCanary, ...] = ()


class CanaryAdmin:
    """Handlers of the operators' listener."""

    def __init__(
        self,
        parts: SettingAdminParts,
        changes: SettingChanges,
        canary: Canary,
        keeper: CanaryKeeper,
    ) -> None:
        self._parts = parts
        self._changes = changes
        self._canary = canary
        self._keeper = keeper

    def routes(self) -> dict[str, Mapping[str, Handler]]:
        """Return the table of these paths."""
        return {
            CANARY_PATH: {"GET": self.status, "POST": self.start},
            PROMOTE_PATH: {"POST": self.promote},
            STOP_PATH: {"POST": self.stop},
        }

    async def status(self, _: Request) -> Response:
        """Answer how it stands."""
        return json_response(self.view())

    def view(self) -> CanaryView:
        """Return how it stands."""
        book, trial, unix_s = self._parts.book, self._canary.trial, self._parts.unix_clock()
        last = self._last()
        if trial is None:
            return CanaryView(state="none", settings_version=book.version, unix_s=unix_s, last=last)
        settings = trial.settings
        if settings.ended_unix_s is not None:
            judged = last.verdict if last is not None else None
            return CanaryView(
                state="waiting",
                settings_version=book.version,
                unix_s=unix_s,
                settings=settings,
                verdict=judged,
                note="" if judged is None else note_of(judged, settings),
                last=last,
            )
        verdict = self._keeper.judged(trial)
        return CanaryView(
            state="running" if self._canary.is_splitting else "ending",
            settings_version=book.version,
            unix_s=unix_s,
            settings=settings,
            left_s=max(0.0, settings.end_unix_s - unix_s),
            counted_by=self._keeper.counted_by,
            verdict=verdict,
            note=note_of(verdict, settings),
            fault=self._keeper.fault,
            last=last,
            own=SideCounts(
                control=trial.counter.sums.requests(CONTROL),
                candidate=trial.counter.sums.requests(CANDIDATE),
            ),
        )

    def row(self) -> CanaryRow | None:
        """Return the same in a line; None where there is none."""
        return row_of(self.view(), self._parts.live().policy)

    async def start(self, request: Request) -> Response:
        """Begin one."""
        body = await self._changes.read(request, StartBody)
        if not body.policy:
            message = 'policy: expected what differs from the one in force, as {"w_copy": 0.8}'
            raise ClientError(message, param="policy")
        await self._changes.look()
        document = self._changes.document()
        if CANARY in document:
            message = f"canary: {document[CANARY]['id']} is there; promote or stop it first"
            raise ConflictError(message, param=CANARY)
        kind = msgspec.to_builtins(self._parts.live().policy)["kind"]
        told = msgspec.to_builtins(body)
        for name in ("author", "reason", "expected_version", "dry_run"):
            del told[name]
        canary = {
            "id": f"c{secrets.token_hex(3)}",
            "seed": secrets.randbits(SEED_BITS),
            **told,
            "started_unix_s": self._parts.unix_clock(),
            "policy": {"kind": kind, **body.policy},
        }
        settings = {**document, CANARY: canary}
        return await self._changes.make("canary_start", settings, body, body.expected_version)

    async def promote(self, request: Request) -> Response:
        """Put the candidate's policy in force for all requests, where its verdict carries that."""
        body = await self._changes.read(request, PromoteBody)
        return await self._end(body, PROMOTED, "canary_promote", force=body.force)

    async def stop(self, request: Request) -> Response:
        """Let the policy in force decide all requests again."""
        body = await self._changes.read(request, EndBody)
        return await self._end(body, ROLLED_BACK, "canary_stop", force=True)

    async def _end(self, body: EndBody, kind: str, action: str, *, force: bool) -> Response:
        await self._changes.look()
        document = self._changes.document()
        if CANARY not in document:
            message = "no canary runs"
            raise NotFoundError(message, param=CANARY)
        verdict = self.view().verdict
        if not force and (verdict is None or not verdict.carries):
            raise _unproven(verdict)
        told = None if verdict is None else msgspec.to_builtins(verdict)
        settings = settings_after(self._parts.rules, document, kind, self._parts.unix_clock())
        return await self._changes.make(action, settings, body, body.expected_version, told)

    def _last(self) -> EndedCanary | None:
        for document in self._parts.book.history():
            if document.verdict is not None:
                return _ended(document)
        return None


def _unproven(verdict: CanaryVerdict | None) -> UnprovenError:
    said = "not known"
    if verdict is not None:
        said = f'"{verdict.word.value}" ({counts_of(verdict)})'
    message = f"the verdict is {said}; promote all the same with force (--force)"
    return UnprovenError(message, param="force")


def _ended(document: SettingDocument) -> EndedCanary:
    try:
        verdict = msgspec.convert(document.verdict, CanaryVerdict)
    except msgspec.ValidationError:  # of another version
        verdict = None
    return EndedCanary(
        version=document.version,
        unix_s=document.unix_s,
        author=document.author,
        reason=document.reason,
        verdict=verdict,
    )
