"""A whole trace in virtual time on a virtual fleet, with the router's own policy and books."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from policies.model import Policy
    from replay.outcome import ReplayRun
    from replay.setting import FleetSettings
    from replay.trace import TraceRequest


def simulate(
    requests: Iterable[TraceRequest],
    block_tokens: int,
    policy: Policy,
    settings: FleetSettings,
    *,
    trace_name: str = "",
) -> ReplayRun:
    """Replay ``requests``, which come by arrival; the same input gives the same run."""
    raise NotImplementedError
