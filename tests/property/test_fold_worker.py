"""Folding the bundled worker's own events: the index must equal the worker's prefix tree."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from sidecar.cache import PagedCache
from sidecar.event import decode_batch
from sidecar.fold import PageFolder
from sidecar.publisher import EventEncoding, EventFormat, HashForm
from sidecar.scheduler import Scheduler
from sidecar.scope import Place
from sidecar.step import SchedulerLimits, Sequence
from state.model import ModelIdentity, Tier
from state.prefix import chain_root, namespace_of, pack_tokens

PAGE_TOKENS = 4
POOL_PAGES = 24
IDENTITY = ModelIdentity(model="m", block_tokens=PAGE_TOKENS)
PLACE = (namespace_of(IDENTITY), Tier.GPU)


@dataclass(slots=True)
class Load:
    """Prompts that share prefixes, some of them whole multiples of a page."""

    rng: random.Random

    def prompt(self) -> bytes:
        shared = [self.rng.randrange(3)] * self.rng.choice([4, 8, 16, 30])
        own = [self.rng.randrange(2) for _ in range(self.rng.choice([0, 0, 4, 7]))]
        return pack_tokens(shared + own)


@pytest.mark.parametrize("encoding", ["map", "array"])
@pytest.mark.parametrize("hashes", ["int", "bytes"])
@pytest.mark.parametrize("seed", range(8))
def test_the_index_equals_the_workers_tree(
    seed: int, hashes: HashForm, encoding: EventEncoding
) -> None:
    """A81, B24: with copies, evictions, preemptions, aborts and resets."""
    rng = random.Random(seed)
    load = Load(rng)
    cache = PagedCache(POOL_PAGES, PAGE_TOKENS)
    limits = SchedulerLimits(max_sequences=6, max_step_tokens=24, max_sequence_tokens=120)
    scheduler = Scheduler(cache, limits)
    event_format = EventFormat(page_tokens=PAGE_TOKENS, hashes=hashes, encoding=encoding)
    folder = PageFolder(IDENTITY, PAGE_TOKENS, capacity_pages=POOL_PAGES)
    live: list[Sequence] = []
    most_copies = 0
    for step_number in range(400):
        if rng.random() < 0.5:
            table = cache.open_table(load.prompt(), Place(chain_root(IDENTITY, 0)))
            live.append(scheduler.submit(table, 40))
        step = scheduler.schedule()
        for sequence in scheduler.complete(step):
            scheduler.append(sequence, rng.randrange(2))
            if sequence.output_tokens >= 40 or rng.random() < 0.08:
                scheduler.end(sequence)
        if live and rng.random() < 0.05:
            scheduler.end(live[rng.randrange(len(live))])
        if step_number % 150 == 149:
            cache.reset()
        payload = event_format.batch(cache.drain_changes(), 1.0)
        folder.apply(decode_batch(payload).events)
        copies = cache.tree.copies()
        most_copies = max(most_copies, *copies.values(), 0)
        assert folder.resident().get(PLACE, set()) == set(copies)
    assert most_copies > 1
    assert scheduler.counters.preemptions > 0
    assert folder.counts.overflows == 0
