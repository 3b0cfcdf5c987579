"""The signals that other routers decide on, as far as a view carries them.

Engine reports are as old as the last scrape and know nothing of what was sent since: rules that
use them herd. That is theirs, so leases are no help to them where an engine reports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from policies.load import mean_of

if TYPE_CHECKING:
    from policies.model import ReplicaView, RoutingRequest


def reported_waiting(fleet: tuple[ReplicaView, ...]) -> list[float]:
    """Return the requests that each engine reports as waiting, in fleet order.

    Unknown counts as the mean of the known ones; where no engine reports, the leases stand in.
    """
    reports = [view.waiting for view in fleet]
    known = [report for report in reports if report is not None]
    if not known:
        return [float(view.inflight) for view in fleet]
    unknown = sum(known) / len(known)
    return [unknown if report is None else float(report) for report in reports]


def reported_kv_use(fleet: tuple[ReplicaView, ...]) -> list[float]:
    """Return the used part of each engine's KV memory, in fleet order.

    Unknown counts as the mean of the known ones, and as 0 where no engine reports.
    """
    reports = [view.kv_used_fraction for view in fleet]
    known = [report for report in reports if report is not None]
    unknown = mean_of(known) if known else 0.0
    return [unknown if report is None else report for report in reports]


def confirmed_tokens(view: ReplicaView) -> int:
    """Return the prompt tokens that the replica's events say it holds in GPU memory."""
    return max(0, view.cached_tokens - view.pending_tokens)


def part_of_prompt(tokens: float, request: RoutingRequest) -> float:
    """Return the part of the prompt that ``tokens`` are, between 0 and 1."""
    return min(1.0, tokens / max(1, request.prompt_tokens))
