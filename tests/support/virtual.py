"""Small traces for virtual fleets, and the bundled worker's scheduler as a reference engine."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from replay.trace import TraceRequest
from sidecar.cache import PagedCache
from sidecar.scheduler import Scheduler
from sidecar.scope import Place
from sidecar.step import SchedulerLimits, Sequence
from state.model import BlockId
from state.prefix import chain_of, pack_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence as Sequences

    from replay.setting import FleetSettings

ROOT = BlockId(b"root".ljust(16))
PAGE = 16


def request_of(
    arrival_s: float, tokens: Sequences[int], output_tokens: int, page_tokens: int = PAGE
) -> TraceRequest:
    """Return a request whose chain is that of its tokens."""
    return TraceRequest(
        arrival_s=arrival_s,
        prompt_tokens=len(tokens),
        output_tokens=output_tokens,
        chain=chain_of(ROOT, pack_tokens(tokens), page_tokens, 0),
    )


def random_prompts(seed: int, count: int, *, gap_s: float) -> list[tuple[float, list[int], int]]:
    """Return (arrival, tokens, output tokens) of prompts that share beginnings."""
    rng = random.Random(seed)
    now_s = 0.0
    found = []
    for _ in range(count):
        now_s += rng.expovariate(1 / gap_s)
        family = rng.randrange(4)
        shared = [family * 1_000 + place for place in range(rng.choice((0, 40, 96, 200)))]
        own = [rng.randrange(10_000, 90_000) for _ in range(rng.randrange(1, 150))]
        found.append((now_s, shared + own, rng.randrange(1, 40)))
    return found


def requests_of(prompts: Sequences[tuple[float, list[int], int]]) -> list[TraceRequest]:
    """Return prompts as a trace."""
    return [request_of(arrival_s, tokens, output) for arrival_s, tokens, output in prompts]


def reference_run(
    prompts: Sequences[tuple[float, list[int], int]], settings: FleetSettings
) -> list[tuple[float, float, int]]:
    """Return (first token, end, cached tokens) of each prompt on the worker's own scheduler."""
    cache = PagedCache(settings.capacity_tokens // PAGE, PAGE)
    limits = SchedulerLimits(
        max_sequences=settings.max_sequences, max_step_tokens=settings.step_tokens
    )
    scheduler = Scheduler(cache, limits)
    coming = list(enumerate(prompts))
    places: dict[int, int] = {}
    sequences: list[Sequence | None] = [None] * len(prompts)
    first_s, end_s = [0.0] * len(prompts), [0.0] * len(prompts)
    now_s = 0.0
    while coming or scheduler.has_work:
        if not scheduler.has_work:
            now_s = max(now_s, coming[0][1][0])
        while coming and coming[0][1][0] <= now_s:
            place, (_, tokens, output) = coming.pop(0)
            sequence = scheduler.submit(cache.open_table(pack_tokens(tokens), Place(ROOT)), output)
            sequences[place], places[id(sequence)] = sequence, place
        step = scheduler.schedule(now_s)
        now_s += settings.cost.step_s(step.load())
        for sequence in scheduler.complete(step):
            place = places[id(sequence)]
            scheduler.append(sequence, 200_000 + place)
            if sequence.output_tokens == 1:
                first_s[place] = now_s
            if sequence.output_tokens == sequence.max_output_tokens:
                end_s[place] = now_s
                scheduler.end(sequence)
    cached = [one.cached_tokens or 0 for one in sequences if one is not None]
    return list(zip(first_s, end_s, cached, strict=True))
