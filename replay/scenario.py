"""Traffic that goes wrong: a crowd that comes at once for one prompt, a tenant that floods."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Final

import xxhash
from msgspec import structs

from replay.trace import TraceRequest
from state.model import BlockId

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from replay.outcome import Outcome, ReplayRun

CROWD: Final = "crowd"
FLOOD: Final = "flood"


def named_chain(name: str, blocks: int) -> tuple[BlockId, ...]:
    """Return a chain of its own for ``name``."""
    return tuple(
        BlockId(xxhash.xxh3_128_digest(f"{name}/{depth}".encode())) for depth in range(blocks)
    )


def flash_crowd(
    requests: Iterable[TraceRequest],
    block_tokens: int,
    *,
    from_s: float,
    share: float = 0.5,
    prefix_tokens: int = 30_000,
    own_tokens: int = 200,
    seed: int = 0,
) -> list[TraceRequest]:
    """Return the requests, of which ``share`` begin from ``from_s`` on with one new prefix.

    They have ``own_tokens`` behind it and are of the tenant ``CROWD``.
    """
    draw = random.Random(seed)  # noqa: S311 - reproducible, not secret
    crowd = named_chain("crowd", prefix_tokens // block_tokens)
    changed = []
    for request in requests:
        if request.arrival_s >= from_s and draw.random() < share:
            request = structs.replace(  # noqa: PLW2901 - the same request, of the crowd
                request, chain=crowd, prompt_tokens=prefix_tokens + own_tokens, tenant=CROWD
            )
        changed.append(request)
    return changed


def flood(
    requests: Iterable[TraceRequest],
    *,
    from_s: float,
    to_s: float,
    requests_per_s: float,
    prompt_tokens: int = 20_000,
    output_tokens: int = 50,
    seed: int = 0,
) -> list[TraceRequest]:
    """Return the requests and, between two times, those of a tenant who shares nothing."""
    draw = random.Random(seed)  # noqa: S311 - reproducible, not secret
    added = []
    now_s = from_s
    while now_s < to_s:
        added.append(
            TraceRequest(
                arrival_s=now_s,
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
                chain=(),
                tenant=FLOOD,
            )
        )
        now_s += draw.expovariate(requests_per_s)
    return sorted([*requests, *added], key=lambda request: request.arrival_s)


def inflight_at(run: ReplayRun, at_s: float) -> dict[str, int]:
    """Return how many requests each replica had at a time, those held in the router not."""
    counts = dict.fromkeys(run.replicas, 0)
    for one in run.outcomes:
        sent_s = one.arrival_s + one.held_s
        if one.replica and sent_s <= at_s < one.arrival_s + one.duration_s:
            counts[one.replica] += 1
    return counts


def worst_crowding(run: ReplayRun, times_s: Sequence[float]) -> float:
    """Return the highest ratio of a replica's requests in flight to the mean, over the times."""
    worst = 0.0
    for at_s in times_s:
        counts = inflight_at(run, at_s).values()
        mean = sum(counts) / len(counts)
        worst = max(worst, max(counts) / mean) if mean >= 1 else worst
    return worst


def of_tenant(run: ReplayRun, tenant: str, *, is_other: bool = False) -> list[Outcome]:
    """Return the outcomes of a tenant, or of all others."""
    return [one for one in run.outcomes if (one.tenant == tenant) is not is_other]
