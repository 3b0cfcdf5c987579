"""What a reader must know before believing a replay's figures: sentences, most serious first."""

from __future__ import annotations

from typing import TYPE_CHECKING

from replay.score import answered, percentile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from replay.concentration import SharingFacts
    from replay.outcome import ReplayRun
    from replay.score import Score

NO_SHARING = 0.02
FEW_PROMPTS = 5
FEW_REQUESTS = 200
QUARTER_REQUESTS = 10
"""Quarters of fewer requests than this tell no trend."""
OVERLOAD = 0.02
"""TTFT that grows by this much per second of arrivals: the load is so far above capacity."""


def warnings(run: ReplayRun, score: Score, sharing: SharingFacts) -> tuple[str, ...]:
    """Return the sentences that belong on top of the report; most replays of note have few."""
    if not run.outcomes:
        return ("No request ended: there is nothing to report.",)
    return (*_of_prompts(sharing), *_of_load(run), *_of_fleet(run), *_of_counts(score))


def _of_prompts(sharing: SharingFacts) -> Iterator[str]:
    possible = sharing.possible_hit_ratio
    if possible is not None:
        if possible < NO_SHARING:
            yield (
                f"At most {possible:.1%} of the prompt tokens repeat an earlier prompt's: "
                "no policy can show a gain on this trace."
            )
    elif (sharing.shared_request_share or 0) < NO_SHARING > (sharing.hit_ratio or 0):
        yield (
            f"Only {sharing.shared_request_share or 0:.1%} of the requests share a prefix with "
            "another one: no policy can show a gain on this trace."
        )
    prompts = sharing.repeated_prompts
    best = possible if possible is not None else sharing.hit_ratio
    few = max(1, min(FEW_PROMPTS, sharing.requests // 10))
    if prompts and prompts <= few and sharing.requests > 1 and (best is None or best > 0.5):  # noqa: PLR2004 - most of the tokens
        made = "One prompt makes" if prompts == 1 else f"{prompts} prompts make"
        yield f"{made} up 90 % of the requests: the hit ratio is a false maximum."


def _of_load(run: ReplayRun) -> Iterator[str]:
    growth = ttft_growth(run)
    if growth is not None and growth >= OVERLOAD:
        yield (
            f"Saturated: TTFT grows by {1000 * growth:,.0f} ms with every second of the trace, so "
            "that it depends on the trace's length."
        )


def ttft_growth(run: ReplayRun) -> float | None:
    """Return by how many seconds TTFT grows per second of arrivals, where it does to the end.

    It compares the medians of the quarters by arrival: the last must be twice the first and no less
    than the third, and that no less than the first. None where that is not so, or too few to tell.
    A load of 1 + x times the capacity makes waits grow by x.
    """
    known = sorted(
        (outcome.arrival_s, outcome.ttft_s)
        for outcome in answered(run.outcomes)
        if outcome.ttft_s is not None
    )
    size = len(known) // 4
    if size < QUARTER_REQUESTS:
        return None
    first, third, last = known[:size], known[2 * size : 3 * size], known[-size:]
    first_s, third_s, last_s = (
        percentile(sorted(ttft_s for _, ttft_s in quarter), 0.5) or 0.0
        for quarter in (first, third, last)
    )
    apart_s = last[size // 2][0] - first[size // 2][0]
    if apart_s <= 0 or last_s < 2 * first_s or not first_s <= third_s <= last_s:
        return None
    return (last_s - first_s) / apart_s


def _of_fleet(run: ReplayRun) -> Iterator[str]:
    if len(run.replicas) == 1:
        yield "A single replica: there is nothing to choose, so that policies are not compared."
    if run.evictions == 0:
        yield "Nothing was evicted: the cache was never full, so that its sizes are not compared."


def _of_counts(score: Score) -> Iterator[str]:
    if score.failed:
        yield (
            f"{score.failed:,} of {score.requests:,} requests failed: they are in no hit ratio and "
            "no percentile."
        )
    if score.hit_unknown_requests:
        yield (
            f"The engine did not tell the cached tokens of {score.hit_unknown_requests:,} answers: "
            "these are in no hit ratio."
        )
    if score.ttft.unknown:
        yield f"{score.ttft.unknown:,} answered requests have no known TTFT: they are in no time."
    if 0 < score.ttft.known < FEW_REQUESTS:
        yield f"Only {score.ttft.known:,} requests with a known TTFT: p99 is one or two of them."
