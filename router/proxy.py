"""One inference request from its first byte to its record: read, choose, relay, retry, account.

Only what happened before a byte of an answer reached the client may be tried on another replica.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from prompt.body import MAX_MODEL_CHARS, decoded
from prompt.model import BadPromptError, ReadPrompt, Unroutable
from router.account import Call, record_of
from router.attempt import Attempts
from router.body import read_body
from router.error import (
    ClientError,
    ModelNotFoundError,
    NoReplicaError,
    ReplicaConnectTimeoutError,
    ReplicaError,
    ReplicaUnreachableError,
    RouterError,
)
from router.hit_report import HitReports
from router.rank import UNPINNED_PATHS, mates
from router.reply import error_response
from router.server import PREFIX_PATHS

if TYPE_CHECKING:
    from collections.abc import Callable

    from policies.model import Decision
    from prompt.reader import PromptReader
    from router.billing import Billing
    from router.chooser import Choice, Chooser, Routed
    from router.client import Answer
    from router.config import Config
    from router.decision_log import DecisionLog
    from router.feedback import Feedback
    from router.fleet import FleetTable
    from router.gate import Gate
    from router.health import Health
    from router.hold import Hold
    from router.metrics import Metrics
    from router.quota import Quotas
    from router.request import Request
    from router.token_source import TokenSource
    from router.trace import DecisionTrace
    from router.upstream import UpstreamPool
    from router.wire import ClientStream
    from state.model import ReplicaId
    from state.store import FleetReader, Lookup

MAX_ATTEMPTS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyParts:
    """What the proxy works with; built by the composition root."""

    config: Config
    reader: FleetReader
    fleet: FleetTable
    health: Health
    prompts: PromptReader
    tokens: TokenSource
    chooser: Chooser
    pool: UpstreamPool
    trace: DecisionTrace
    metrics: Metrics
    clock: Callable[[], float]
    unix_clock: Callable[[], float]
    mint_id: Callable[[], str]
    lookup: Lookup | None = None
    decisions: DecisionLog | None = None
    hold: Hold | None = None
    feedback: Feedback | None = None
    gate: Gate | None = None
    billing: Billing | None = None
    quotas: Quotas | None = None


class _NamesModel(Struct, frozen=True):
    model: str = ""


class _Skipped(Struct):
    """Any JSON object: all of it is checked, and nothing is kept."""


_skipping = msgspec.json.Decoder(_Skipped)


def read_load_only(body: bytes, *, is_salted: bool = False) -> ReadPrompt:
    """Return what routing by load needs of a body: the model, where it is JSON that names one.

    Raises BadPromptError for a name that no model can have: the decision trace keeps names. Where
    ``is_salted`` also for what is no JSON: another reader (of a form, say) would miss the salt.
    """
    try:
        named = msgspec.json.decode(body, type=_NamesModel).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        named = ""
        if is_salted:
            decoded(_skipping, body, "")
    if len(named) > MAX_MODEL_CHARS or not named.isprintable():
        name = "model"
        raise BadPromptError(name, f"a printable name of at most {MAX_MODEL_CHARS} characters")
    return ReadPrompt(model=named, is_stream=False, unroutable=Unroutable.LOAD_ONLY)


class Proxy:
    """Handles the inference paths."""

    def __init__(self, parts: ProxyParts) -> None:
        self._parts = parts
        self._attempts = Attempts(parts)
        self._hits = HitReports()
        self._idle = asyncio.Event()
        self._idle.set()
        self.open_requests = 0

    async def idle(self) -> None:
        """Wait until no request is open."""
        await self._idle.wait()

    async def handle(self, request: Request) -> Answer:
        """Answer one request; every end is accounted exactly once."""
        parts = self._parts
        request_id = parts.mint_id()
        client_id = request.headers.request_id
        call = Call(
            request_id=request_id,
            client_request_id=client_id,
            path=request.path,
            started_s=parts.clock(),
            started_unix_s=parts.unix_clock(),
        )
        self.open_requests += 1
        self._idle.clear()
        try:
            return await self._serve(request, call)
        except RouterError as error:
            call.status = error.status
            call.outcome = "refused" if isinstance(error, ClientError) else "failed"
            return error_response(error, client_id or request_id)
        except Exception:
            call.status, call.outcome = RouterError.status, "failed"
            raise
        finally:
            self.open_requests -= 1
            if call.slot is not None:
                call.slot.end(call.relayed.usage if call.relayed is not None else None)
            if not self.open_requests:
                self._idle.set()
            self._account(call)

    async def _serve(self, request: Request, call: Call) -> ClientStream:
        parts = self._parts
        body = await self._receive(request, call)
        began_s = parts.clock()
        prompt = await self._read(call.path, body)
        call.routed = self._route(call, prompt)
        tried: set[ReplicaId] = set()
        while True:
            if parts.lookup is not None:
                await self._look_up(parts.lookup, call.routed, tried)
            if parts.hold is None or call.attempts:  # a second try has waited enough
                choice = self._choose(call.routed, tried)
            else:
                choice = await self._hold(parts.hold, call, call.routed)
                began_s += call.held_s
            parts.metrics.decided(choice.decision, parts.clock() - began_s)
            if call.slot is not None:
                call.slot.charge(call.routed, choice.decision, len(body))
            try:
                return await self._attempts.run(request, body, call, choice)
            except ReplicaError as error:
                replica = choice.member.replica
                tried.add(replica)
                if isinstance(error, ReplicaConnectTimeoutError):
                    parts.health.doubt(replica)
                elif isinstance(error, ReplicaUnreachableError):
                    parts.health.refused(replica)
                if isinstance(error, ReplicaConnectTimeoutError | ReplicaUnreachableError):
                    tried.update(mates(parts.fleet.members().values(), choice.member))
                if not error.can_retry or len(call.attempts) >= MAX_ATTEMPTS:
                    raise
                began_s = parts.clock()

    def _route(self, call: Call, prompt: ReadPrompt) -> Routed:
        """Return what is to be routed, with what its path and its tenant say of it."""
        routed = self._parts.chooser.route(prompt)
        if call.tenant is not None:
            routed.tenant, routed.scope = call.tenant.name, call.tenant.scope
        routed.can_pin = call.path not in UNPINNED_PATHS
        adapters = self._parts.fleet.adapters
        routed.is_loadable = adapters.loadable_base(prompt.model) is not None
        return routed

    async def _receive(self, request: Request, call: Call) -> bytes:
        """Return the body as it goes on: a tenant's has the salt of its scope, and no other."""
        gate, limits = self._parts.gate, self._parts.config.limits
        if gate is None:
            return await read_body(request, limits)
        call.tenant = gate.admit(request)
        if self._parts.quotas is not None:
            call.slot = self._parts.quotas.enter(call.tenant)
        return gate.salted(call.tenant, await read_body(request, limits))

    async def _read(self, path: str, body: bytes) -> ReadPrompt:
        try:
            if path in PREFIX_PATHS:
                prompt = await self._parts.prompts.read(path, body)
                if prompt.is_rough:
                    prompt = await self._parts.tokens.refined(path, body, prompt)
                return prompt
            return read_load_only(body, is_salted=self._parts.gate is not None)
        except BadPromptError as error:
            raise ClientError(str(error), param=error.field) from None

    async def _look_up(self, lookup: Lookup, routed: Routed, tried: set[ReplicaId]) -> None:
        """Ask the store what the candidates hold; ``_choose`` reads it without a wait between."""
        parts = self._parts
        candidates = parts.fleet.candidates(routed.prompt.model or None, parts.health, tried)
        await lookup.prepare(parts.chooser.questions(routed, candidates))

    def _choose(
        self, routed: Routed, tried: set[ReplicaId], decided: Decision | None = None
    ) -> Choice:
        parts = self._parts
        model = routed.prompt.model or None
        candidates = parts.fleet.candidates(model, parts.health, tried)
        choice = parts.chooser.choose(routed, candidates, decided)
        if choice is not None:
            return choice
        known = parts.fleet.models(parts.health)
        if model is not None and known and model not in known and not routed.is_loadable:
            message = f"model: expected one of the served models, got {model[:64]!r}"
            raise ModelNotFoundError(message, param="model")
        message = "no replica can take the request now"
        raise NoReplicaError(message)

    async def _hold(self, hold: Hold, call: Call, routed: Routed) -> Choice:
        """Return the first choice of a request, for which it may have to wait its turn."""
        parts, model = self._parts, routed.prompt.model or None

        def peek() -> Decision | None:
            return parts.chooser.peek(routed, parts.fleet.candidates(model, parts.health, set()))

        started_s = parts.clock()
        try:
            choice, call.held_s = await hold.choose(
                routed, peek, lambda decided: self._choose(routed, set(), decided)
            )
        except BaseException:
            call.held_s = parts.clock() - started_s
            raise
        return choice

    def _account(self, call: Call) -> None:
        """Record how the request ended: trace, metrics."""
        parts, routed = self._parts, call.routed
        usage = call.relayed.usage if call.relayed is not None else None
        if routed is not None:
            parts.tokens.check(routed.prompt, usage)
        record = record_of(parts, call, usage)
        parts.trace.add(record)
        parts.metrics.finished(record)
        if parts.billing is not None:
            parts.billing.add(record)
        self._hits.note(call, usage)
        if parts.feedback is not None:
            parts.feedback.note(call, usage, record.tenant)
        if routed is not None and parts.decisions is not None:
            parts.decisions.add(record, call.choices, routed)
