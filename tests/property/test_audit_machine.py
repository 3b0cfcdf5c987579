"""A pool of sets lives a random life; its audit agrees, and finds whatever is altered in it."""

from __future__ import annotations

import random
from collections import Counter
from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from sidecar.audit import AuditFault, AuditReplay
from support.audit_model import (
    end_of,
    first_wrong,
    mutate,
    numbered,
    random_life,
)

if TYPE_CHECKING:
    from sidecar.journal import Transition

seeds = st.integers(0, 2**32)
lengths = st.integers(1, 60)


def fault_at(log: list[Transition]) -> int | None:
    """Return the index of the first transition that the audit does not believe."""
    replay = AuditReplay()
    for index, transition in enumerate(log):
        try:
            replay.feed(transition)
        except AuditFault as fault:
            return fault.line - 1 if fault.line == index + 1 else -1
    return None


@given(seed=seeds, length=lengths)
@settings(max_examples=150, deadline=None)
def test_the_audit_of_a_legal_life_agrees_with_the_pool(seed: int, length: int) -> None:
    log, pool = random_life(random.Random(seed), length)
    replay = AuditReplay()
    for transition in numbered([*log, pool.count(), pool.snapshot("rotated")]):
        replay.feed(transition)
    summary = replay.summary()
    for name, tier in pool.tiers.items():
        states = {state: n for state, n in summary.final_pages[name].items() if n}
        assert states == tier.totals()
        of_tenants = replay.tenant_pages(name)
        assert sum(sum(counts.values()) for counts in of_tenants.values()) == len(tier.taken)


@given(seed=seeds, length=lengths)
@settings(max_examples=400, deadline=None)
def test_an_altered_log_is_a_fault_exactly_where_it_is_not_legal(seed: int, length: int) -> None:
    """The altered log is numbered anew, so that only its meaning can give it away."""
    rng = random.Random(seed)
    log, pool = random_life(rng, length)
    altered = mutate(log, rng)
    wrong = first_wrong(altered)
    closing = pool.snapshot("rotated")
    if wrong is None and end_of(altered).snapshot("rotated") != closing:
        wrong = len(altered)
    assert fault_at(numbered([*altered, closing])) == wrong


@given(seed=seeds, length=lengths)
@settings(max_examples=100, deadline=None)
def test_a_line_that_is_lost_or_doubled_is_found_by_its_number(seed: int, length: int) -> None:
    rng = random.Random(seed)
    log = numbered(random_life(rng, length + 1)[0])
    at = rng.randrange(1, len(log) - 1) if len(log) > 2 else 1
    doubled = [*log[: at + 1], *log[at:]]
    assert fault_at(doubled) == at + 1
    if at + 1 < len(log):
        assert fault_at([*log[:at], *log[at + 1 :]]) == at


def test_most_alterations_change_what_the_log_means() -> None:
    """Else the tests above would prove little."""
    found = 0
    for seed in range(300):
        rng = random.Random(seed)
        log, pool = random_life(rng, 40)
        found += fault_at(numbered([*mutate(log, rng), pool.snapshot("rotated")])) is not None
    assert found > 150, found


def test_random_lives_visit_every_state_and_operation() -> None:
    operations: Counter[str] = Counter()
    states: Counter[str] = Counter()
    for seed in range(100):
        log, pool = random_life(random.Random(seed), 60)
        operations.update(each.op for each in log)
        states.update(state for tier in pool.tiers.values() for state in tier.totals())
    assert len(operations) == 17, operations
    assert len(states) == 6, states
