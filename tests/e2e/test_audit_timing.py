"""``warmroute audit`` against real routers: it passes, finds a leak, or says that it is void.

Few samples of times that lie far apart; ``make audit-timing`` draws as many as the method asks for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from support.fleet import MODEL
from support.guess_order import GUESSES, places
from support.tenant import key_of
from support.timing_stand import (
    ATTACKER,
    FRIEND,
    PARTNER,
    VICTIM,
    audit,
    audit_command,
    engines,
    predicted_tokens,
    reading_router,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from support.fleet import LocalFleet

pytestmark = pytest.mark.asyncio(loop_scope="module")

FEW = ("--samples", "20", "--repeats", "1", "--warm-up", "1", "--significance", "1e-4")
LONG = ("--words", "250")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LocalFleet]:
    async with engines(tmp_path_factory.mktemp("engines")) as running:
        yield running


async def test_tenants_see_their_own_cache_and_not_that_of_others(fleet: LocalFleet) -> None:
    """S-05: black box, and what the router predicted for each."""
    ended = await audit(fleet, *FEW, *LONG)
    assert (ended.status, ended.report is not None) == (0, True), ended.told
    assert ended.report is not None
    assert (ended.report.verdict, ended.report.controls_missed) == ("passed", 0)
    across, control = ended.report.repeats[0].across, ended.report.repeats[0].control
    assert control.known_median_ms < across.known_median_ms
    assert "passed: " in ended.told
    attackers = await predicted_tokens(fleet, ATTACKER)
    assert attackers == [0] * 42
    assert sum(tokens > 0 for tokens in await predicted_tokens(fleet, VICTIM)) == 21


async def test_a_cache_that_two_tenants_share_is_a_leak(fleet: LocalFleet) -> None:
    """S-05: the test of the test: two tenants of one group."""
    ended = await audit(fleet, *FEW, *LONG, of=(PARTNER, FRIEND))
    assert (ended.status, ended.report is not None) == (1, True), ended.told
    assert "leak: " in ended.told
    assert sum(tokens > 0 for tokens in await predicted_tokens(fleet, FRIEND)) == 21


async def test_where_nothing_is_cached_it_is_void(tmp_path: Path) -> None:
    """S-05: replicas that answer all at once, and prompts too short to be remembered."""
    async with reading_router(tmp_path) as router:
        ended = await audit(router, *FEW, "--words", "16")
    assert (ended.status, ended.report is not None) == (3, True), ended.told
    assert "void: " in ended.told


async def test_every_guess_is_answered_and_none_is_predicted(fleet: LocalFleet) -> None:
    """S-05: PromptPeek's guesses; make audit-timing counts the places of many trials."""
    [place] = await places(fleet, VICTIM, ATTACKER, 1)
    assert 0 <= place < GUESSES
    assert await predicted_tokens(fleet, ATTACKER, GUESSES + 1) == [0] * GUESSES


async def test_a_request_that_is_refused_ends_it_and_no_key_is_shown(fleet: LocalFleet) -> None:
    keys = {"FIRST": key_of(VICTIM), "SECOND": "sk-of-nobody"}
    named = ("--target", fleet.router.url, "--key-env", "FIRST", "--key-env", "SECOND")
    other = await audit_command(keys, *named, "--model", "other", *FEW)
    assert (other.status, "answered 404 to the key in $FIRST" in other.told) == (2, True)
    unknown = await audit_command(keys, *named, "--model", MODEL, *FEW)
    assert (unknown.status, "does not know the key in $SECOND" in unknown.told) == (2, True)
    assert "sk-" not in other.told + unknown.told
