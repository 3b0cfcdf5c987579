"""One system prompt that all requests share: its load spreads, and its cache is used."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from support.conversation import Answered, ask, at_once, sdk
from support.fleet import MODEL, FleetPlan, LocalFleet
from support.tokenizer import write_tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

pytestmark = pytest.mark.asyncio(loop_scope="module")

WORKERS = 8
WARM_UP = 100
"""Requests until the prompt is known to be hot."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("model") / "tokenizer")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: Path
) -> AsyncIterator[LocalFleet]:
    plan = fleet_plan(tokenizer, WORKERS)
    async with LocalFleet(tmp_path_factory.mktemp("fleet"), plan) as running:
        yield running


def fleet_plan(tokenizer: Path, replicas: int) -> FleetPlan:
    return FleetPlan(
        replicas=replicas,
        tokenizer=tokenizer,
        preset="llama-8b-h100",
        speed_up=10,
        config={"receipts": True},
    )


def system_prompt(name: str, rules: int) -> str:
    """Return a prompt of some 22 tokens a rule."""
    return "\n".join(f"{name} {rule} for the lazy dog: cite your sources." for rule in range(rules))


async def serve(fleet: LocalFleet, prompt: str, requests: int, clients: int) -> list[Answered]:
    """Ask ``requests`` different questions under one system prompt."""

    async def one(number: int) -> Answered:
        question = f"{number} is my number. " + "fox jumps " * 20
        return await ask(client, MODEL, [("system", prompt), ("user", question)])

    async with sdk(fleet.router.url) as client:
        return await at_once(range(requests), clients, one)


def largest_share(answers: Sequence[Answered]) -> float:
    """Return the part of all requests that the busiest worker got."""
    return max(Counter(answered.replica for answered in answers).values()) / len(answers)


def hit_ratio(answers: Sequence[Answered]) -> float:
    """Return the part of all prompt tokens that was cached."""
    cached = sum(answered.cached_tokens for answered in answers)
    return cached / sum(answered.prompt_tokens for answered in answers)


async def test_a_thousand_requests_with_one_system_prompt_use_all_workers_and_their_caches(
    fleet: LocalFleet,
) -> None:
    """A14: after warm-up no worker gets more than 1.5 times its share."""
    answers = await serve(fleet, system_prompt("Rule", 138), requests=1000, clients=32)
    assert answers[0].prompt_tokens > 2_900
    assert largest_share(answers[WARM_UP:]) <= 1.5 / WORKERS
    assert hit_ratio(answers) > 0.85


async def test_a_paced_client_with_one_system_prompt_uses_all_workers_too(
    fleet: LocalFleet,
) -> None:
    """A02, B32: one request at a time never meets a queue, and still no worker is pinned."""
    answers = await serve(fleet, system_prompt("Law", 138), requests=900, clients=1)
    assert largest_share(answers[WARM_UP:]) <= 1.5 / WORKERS
    assert hit_ratio(answers) > 0.85


async def test_a_paced_client_with_a_short_system_prompt_does_not_pin_one_of_two_workers(
    tmp_path: Path, tokenizer: Path
) -> None:
    """A02: 450 requests, 600 shared tokens: at most three quarters to one, hits above 80 %."""
    async with LocalFleet(tmp_path, fleet_plan(tokenizer, 2)) as pair:
        answers = await serve(pair, system_prompt("Rule", 27), requests=450, clients=1)
    assert 550 < answers[0].prompt_tokens < 750
    assert largest_share(answers) <= 0.75
    assert hit_ratio(answers) > 0.8
