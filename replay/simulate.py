"""A whole trace in virtual time on a virtual fleet, with the router's own policy and books."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from replay.fleet import Fleet
from replay.outcome import ReplayRun
from replay.sharing import Sharing

if TYPE_CHECKING:
    from collections.abc import Iterable

    from policies.model import Policy
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
    """Replay ``requests``, which come by arrival; the same input gives the same run.

    All of them are held in memory, about 2 KB each.
    """
    listed = list(requests)
    sharing = Sharing(listed)
    fleet = Fleet(listed, block_tokens, policy, settings, sharing)
    was_enabled = gc.isenabled()
    gc.disable()  # a run makes millions of short-lived values, and no cycles
    try:
        fleet.run()
    finally:
        if was_enabled:
            gc.enable()
    outcomes = [outcome for outcome in fleet.outcomes if outcome is not None]
    memories = [engine.memory for engine in fleet.engines]
    for memory in memories:
        memory.note_time(fleet.now_s)
    kind = getattr(type(policy), "__struct_config__", None)
    return ReplayRun(
        trace=trace_name,
        policy=kind.tag if kind is not None else type(policy).__name__,
        replicas=tuple(f"r{place:02d}" for place in range(settings.replicas)),
        outcomes=tuple(outcomes),
        span_s=fleet.now_s,
        token_ms=settings.cost.prefill_token_ms,
        attention_pair_ms=settings.cost.attention_pair_ms,
        kv_bytes_per_token=settings.kv_bytes_per_token,
        resident_tokens_s=sum(memory.resident_tokens_s for memory in memories),
        evictions=sum(memory.evictions for memory in memories),
        seed=settings.seed,
    )
