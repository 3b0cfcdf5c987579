"""One attempt of a request on its chosen replica, and what goes there.

The lease that a choice takes is given back in the same block, however the stream ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from router.error import ReplicaBusyError, ReplicaError
from router.exchange import BUSY_STATUSES
from router.forecast import credits_of, promised_tokens
from router.long_answer import lighten
from router.packed_look import unpack
from router.relay import LeftAfterEndError, RelayRequest, relay
from router.retry import BUSY_WAIT_S
from router.server import DONE_PATHS
from router.span import attempt_attributes
from router.trace import Attempt
from router.tracing import with_parent
from state.lease import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from router.account import Call
    from router.chooser import Choice
    from router.proxy import ProxyParts
    from router.race import Lane
    from router.relay import Relayed
    from router.request import Request
    from router.wire import ClientStream

NAMES: Final = {outcome: outcome.value for outcome in Outcome}
OUTCOMES: Final = {name: outcome for outcome, name in NAMES.items()}
"""Kept, for an enumeration takes long to look its members and their values up."""
NO_STATUSES: frozenset[int] = frozenset()
DONE_MARKER = b"[DONE]"
"""Ends the streams of chat and text completions; other APIs have marks of their own."""
HEDGE_LOST: Final = "hedge_lost"
"""Ends an attempt when another one, of the same request, was first."""
RECEIPT_PREFIX = "x-warmroute-"


class Attempts:
    """Runs attempts with the proxy's parts."""

    def __init__(self, parts: ProxyParts, keeps_ids: Callable[[], bool] = lambda: False) -> None:
        self._parts = parts
        self._keeps_ids = keeps_ids

    async def run(
        self, request: Request, call: Call, choice: Choice, lane: Lane | None = None
    ) -> ClientStream:
        """Relay to the chosen replica; give back what the choice took, whatever happens.

        Where another attempt won in its ``lane`` the request's account is left to that one.
        """
        outcome = Outcome.CANCELLED
        reason: str | None = "client left"
        ttft_s: float | None = None
        span = call.spans.begin_attempt(self._parts.clock()) if call.spans is not None else None

        def on_first_byte() -> None:
            nonlocal ttft_s
            now_s = self._parts.clock()
            choice.first_byte(now_s)
            ttft_s = now_s - call.started_s
            if call.retry is not None:
                call.retry.end()
            if self._parts.hold is not None:
                self._parts.hold.wake()

        try:
            relayed = await relay(
                request,
                self._outbound(request, call, choice, span, lane),
                choice.member.endpoint,
                self._parts.pool,
                self._receipts(choice, call) + (call.rate.headers() if call.rate else ()),
                on_first_byte,
            )
        except ReplicaError as error:
            outcome, reason = Outcome.FAILED, error.code
            raise
        except LeftAfterEndError as left:
            outcome, reason = Outcome.DONE, None
            call.relayed, call.status, call.outcome = left.relayed, left.relayed.status, "done"
            raise
        else:
            outcome, reason = OUTCOMES[relayed.outcome], relayed.reason or None
            call.relayed, call.status, call.outcome = relayed, relayed.status, relayed.outcome
            return relayed.response
        finally:
            is_lost = lane is not None and lane.is_lost
            if is_lost:
                outcome, reason = Outcome.CANCELLED, HEDGE_LOST
            own = None if is_lost else call.relayed
            usage = own.usage if own is not None else None
            output_tokens = usage.completion_tokens if usage is not None else None
            choice.finish(
                outcome,
                had_first_byte=ttft_s is not None,
                output_tokens=output_tokens,
                now_s=self._parts.clock(),
            )
            self._give_way(choice, reason, own)
            if not is_lost:
                call.ttft_s = ttft_s
            call.choices.append(choice)
            self._note(call, choice, outcome, reason, span, lane)

    def _note(
        self,
        call: Call,
        choice: Choice,
        outcome: Outcome,
        reason: str | None,
        span: tuple[int, bytes] | None,
        lane: Lane | None,
    ) -> None:
        """Account the attempt that has ended."""
        unpack(choice)
        if span is not None and call.spans is not None:
            told = attempt_attributes(choice, NAMES[outcome], call.ttft_s)
            error = None if outcome is Outcome.DONE else reason
            call.spans.attempted(span[0], self._parts.clock(), told, error)
        call.attempts.append(
            Attempt(
                choice.decision,
                NAMES[outcome],
                reason,
                choice.kv_source.replica if choice.kv_source is not None else None,
                credits_of(call.routed),
                promised_tokens(call.routed, choice.member.replica),
                is_hedge=lane is not None and lane.is_hedge,
            )
        )

    def _give_way(self, choice: Choice, reason: str | None, relayed: Relayed | None) -> None:
        """Let others have the place that is free now, on a replica that may have less room."""
        if choice.limits is not None and _had_no_room(reason, relayed):
            choice.limits.dropped(choice.member.replica, self._parts.clock())
        if self._parts.hold is not None:
            self._parts.hold.wake()

    def _outbound(
        self,
        request: Request,
        call: Call,
        choice: Choice,
        span: tuple[int, bytes] | None = None,
        lane: Lane | None = None,
    ) -> RelayRequest:
        """Return what goes to the replica; a busy one is passed over once, if there are others.

        A tenant's own key, and whatever else names it, ends here.
        """
        lines: bytes | None = None
        if call.tenant is not None:
            lines = request.headers.nameless_lines + self._parts.pool.key_line
        if span is not None:
            lines = with_parent(request.headers.lines if lines is None else lines, span[1])
        has_others = (
            call.is_repeatable and not call.was_sent and len(choice.decision.candidates) > 1
        )
        first_byte_timeout_s = None
        if call.attempts:
            usual_s = self._parts.config.upstream.first_byte_timeout_s
            first_byte_timeout_s = self._parts.recovery.first_byte_timeout_s(call, usual_s)
        return RelayRequest(
            request.method,
            request.target,
            request.headers,
            call.body,
            call.client_request_id or call.request_id,
            DONE_MARKER if call.path in DONE_PATHS else None,
            BUSY_STATUSES if has_others else NO_STATUSES,
            raised_retry_after_s=BUSY_WAIT_S,
            can_replay=call.is_repeatable,
            may_replay=self._parts.recovery.may_replay,
            first_byte_timeout_s=first_byte_timeout_s,
            kv_source=choice.kv_source.endpoint if choice.kv_source is not None else None,
            mark=choice.mark,
            rank=choice.member.rank,
            lines=lines,
            lane=lane,
            on_long=lambda: lighten(
                call, request, choice, self._parts.quarantine, keeps_ids=self._keeps_ids()
            ),
        )

    def _receipts(self, choice: Choice, call: Call) -> tuple[tuple[str, str], ...]:
        """Return the opt-in headers that tell a client where its request went, and why."""
        is_shown = self._parts.config.receipts if call.tenant is None else call.tenant.receipts
        if not is_shown:
            return ()
        decision = choice.decision
        held: tuple[tuple[str, str], ...] = ()
        hold = self._parts.hold
        if (hold is not None and hold.is_always_asked) or call.held_s:
            held = ((f"{RECEIPT_PREFIX}held-ms", str(round(call.held_s * 1000.0))),)
        return (
            (f"{RECEIPT_PREFIX}request-id", call.request_id),
            (f"{RECEIPT_PREFIX}replica", decision.replica),
            (f"{RECEIPT_PREFIX}reason", decision.reason.value),
            (f"{RECEIPT_PREFIX}predicted-cached-tokens", str(decision.predicted_cached_tokens)),
            (
                f"{RECEIPT_PREFIX}predicted-lower-tier-tokens",
                str(decision.predicted_lower_tier_tokens),
            ),
            (f"{RECEIPT_PREFIX}rung", self._parts.reader.freshness()[0].value),
            *held,
        )


def _had_no_room(reason: str | None, relayed: Relayed | None) -> bool:
    """Return whether the replica said that it is busy, to the router or to the client."""
    return reason == ReplicaBusyError.code or (
        relayed is not None and relayed.status in BUSY_STATUSES
    )
