"""A slice of the grid: real traces, the virtual fleet, the default policy beside its rivals."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from replay.grid import CACHES, LOADS, POOLED, Cell, at_load, run_one
from replay.workload import WORKLOADS, read_workload
from support.data import data_directory

if TYPE_CHECKING:
    from replay.grid import Figures

pytestmark = pytest.mark.data
REQUESTS = 1_200
RIVALS = ("weighted", "mooncake", "llm_d_precise", "dynamo", "smg_event", "loadaware")
SIMPLE = ("least_loaded", "round_robin")


@pytest.fixture(scope="module")
def conversation() -> dict[str, Figures]:
    """Run one cell of the conversation trace."""
    requests, block_tokens = read_workload("conversation", data_directory() / "traces", REQUESTS, 0)
    paced = at_load(requests, block_tokens, 4, LOADS["saturating"])
    cell = Cell(workload="conversation", load="saturating", replicas=4, cache="S")
    names = (POOLED, "expected_ttft", "expected_ttft+queue", *RIVALS, *SIMPLE)
    return {name: run_one(cell, paced, block_tokens, name, 0) for name in names}


def test_the_default_policy_is_near_the_pooled_bound(conversation: dict[str, Figures]) -> None:
    bound, ours = conversation[POOLED], conversation["expected_ttft"]
    assert ours.mean_s <= 1.38 * bound.mean_s
    assert ours.p99_s <= 1.5 * bound.p99_s
    assert ours.failed == 0


@pytest.mark.parametrize("rival", RIVALS)
def test_no_rule_of_another_router_is_better_by_more_than_3_percent(
    rival: str, conversation: dict[str, Figures]
) -> None:
    best = min(conversation[name].mean_s for name in ("expected_ttft", "expected_ttft+queue"))
    assert best <= 1.03 * conversation[rival].mean_s


@pytest.mark.parametrize("simple", SIMPLE)
def test_balancing_alone_takes_much_longer(simple: str, conversation: dict[str, Figures]) -> None:
    assert conversation[simple].mean_s >= 1.3 * conversation["expected_ttft"].mean_s


def test_the_same_run_again_gives_the_same_figures(conversation: dict[str, Figures]) -> None:
    requests, block_tokens = read_workload("conversation", data_directory() / "traces", REQUESTS, 0)
    paced = at_load(requests, block_tokens, 4, LOADS["saturating"])
    cell = Cell(workload="conversation", load="saturating", replicas=4, cache="S")
    assert run_one(cell, paced, block_tokens, "expected_ttft", 0) == conversation["expected_ttft"]


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_workload_reads_and_keeps_its_order(workload: str) -> None:
    requests, block_tokens = read_workload(workload, data_directory() / "traces", 300, 1)
    assert len(requests) == 300
    assert block_tokens in (64, 512)
    times = [request.arrival_s for request in requests]
    assert times == sorted(times)
    for request in requests:
        assert len(request.chain) * block_tokens <= request.prompt_tokens


def test_the_caches_of_the_grid_hold_the_longest_prompt() -> None:
    longest = max(device for device, _ in CACHES.values())
    requests, _ = read_workload("synthetic", data_directory() / "traces", None, 0)
    assert max(one.prompt_tokens + one.output_tokens for one in requests) <= longest
