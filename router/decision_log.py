"""The log of decisions: what the policy saw, what it answered and what came of it, as JSON lines.

A record is made when its request has ended. Nothing waits for the disk: what it does not take in
time is dropped and counted. No prompt text, no tokens. ``replay.decision`` reads it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct, structs
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from policies.draw import draw_below
from policies.model import Decision, ReplicaView, RoutingRequest
from router.adapter import announced_of
from router.branch import branch_under
from router.line_log import LineLog
from router.log_file import LogFile
from router.outlook import BYTES_PER_TOKEN
from router.packer import Packer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from prometheus_client import Metric

    from policies.model import Policy
    from router.chooser import Choice, DecidedBy, Routed
    from router.trace import DecisionRecord

VERSION: Final = 1
SAMPLE_STREAM: Final = 0x5A
"""The stream of draws that no policy uses."""
SAMPLE_STEPS: Final = 1 << 32


class DecisionLogSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where decisions are logged; not at all without ``path``.

    A file holds at most ``max_bytes``, and ``keep_files`` older ones stay beside it. ``sample`` is
    the share of requests that is logged. ``chains`` adds the ids of each prompt's blocks: with them
    the log is a trace to replay. ``compress``: older files become ``.zst``.
    """

    path: str | None = None
    max_bytes: Annotated[int, Meta(ge=1 << 20)] = 256 << 20
    keep_files: Annotated[int, Meta(ge=1, le=1_000)] = 4
    sample: Annotated[float, Meta(ge=0, le=1)] = 1.0
    chains: bool = False
    compress: bool = True


class LogHeader(Struct, frozen=True, kw_only=True):
    """The first line of a file, and of each change: whose decisions follow, by which policy."""

    warmroute: str = "decisions"
    version: int = VERSION
    router: str
    policy: Any
    sample: float
    chains: bool
    started_unix_s: float
    settings_version: int = 0


class LoggedPrompt(Struct, frozen=True):
    """One prompt of a request: its tokens, and the 16-byte ids of its full blocks, joined."""

    tokens: int
    chain: bytes


class LoggedResult(Struct, frozen=True, kw_only=True):
    """How a request ended; tokens as the engine counted them. Unknown is None.

    ``held_s`` of the time it waited in the router.
    """

    status: int
    outcome: str
    ttft_s: float | None
    held_s: float
    duration_s: float
    prompt_tokens: int | None
    cached_tokens: int | None
    output_tokens: int | None


class LoggedDecision(Struct, frozen=True, kw_only=True):
    """One decision. Only the last one of a request has a ``result``: that of the whole request.

    ``ended`` and ``error`` tell of this attempt. ``block_tokens`` are those of one id in a chain.
    ``settings_version`` is that of the header above it. ``side`` is that of a canary: the header
    above a decision of its candidate has that one's policy.
    """

    id: str
    arrived_unix_s: float
    attempt: int
    model: str | None
    is_exact: bool
    unroutable: str | None
    request: RoutingRequest
    views: tuple[ReplicaView, ...]
    decision: Decision
    ended: str
    error: str | None
    kv_source: str | None
    result: LoggedResult | None = None
    block_tokens: int | None = None
    prompts: tuple[LoggedPrompt, ...] | None = None
    settings_version: int = 0
    side: str | None = None


