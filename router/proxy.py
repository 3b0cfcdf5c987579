"""One inference request from its first byte to its record: read, choose, relay, retry, account.

Only what happened before a byte of an answer reached the client may be tried on another replica.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from prompt.lane import LARGE_BODY_BYTES, LaneFullError
from prompt.model import BadPromptError
from prompt.opening import opening_of
from prompt.plain import read_plain
from router.account import Call, record_of
from router.attempt import Attempts
from router.body import read_body
from router.error import (
    ClientError,
    ModelNotFoundError,
    NoReplicaError,
    OverloadedError,
    ReplicaError,
    RouterError,
)
from router.hit_report import HitReports
from router.rank import UNPINNED_PATHS
from router.recovery import NONE_LEFT
from router.relay import LeftAfterEndError
from router.reply import error_response
from router.server import JSON_PATHS, PREFIX_PATHS
from router.session import bounded_session, may_name_session
from router.shed import ShedError
from router.verdict import BAD_REQUEST

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from policies.model import Decision
    from prompt.model import ReadPrompt
    from prompt.reader import PromptReader
    from router.access_log import AccessLog
    from router.admission import Admission
    from router.availability import Availability
    from router.billing import Billing
    from router.canary import Canary
    from router.chooser import Choice, Chooser, Routed
    from router.client import Answer
    from router.config import Config
    from router.decision_log import DecisionLog
    from router.feedback import Feedback
    from router.fleet import FleetTable, Member
    from router.gate import Gate
    from router.health import Health
    from router.hedge import Hedging
    from router.history import History
    from router.hold import Hold
    from router.metrics import Metrics
    from router.quarantine import Quarantine
    from router.quota import Quotas
    from router.recording import Recording
    from router.recovery import Recovery
    from router.request import Request
    from router.shadow_policy import ShadowPolicy
    from router.span import RequestSpans
    from router.token_source import TokenSource
    from router.trace import DecisionRecord, DecisionTrace
    from router.tracing import Tracing
    from router.upstream import UpstreamPool
    from router.warm_up import WarmUps
    from router.wire import ClientStream
    from state.model import ReplicaId
    from state.store import FleetReader, Lookup

_LANE_FULL = "too many large bodies wait to be read"
_T = TypeVar("_T")


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
    availability: Availability
    recovery: Recovery
    quarantine: Quarantine
    lookup: Lookup | None = None
    decisions: DecisionLog | None = None
    hold: Hold | None = None
    feedback: Feedback | None = None
    gate: Gate | None = None
    billing: Billing | None = None
    quotas: Quotas | None = None
    history: History | None = None
    admission: Admission | None = None
    recording: Recording | None = None
    shadow: ShadowPolicy | None = None
    canary: Canary | None = None


class Proxy:
    """Handles the inference paths."""

    def __init__(self, parts: ProxyParts) -> None:
        self._parts = self.parts = parts
        self.attempts = Attempts(parts, lambda: self.warm_ups is not None)
        self._hits = HitReports()
        self.access: AccessLog | None = None
        self.tracing: Tracing | None = None
        self.hedging: Hedging | None = None
        self.warm_ups: WarmUps | None = None
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
            method=request.method,
        )
        parent = request.headers.trace_parent
        if parent is not None:
            call.trace_id = parent.trace_id
        if self.tracing is not None:
            self.tracing.begin(call, parent, is_trusted=request.connection.is_trusted)
        self.open_requests += 1
        self._idle.clear()
        try:
            return await self._serve(request, call)
        except RouterError as error:
            call.status = error.status
            call.outcome = "refused" if isinstance(error, ClientError | ShedError) else "failed"
            if isinstance(error, ShedError) and parts.admission is not None:
                parts.admission.sheds.note(error, call.priority)
            return error_response(error, client_id or request_id)
        except Exception:
            call.status, call.outcome = RouterError.status, "failed"
            raise
        finally:
            self.open_requests -= 1
            if call.attempts:
                parts.recovery.ended(call)
            if call.slot is not None:
                call.slot.end(call.relayed.usage if call.relayed is not None else None)
            if call.rate is not None:
                call.rate.end(call.relayed.usage if call.relayed is not None else None)
            if not self.open_requests:
                self._idle.set()
            self._account(call)

    async def _serve(self, request: Request, call: Call) -> ClientStream:
        parts = self._parts
        call.body = await self._receive(request, call)
        call.body_bytes = len(call.body)
        began_s = parts.clock()
        prompt = await self._read(call.path, call.body)
        parts.recovery.admit(call, call.body, prompt.choices)
        call.routed, model = self._route(call, prompt), prompt.model
        del prompt  # an answer that goes on for long lets go of it
        if call.body_bytes > LARGE_BODY_BYTES:
            members = parts.fleet.candidates(model or None, parts.health)
            await parts.chooser.outlook.prepare(call.routed, members)
        if call.spans is not None:
            call.spans.step("receive", began_s)
            call.spans.step("read", parts.clock())
        tried: set[ReplicaId] = set()
        while True:
            if parts.lookup is not None:
                await self._look_up(parts.lookup, call.routed, tried)
            # A second try has waited enough.
            queue = None if call.attempts else self._queue_for(call.routed)
            if queue is None:
                choice = self._choose(call.routed, tried)
            else:
                choice = await self._hold(queue, call, call.routed)
                began_s += call.held_s
            parts.metrics.decided(choice.decision, parts.clock() - began_s)
            if call.spans is not None:
                self._trace_decision(call.spans, call, choice)
            if call.slot is not None:
                call.slot.charge(call.routed, choice.decision, call.body_bytes)
            if call.rate is not None:
                call.rate.charge(call.routed, call.body_bytes)
            answer = await self._try(request, call, choice, tried)
            if answer is not None:
                return answer
            began_s = parts.clock()

    def _trace_decision(self, spans: RequestSpans, call: Call, choice: Choice) -> None:
        parts = self._parts
        held_s = 0.0 if call.attempts else call.held_s
        policy = type((choice.decided_by or parts.chooser.decided_by).policy).__name__
        spans.decided(choice, held_s, policy, parts.reader.freshness()[0].value, parts.clock())

    async def _try(
        self, request: Request, call: Call, choice: Choice, tried: set[ReplicaId]
    ) -> ClientStream | None:
        """Return the answer of one attempt; None where another one is granted."""
        recovery = self._parts.recovery
        if call.attempts:
            recovery.began(call, choice.member.replica)
        try:
            if self.hedging is not None and self.hedging.covers(call):
                answer = await self.hedging.run(request, call, choice, tried)
                choice = call.choices[-1]
            else:
                answer = await self.attempts.run(request, call, choice)
        except ReplicaError as error:
            member = call.choices[-1].member
            await recovery.settle(error, call, call.body, member, tried, self.open_requests)
            return None
        except LeftAfterEndError:
            self._judge(call, call.choices[-1])
            raise
        self._judge(call, choice)
        return answer

    def _judge(self, call: Call, choice: Choice) -> None:
        """Note what an answer says of its replica: where all is well a good one says nothing."""
        parts, relayed = self._parts, call.relayed
        is_good = relayed is not None and relayed.status < BAD_REQUEST and relayed.outcome == "done"
        if not is_good or parts.availability.records or parts.quarantine.marked:
            parts.recovery.answered(call, call.body, choice.member)

    def _route(self, call: Call, prompt: ReadPrompt) -> Routed:
        """Return what is to be routed, with what its path and its tenant say of it."""
        routed = self._parts.chooser.route(prompt)
        if call.tenant is not None:
            routed.tenant, routed.scope = call.tenant.name, call.tenant.scope
        if self._parts.chooser.trial is not None and call.path in PREFIX_PATHS:
            routed.opening = opening_of(call.body)
        routed.can_pin = call.path not in UNPINNED_PATHS
        adapters = self._parts.fleet.adapters
        routed.is_loadable = adapters.loadable_base(prompt.model) is not None
        return routed

    async def _receive(self, request: Request, call: Call) -> bytes:
        """Return the body as it goes on: a tenant's has the salt of its scope, and no other."""
        gate, limits = self._parts.gate, self._parts.config.limits
        if gate is not None:
            call.tenant = gate.admit(request)
        if self._parts.admission is not None:
            self._parts.admission.enter(request, call, self.open_requests)
        if gate is None or call.tenant is None:
            body = await read_body(request, limits)
            is_named = may_name_session(body)
            return await self._worked(body, lambda: bounded_session(body)) if is_named else body
        if self._parts.quotas is not None:
            call.slot = self._parts.quotas.enter(call.tenant)
        tenant, body = call.tenant, await read_body(request, limits)
        return await self._worked(body, lambda: gate.salted(tenant, body, call.path))

    async def _worked(self, body: bytes, work: Callable[[], _T]) -> _T:
        """Return what ``work`` on ``body`` gives; where that is large, apart from the loop."""
        if len(body) <= LARGE_BODY_BYTES:
            return work()
        try:
            return await self._parts.prompts.lane.run(work)
        except LaneFullError:
            raise OverloadedError(_LANE_FULL) from None

    async def _read(self, path: str, body: bytes) -> ReadPrompt:
        try:
            if path in PREFIX_PATHS:
                prompt = await self._parts.prompts.read(path, body)
                if prompt.is_rough:
                    prompt = await self._parts.tokens.refined(path, body, prompt)
                return prompt
            is_json = path in JSON_PATHS or self._parts.gate is not None
            return await self._worked(body, lambda: read_plain(body, is_json=is_json))
        except BadPromptError as error:
            raise ClientError(str(error), param=error.field) from None
        except LaneFullError:
            raise OverloadedError(_LANE_FULL) from None

    async def _look_up(self, lookup: Lookup, routed: Routed, tried: set[ReplicaId]) -> None:
        """Ask the store what the candidates hold; ``_choose`` reads it without a wait between."""
        parts = self._parts
        candidates = parts.availability.candidates(routed.prompt.model or None, tried)
        await lookup.prepare(parts.chooser.questions(routed, candidates))

    def _choose(
        self, routed: Routed, tried: set[ReplicaId], decided: Decision | None = None
    ) -> Choice:
        parts = self._parts
        model = routed.prompt.model or None
        candidates = self._candidates(model, tried)
        choice = parts.chooser.choose(routed, candidates, decided)
        if choice is not None:
            choice.probe = parts.availability.enter(choice.member.replica)
            return choice
        known = parts.fleet.models(parts.health)
        if model is not None and known and model not in known and not routed.is_loadable:
            message = "model: expected one of the served models (GET /v1/models)"
            raise ModelNotFoundError(message, param="model")
        raise NoReplicaError(NONE_LEFT)

    def _candidates(self, model: str | None, tried: Collection[ReplicaId] = ()) -> Sequence[Member]:
        """Return those with a place; all, where none has one and the request goes all the same."""
        candidates = self._parts.availability.candidates(model, tried)
        admission = self._parts.admission
        if admission is None or not admission.has_replica_limits:
            return candidates
        return admission.with_place(candidates) or candidates

    def _queue_for(self, routed: Routed) -> Hold | None:
        """Return the queue where a request may have to wait; else raises InflightCapError."""
        hold, admission = self._parts.hold, self._parts.admission
        if hold is None:
            if admission is not None:
                admission.check(routed)
        elif (
            hold.is_always_asked
            or len(hold)
            or (admission is not None and (admission.has_replica_limits or admission.is_full))
        ):
            return hold
        return None

    async def _hold(self, hold: Hold, call: Call, routed: Routed) -> Choice:
        """Return the first choice of a request, for which it may have to wait its turn."""
        parts, model = self._parts, routed.prompt.model or None

        def peek() -> Decision | None:
            return parts.chooser.peek(routed, self._candidates(model))

        started_s = parts.clock()
        try:
            choice, call.held_s = await hold.choose(
                routed,
                peek,
                lambda decided: self._choose(routed, set(), decided),
                call.priority.rank,
            )
        except BaseException:
            call.held_s = parts.clock() - started_s
            raise
        return choice

    def _tell(self, call: Call, record: DecisionRecord) -> None:
        """Log and trace how the request ended, and keep what is hot in its prompt."""
        if self.access is not None:
            self.access.note(call, record)
        if self.tracing is not None:
            self.tracing.end(call, record)
        if self.warm_ups is not None:
            self.warm_ups.note(call)

    def _account(self, call: Call) -> None:
        """Record how the request ended: trace, metrics."""
        parts, routed = self._parts, call.routed
        usage = call.relayed.usage if call.relayed is not None else None
        if routed is not None:
            parts.tokens.check(routed.prompt, usage)
        record = record_of(parts, call, usage)
        parts.trace.add(record)
        parts.metrics.finished(record)
        self._tell(call, record)
        if parts.history is not None:
            parts.history.note(record, routed.arrival.prefix if routed is not None else b"")
        if parts.billing is not None:
            parts.billing.add(record)
        self._hits.note(call, usage)
        if parts.feedback is not None:
            parts.feedback.note(call, usage, record.tenant)
        if routed is not None and routed.trial is not None and parts.canary is not None:
            parts.canary.note(record, routed)
        if routed is not None and parts.decisions is not None:
            parts.decisions.add(record, call.choices, routed)
        if routed is not None and call.choices:
            if parts.recording is not None:
                parts.recording.note(record, call.choices[-1], routed)
            if parts.shadow is not None:
                parts.shadow.note(record.request_id, call.choices[0])
