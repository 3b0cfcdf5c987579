"""The grid's workloads, made of the shared traces: a name, and requests at their own pace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from replay.format import open_trace
from replay.transform import cloned, limit, with_arrivals_of, with_jitter

if TYPE_CHECKING:
    from pathlib import Path

    from replay.trace import TraceRequest

WORKLOADS: Final = ("conversation", "synthetic", "agents", "azure")
TRACE_QUANTUM_S: Final = 3.0
"""The clock of the conversation trace ticks so seldom."""
AGENT_CALLS: Final = 10_000


def read_workload(
    name: str, traces: Path, requests: int | None, seed: int
) -> tuple[list[TraceRequest], int]:
    """Return a workload's requests, at most so many, and the tokens of its blocks.

    ``conversation`` and ``synthetic`` are Mooncake's traces; ``agents`` are coding-agent sessions,
    copied with distinct roots until there are 10,000 calls; ``azure`` has Azure's arrivals and
    lengths on the prefixes of the conversation trace.
    """
    conversation = open_trace(traces / "mooncake_conversation_trace.jsonl.zst")
    match name:
        case "conversation":
            found = list(with_jitter(conversation, TRACE_QUANTUM_S, seed))
            size = conversation.block_tokens
        case "synthetic":
            trace = open_trace(traces / "mooncake_synthetic_trace.jsonl.zst")
            found, size = list(trace), trace.block_tokens
        case "agents":
            calls = open_trace(traces / "miniswe_agent_calls.jsonl.zst")
            once = sum(1 for _ in calls)
            found = list(cloned(calls, -(-AGENT_CALLS // once), seed, within_s=1800.0))
            size = calls.block_tokens
        case "azure":
            azure = open_trace(traces / "azure2023_conv.csv.zst")
            chains = open_trace(traces / "mooncake_conversation_trace.jsonl.zst")
            size = chains.block_tokens
            found = list(with_arrivals_of(chains, azure, size))
        case _:
            message = f"workload: expected one of {', '.join(WORKLOADS)}, got {name!r}"
            raise ValueError(message)
    return (found if requests is None else list(limit(found, requests))), size