class DecisionLog(Collector):
    """Takes decisions on the event loop; ``lines`` writes them, until it is closed."""

    def __init__(
        self,
        settings: DecisionLogSettings,
        path: Path,
        header: LogHeader,
        clock: Callable[[], float],
    ) -> None:
        line = msgspec.json.encode(header) + b"\n"
        packer = Packer(path, settings.keep_files) if settings.compress else None
        file = LogFile(path, line, settings.max_bytes, settings.keep_files, packer)
        self.lines = LineLog(
            "decision log", str(path), file, clock, header=line, begin_with=file.begin_with
        )
        self._header = header
        self._decided_by: DecidedBy | None = None
        self._sample = settings.sample
        self._has_chains = settings.chains

    @property
    def dropped(self) -> int:
        """Decisions that were not logged although they were to be."""
        return self.lines.dropped

    @property
    def written(self) -> int:
        """Decisions that are in the file."""
        return self.lines.written

    def collect(self) -> Iterable[Metric]:
        """Yield both counts in Prometheus form."""
        for name, text, count in (
            ("written", "Decisions written to the decision log.", self.written),
            ("dropped", "Decisions that the log could not take.", self.dropped),
        ):
            yield CounterMetricFamily(f"warmroute_decision_log_{name}", text, value=float(count))

    def add(self, record: DecisionRecord, choices: Sequence[Choice], routed: Routed) -> None:
        """Log the decisions of a request that has ended: one for each attempt."""
        for number, choice in enumerate(choices, 1):
            request = choice.request
            if request is None or not self._is_sampled(request) or not self.lines.has_room():
                continue
            decision = logged(record, number, choice, request)
            if self._has_chains:
                decision = with_chains(decision, choice, routed)
            if choice.decided_by is not self._decided_by and choice.decided_by is not None:
                self._follow(choice.decided_by)
            self.lines.append(decision)

    def _follow(self, decided_by: DecidedBy) -> None:
        """Let a header go before decisions by another rule, or by other settings.

        Requests end in another order than they were decided in: it may go to and fro for a while.
        """
        self._decided_by = decided_by
        header = structs.replace(
            self._header,
            policy=msgspec.to_builtins(decided_by.policy),
            settings_version=decided_by.settings_version,
        )
        self.lines.follow(msgspec.json.encode(header) + b"\n")

    async def run(self) -> None:
        """Hand over what waits until cancelled."""
        await self.lines.run()

    async def close(self) -> None:
        """Write the rest; what comes later is dropped."""
        await self.lines.close()

    def _is_sampled(self, request: RoutingRequest) -> bool:
        if self._sample >= 1.0:
            return True
        return draw_below(SAMPLE_STEPS, request, SAMPLE_STREAM) < self._sample * SAMPLE_STEPS


def open_decision_log(
    settings: DecisionLogSettings,
    policy: Policy,
    router: str,
    *,
    clock: Callable[[], float],
    unix_s: float,
) -> DecisionLog | None:
    """Return the log of ``router`` that the settings ask for; None without a path."""
    if settings.path is None:
        return None
    header = LogHeader(
        router=router,
        policy=msgspec.to_builtins(policy),
        sample=settings.sample,
        chains=settings.chains,
        started_unix_s=unix_s,
    )
    return DecisionLog(settings, Path(settings.path), header, clock)


def logged(
    record: DecisionRecord, number: int, choice: Choice, request: RoutingRequest
) -> LoggedDecision:
    """Return what is logged of attempt ``number``, without chains."""
    attempt = record.attempts[number - 1]
    result = None
    if number == len(record.attempts):
        result = LoggedResult(
            status=record.status,
            outcome=record.outcome,
            ttft_s=record.ttft_s,
            held_s=record.held_s,
            duration_s=record.duration_s,
            prompt_tokens=record.reported_prompt_tokens,
            cached_tokens=record.reported_cached_tokens,
            output_tokens=record.reported_output_tokens,
        )
    return LoggedDecision(
        id=record.request_id,
        arrived_unix_s=record.started_unix_s,
        attempt=number,
        model=record.model,
        is_exact=record.is_exact,
        unroutable=record.unroutable,
        request=request,
        views=choice.views,
        decision=choice.decision,
        ended=attempt.outcome,
        error=attempt.error,
        kv_source=attempt.kv_source,
        result=result,
        settings_version=choice.decided_by.settings_version if choice.decided_by else 0,
        side=choice.side.value if choice.side is not None else None,
    )


def with_chains(decision: LoggedDecision, choice: Choice, routed: Routed) -> LoggedDecision:
    """Return ``decision`` with the ids of the prompt's blocks on the chosen replica."""
    found = logged_prompts(choice, routed)
    if found is None:
        return decision
    block_tokens, prompts = found
    return structs.replace(decision, block_tokens=block_tokens, prompts=prompts)


def logged_prompts(choice: Choice, routed: Routed) -> tuple[int, tuple[LoggedPrompt, ...]] | None:
    """Return the tokens of a block of the chosen replica, and each prompt's blocks by their ids."""
    announced = announced_of(routed, choice.member) if routed.is_exact else None
    units = 1 if routed.is_exact else BYTES_PER_TOKEN
    branch = branch_under(routed, announced, choice.mark)
    if branch is None:
        return None
    prompts = zip(routed.prompt.prompts, branch.chains, strict=True)
    return branch.identity.block_tokens // units, tuple(
        LoggedPrompt(prompt.count // units, b"".join(chain)) for prompt, chain in prompts
    )
