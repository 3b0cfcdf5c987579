"""A tenant that asks for several times what the fleet can do, and three that go on as before."""

from __future__ import annotations

import random
from functools import cache
from typing import TYPE_CHECKING

import pytest
from msgspec import structs

from policies.expected_ttft import ExpectedTtft
from policies.hold import HoldSettings
from replay.router import cost_at_speed_one
from replay.scenario import FLOOD, flood, of_tenant
from replay.setting import FleetSettings
from support.field_trace import prompt_at, random_times, replay

if TYPE_CHECKING:
    from collections.abc import Sequence

    from replay.outcome import Outcome, ReplayRun
    from replay.trace import TraceRequest

BEGIN_S, END_S = 8.0, 28.0
OURS = ExpectedTtft(prefill=cost_at_speed_one(FleetSettings()))
DIRECT = HoldSettings(enabled=False)
FAIR = HoldSettings(enabled=True, max_wait_s=60.0)
UNFAIR = HoldSettings(enabled=True, max_wait_s=60.0, is_fair=False)


def calm() -> list[TraceRequest]:
    """Return three tenants' prompts, ten a second: less than a third of what four replicas do."""
    draw = random.Random(5)
    asked = []
    for place, at_s in enumerate(random_times(6, 10.0, 320)):
        tokens = min(8_000, round(draw.lognormvariate(6.8, 0.9)) + 100)
        parts = ((f"s{draw.randrange(80)}", 512), (f"{at_s}", tokens))
        request = prompt_at(at_s, *parts, output_tokens=draw.randint(50, 250))
        asked.append(structs.replace(request, tenant=f"t{place % 3}"))
    return asked


def run(asked: Sequence[TraceRequest], hold: HoldSettings) -> ReplayRun:
    return replay(asked, OURS, FleetSettings(replicas=4, hold=hold))


@cache
def flooded(requests_per_s: float, prompt_tokens: int, hold: HoldSettings) -> ReplayRun:
    asked = flood(
        calm(),
        from_s=BEGIN_S,
        to_s=END_S,
        requests_per_s=requests_per_s,
        prompt_tokens=prompt_tokens,
    )
    return run(asked, hold)


def victims(found: ReplayRun) -> list[Outcome]:
    others = of_tenant(found, FLOOD, is_other=True)
    return [one for one in others if one.arrival_s >= BEGIN_S]


def mean(outcomes: Sequence[Outcome]) -> float:
    return sum(one.ttft_s or 0.0 for one in outcomes) / len(outcomes)


@pytest.mark.parametrize(
    ("requests_per_s", "prompt_tokens"), [(6.0, 20_000), (80.0, 700)], ids=["long", "short"]
)
def test_with_the_fair_queue_a_flood_hardly_hurts_the_others(
    requests_per_s: float, prompt_tokens: int
) -> None:
    before = mean(victims(run(calm(), DIRECT)))
    direct = flooded(requests_per_s, prompt_tokens, DIRECT)
    fair = flooded(requests_per_s, prompt_tokens, FAIR)
    assert mean(victims(direct)) > 8.0
    assert mean(victims(fair)) < mean(victims(direct)) / 10
    assert mean(victims(fair)) < before + 1.0
    assert max(one.held_s for one in victims(fair)) < 10.0


def test_turns_among_tenants_are_what_protects_from_a_flood_of_short_prompts() -> None:
    """Shortest first would let it go first."""
    fair, unfair = flooded(80.0, 700, FAIR), flooded(80.0, 700, UNFAIR)
    assert mean(victims(fair)) < 0.1 * mean(victims(unfair))


def test_the_flood_itself_is_answered_and_about_as_soon_as_the_fleet_can() -> None:
    direct, fair = flooded(6.0, 20_000, DIRECT), flooded(6.0, 20_000, FAIR)
    assert fair.span_s < 1.05 * direct.span_s
    assert mean(of_tenant(fair, FLOOD)) < 1.4 * mean(of_tenant(direct, FLOOD))


def test_the_victims_tenants_fare_alike() -> None:
    fair = flooded(80.0, 700, FAIR)
    means = [mean([one for one in victims(fair) if one.tenant == f"t{n}"]) for n in range(3)]
    assert max(means) < 2 * min(means)


def test_protection_ends_where_the_flood_outlasts_the_longest_wait() -> None:
    """Who has waited ``max_wait_s`` goes whatever the backlog: engines then queue first come."""
    patient = mean(victims(flooded(6.0, 20_000, FAIR)))
    hasty = mean(victims(flooded(6.0, 20_000, structs.replace(FAIR, max_wait_s=5.0))))
    assert hasty > 5 * patient
