"""The corpus of raw bytes, each case through a whole router process, on both event loops."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from support.corpus.case import row_of
from support.corpus.play import play_request, play_response
from support.corpus.request_case import REQUESTS
from support.corpus.response_case import RESPONSES
from support.corpus.row import BODY_LIMIT_BYTES
from support.stage import Actor, Stage, staged_router

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.asyncio(loop_scope="module")

ROWS_OF_REQUESTS = [
    *(f"H-{number:02}" for number in (*range(1, 22), *range(30, 38), *range(40, 45), 47, 48)),
    "L-05",
    "L-06",
]
ROWS_OF_RESPONSES = [
    *(f"H-{number:02}" for number in (17, 40, 41, 43, 45, 46, 47, 49, 50)),
    *(f"U-{number:02}" for number in range(1, 13)),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["uvloop", "asyncio"])
async def running(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stage]:
    async with staged_router(
        tmp_path_factory.mktemp("corpus"),
        [Actor("a")],
        router_flags=("--loop", request.param),
        paths=["/x"],
        limits={"body_bytes": BODY_LIMIT_BYTES},
        upstream={
            "first_byte_timeout_s": 2.0,
            "chunk_idle_timeout_s": 1.0,
            "pool_idle_s": 600.0,  # with no checks: what is closed was closed for what it said
        },
        retry={"after_send": "never"},  # what the one replica does is seen as it is
        health={"interval_s": 3600.0},
    ) as stage:
        yield stage


@pytest.fixture
def stage(running: Stage) -> Stage:
    running.reset()
    return running


@pytest.mark.parametrize("case_id", REQUESTS)
async def test_a_request_of_the_corpus_has_its_answer(stage: Stage, case_id: str) -> None:
    """Sections 2.1 to 2.3 and 2.5: H-01 to H-50, L-05, L-06."""
    await play_request(stage, REQUESTS[case_id])


@pytest.mark.parametrize("case_id", RESPONSES)
async def test_a_response_of_the_corpus_reaches_the_client_or_does_not(
    stage: Stage, case_id: str
) -> None:
    """Section 2.4 and the responses of 2.3: U-01 to U-12, H-40 to H-50."""
    await play_response(stage, RESPONSES[case_id])


async def test_the_corpus_has_a_case_of_every_row() -> None:
    assert len(REQUESTS) >= 150
    assert len(RESPONSES) >= 50
    for cases, rows in ((REQUESTS, ROWS_OF_REQUESTS), (RESPONSES, ROWS_OF_RESPONSES)):
        assert not set(rows) - {row_of(case.name) for case in cases.values()}
