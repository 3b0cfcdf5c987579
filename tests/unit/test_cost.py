"""What fetching and computing are taken to cost, before and after something was seen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from sidecar.clock import StepCost, StepLoad
from sidecar.cost import FIRST_BYTES_PER_S, FIRST_LATENCY_MS, MeasuredCosts
from sidecar.runner import Outcome

if TYPE_CHECKING:
    from sidecar.tiers import SourceName

PAGE_BYTES = 50_000
PRIOR = StepCost(
    step_ms=1.0,
    prefill_token_ms=0.1,
    attention_pair_ms=1e-5,
    decode_sequence_ms=0.1,
    kv_token_read_ms=1e-5,
)


def assumed_ms(pages: int) -> float:
    return FIRST_LATENCY_MS["disk"] + 1e3 * pages * PAGE_BYTES / FIRST_BYTES_PER_S["disk"]


def test_before_anything_was_moved_the_assumptions_hold() -> None:
    costs = MeasuredCosts(PRIOR, PAGE_BYTES)
    assert costs.fetch_ms("disk", 10) == pytest.approx(assumed_ms(10))
    assert costs.fetch_ms("disk", 0) == 0


def test_one_slow_fetch_is_enough_to_expect_slow_ones_from_peers() -> None:
    costs = MeasuredCosts(PRIOR, PAGE_BYTES)
    before_ms = costs.fetch_ms("peer", 40)
    costs.observe_fetch("peer", 10, 20 * costs.fetch_ms("peer", 10) / 1e3)
    assert costs.fetch_ms("peer", 40) == pytest.approx(20 * before_ms)
    assert costs.fetch_ms("host", 40) < 1


def test_one_hiccup_of_memory_or_disk_is_not_believed() -> None:
    costs = MeasuredCosts(PRIOR, PAGE_BYTES)
    costs.observe_fetch("disk", 10, 20 * assumed_ms(10) / 1e3)
    assert costs.fetch_ms("disk", 40) == pytest.approx(assumed_ms(40))


@pytest.mark.parametrize(
    ("source", "seen"), [("disk", 3), ("disk", 10), ("peer", 1), ("peer", 2), ("peer", 3)]
)
def test_what_is_seen_is_what_is_expected_from_then_on(source: SourceName, seen: int) -> None:
    costs = MeasuredCosts(PRIOR, PAGE_BYTES)
    for _ in range(seen):
        costs.observe_fetch(source, 10, 0.250)
    assert costs.fetch_ms(source, 10) == pytest.approx(250, rel=0.01)


def test_a_hiccup_at_first_is_made_up_for() -> None:
    costs = MeasuredCosts(PRIOR, PAGE_BYTES)
    costs.observe_fetch("disk", 10, 10 * assumed_ms(10) / 1e3)
    for pages in (5, 10, 20, 40):
        costs.observe_fetch("disk", pages, assumed_ms(pages) / 1e3)
    assert costs.fetch_ms("disk", 10) == pytest.approx(assumed_ms(10), rel=0.1)


def test_loads_of_a_step_tell_about_the_host_and_its_compute_about_prefill() -> None:
    costs = MeasuredCosts(PRIOR, PAGE_BYTES)
    load = StepLoad(100, 5_050, 0, 0)
    for _ in range(4):
        costs.observe_step(load, Outcome(samples=(), load_s=0.040, compute_s=1.0), 10)
    assert costs.fetch_ms("host", 10) == pytest.approx(40, rel=0.01)
    assert costs.prefill_ms(100, 0) == pytest.approx(1_000, rel=0.15)
