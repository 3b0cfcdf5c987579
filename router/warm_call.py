"""One request of a warm-up: some more tokens of a kept prefix, and one token of an answer.

It counts as load like a client's request: by a lease that all routers see, and by what it takes up.
It is no client's: it is not counted as an arrival of its prefix, not billed, rated or traced, and
says nothing of a replica's health, speed or trust. In the recording it stands with its reason.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import Struct

from policies.prefill import PrefillCost
from router.error import ReplicaBusyError, ReplicaError
from router.header import kv_source_line, public_line, rank_line
from router.observer import parse_usage
from router.recording import Recorded
from router.upstream import fetch
from state.lease import Outcome
from state.placement import tip_of
from state.prefix import unpack_tokens

if TYPE_CHECKING:
    from collections.abc import Callable

    from router.chooser import Knowledge, Routed
    from router.fleet import Member
    from router.outlook import Outlook
    from router.recording import Recording
    from router.upstream import UpstreamPool
    from router.warm_text import KeptPrefix
    from state.model import ReplicaId

PATH: Final = "/v1/completions"
REQUEST_ID: Final = b"X-Request-Id: warmroute-%b\r\n"
ANSWER_S: Final = 120.0
"""A step that takes longer is given up."""
_OK: Final = 200
_BUSY: Final = frozenset({429, 503})
_SERVER_ERROR: Final = 500


class WarmEnd(enum.StrEnum):
    """How a request of a warm-up ended."""

    DONE = "done"
    BUSY = "busy"
    """The replica has no room: it is tried again later."""
    FAILED = "failed"
    REFUSED = "refused"
    """The replica does not take such a request: it will not later, either."""
    GAVE_WAY = "gave_way"
    """A client's request needs the replica, or it is no longer to be warmed."""


class WarmResult(Struct, frozen=True):
    """How it ended, and what the engine counted; None where it did not tell."""

    end: WarmEnd
    prompt_tokens: int | None = None
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmCallParts:
    """What it works with. ``prefill`` is what tokens cost, by the policy in force."""

    know: Knowledge
    outlook: Outlook
    pool: UpstreamPool
    prefill: Callable[[], PrefillCost | None]
    recording: Recording | None
    clock: Callable[[], float]
    unix_clock: Callable[[], float]


class WarmCalls:
    """Sends them; ``open`` counts those on each replica."""

    def __init__(self, parts: WarmCallParts) -> None:
        self._parts = parts
        self.open: Counter[ReplicaId] = Counter()

    async def send(
        self,
        kind: str,
        member: Member,
        text: KeptPrefix,
        end_tokens: int,
        held_tokens: int,
        source: Member | None,
    ) -> WarmResult:
        """Let ``member`` have the first ``end_tokens`` of ``text``, of which it holds some.

        Whatever happens, also a cancellation, what was taken for it is given back here.
        """
        parts, know = self._parts, self._parts.know
        routed, replica = text.routed(end_tokens), member.replica
        branch = parts.outlook.branch(routed, member)
        new_tokens = max(1, routed.prompt_tokens - held_tokens)
        cost = parts.prefill() or PrefillCost()
        now_s = parts.clock()
        began_unix_s = parts.unix_clock()
        lease = know.leases.acquire(
            replica,
            new_tokens,
            now_s,
            prefill_ms=cost.ms(new_tokens, held_tokens),
            tells_first=False,
            tip=tip_of(branch.chains),
        )
        block_tokens = branch.identity.block_tokens
        footprint = know.footprints.take(
            replica, branch.chains, block_tokens, routed.prompt_tokens, 1
        )
        book = know.pending.of(text.scope)
        placements = [book.place(replica, chain, now_s) for chain in branch.chains]
        self.open[replica] += 1
        result = WarmResult(WarmEnd.GAVE_WAY)
        try:
            result = await self._asked(kind, member, routed, source)
        finally:
            self.open[replica] -= 1
            footprint.end(None)
            lease.finish(Outcome.CANCELLED, parts.clock())
            for placement in placements:
                if result.end is WarmEnd.DONE:
                    book.await_news(placement, parts.clock())
                else:
                    book.withdraw(placement)
            self._record(kind, member, text, routed, held_tokens, result, began_unix_s)
        return result

    async def _asked(
        self, kind: str, member: Member, routed: Routed, source: Member | None
    ) -> WarmResult:
        prompt = routed.prompt
        fields = {
            "model": prompt.model,
            "prompt": unpack_tokens(prompt.prompts[0].packed),
            "max_tokens": 1,
            "temperature": 0,
        }
        if prompt.salt:
            fields["cache_salt"] = prompt.salt
        lines = REQUEST_ID % kind.replace("_", "-").encode()
        if source is not None:
            lines += kv_source_line(source.endpoint.authority)
        mark = self._parts.outlook.branch(routed, member).mark
        if mark is not None:
            lines += public_line(mark)
        if member.rank is not None:
            lines += rank_line(member.rank)
        body = msgspec.json.encode(fields)
        try:
            status, _, answer = await fetch(
                member.endpoint, PATH, self._parts.pool, ANSWER_S, body, lines
            )
        except ReplicaBusyError:
            return WarmResult(WarmEnd.BUSY)
        except ReplicaError:
            return WarmResult(WarmEnd.FAILED)
        if status == _OK:
            usage = parse_usage(answer)
            if usage is None:
                return WarmResult(WarmEnd.DONE)
            return WarmResult(WarmEnd.DONE, usage.prompt_tokens, usage.cached_tokens)
        if status in _BUSY:
            return WarmResult(WarmEnd.BUSY)
        return WarmResult(WarmEnd.FAILED if status >= _SERVER_ERROR else WarmEnd.REFUSED)

    def _record(
        self,
        kind: str,
        member: Member,
        text: KeptPrefix,
        routed: Routed,
        held_tokens: int,
        result: WarmResult,
        began_unix_s: float,
    ) -> None:
        recording = self._parts.recording
        if recording is None:
            return
        is_done = result.end is WarmEnd.DONE
        recording.add(
            Recorded(
                arrived_unix_s=began_unix_s,
                prompt_tokens=routed.prompt_tokens,
                replica=member.replica,
                reason=kind,
                predicted_cached_tokens=held_tokens,
                status=_OK if is_done else 0,
                outcome=result.end.value,
                duration_s=max(0.0, self._parts.unix_clock() - began_unix_s),
                cached_tokens=result.cached_tokens,
                model=text.model,
                tenant=text.tenant,
                block_tokens=text.block_tokens,
            )
        )
