"""Several routers on one fleet: a burst of prompts that nobody has is spread as through one."""

from __future__ import annotations

import pytest

from policies.expected_ttft import ExpectedTtft
from policies.hold import HoldSettings
from policies.weighted import Weighted
from replay.setting import FleetSettings
from support.field_trace import prompt_at, replay, shares

PROMPTS = 200
REPLICAS = 4
MOST_TO_MEAN = 1.3


@pytest.mark.parametrize("policy", [ExpectedTtft(), Weighted()], ids=["expected_ttft", "weighted"])
@pytest.mark.parametrize("routers", [1, 2, 8])
@pytest.mark.parametrize("burst_s", [0.0, 0.02, 0.5])
def test_routers_that_do_not_see_each_other_in_time_do_not_herd(
    policy: ExpectedTtft | Weighted, routers: int, burst_s: float
) -> None:
    """Equal costs, distinct prompts; leases of the others are 50 ms old."""
    requests = [
        prompt_at(number * burst_s / PROMPTS, (f"p{number}", 2_000), output_tokens=400)
        for number in range(PROMPTS)
    ]
    settings = FleetSettings(replicas=REPLICAS, routers=routers, hold=HoldSettings(enabled=False))
    run = replay(requests, policy, settings)
    assert len(run.outcomes) == PROMPTS
    got = shares(run)
    assert max(got) * REPLICAS / PROMPTS <= MOST_TO_MEAN, got
