"""A fleet on a state server that a test may stop, freeze or empty; one per module."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from support.fleet import FleetPlan, LocalFleet
from support.tokenizer import write_tokenizer
from support.valkey import ValkeyProcess

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


@pytest.fixture(scope="module", name="valkey")
def running_valkey() -> Iterator[ValkeyProcess]:
    with ValkeyProcess() as server:
        yield server


@pytest.fixture(scope="module", name="state_url")
def url_of_valkey(valkey: ValkeyProcess) -> str:
    return valkey.url


@pytest_asyncio.fixture(scope="module", loop_scope="module", name="fleet")
async def fleet_on_valkey(
    tmp_path_factory: pytest.TempPathFactory, state_url: str
) -> AsyncIterator[LocalFleet]:
    folder = tmp_path_factory.mktemp("fleet")
    plan = FleetPlan(
        state_url=state_url,
        tokenizer=write_tokenizer(folder / "tokenizer"),
        config={"receipts": True, "seed": 7},
    )
    async with LocalFleet(folder, plan) as running:
        yield running
